"""Columns made of images, batch by batch, each batch of one shape."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend, BackendName, backend_of, get_backend

__all__ = ["in_batches"]

# Copies of so many full-size images fit beside a partition.
_BATCH_SIZE = 32


def in_batches(
    frame: Any,
    function: Callable[..., Mapping[str, Any]],
    outputs: Mapping[str, str],
    **options: Any,
) -> Any:
    """``frame`` with the ``outputs`` that a function makes of its images, which are kept.

    ``function(images, backend, **options)`` takes uint8 (n, height, width, channels), of 1 or 3
    channels, and gives an array or a list for each output.
    """
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    backend = backend_of(meta).name
    by_shape = functools.partial(_by_shape, function=function, backend=backend, options=options)
    return frame.images.map_batches(by_shape, outputs, batch_size=_BATCH_SIZE, keep_image=True)


def _by_shape(
    images: Any,
    function: Callable[..., Mapping[str, Any]],
    backend: BackendName,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    groups = [image[None] for image in images] if isinstance(images, list) else [images]
    for group in groups:
        if group.shape[3] not in (1, 3):
            raise ArgumentError(
                f"an image has {group.shape[3]} channels: curate takes images of 1 or 3, as they "
                "are read"
            )
    library = get_backend(backend)
    made = [function(group, library, **options) for group in groups]
    return {name: _joined([each[name] for each in made], library) for name in made[0]}


def _joined(parts: list[Any], backend: Backend) -> Any:
    if isinstance(parts[0], list):
        return [value for part in parts for value in part]
    return backend.numpy.concatenate(parts)
