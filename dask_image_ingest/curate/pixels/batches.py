"""Columns made of images, batch by batch, whatever their shapes are."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend, BackendName, backend_of, get_backend

# Copies of so many full-size images fit beside a partition.
_BATCH_SIZE = 32

# On the host as many at once as fit in the caches, where sums of rows take a third of the time.
_AT_ONCE = 4


def in_batches(
    frame: Any,
    function: Callable[..., Mapping[str, Any]],
    outputs: Mapping[str, str],
    **options: Any,
) -> Any:
    """``frame`` with the ``outputs`` that a function makes of its images, which are kept.

    Columns of these names are replaced.

    ``function(groups, backend, **options)`` takes a list of images in groups of one shape, uint8
    (n, height, width, channels), all of 1 or all of 3 channels, and gives an array or a list for
    each output: a value for each image, in order.
    """
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    backend = backend_of(meta).name
    by_channels = functools.partial(
        _by_channels, function=function, backend=backend, options=options
    )
    there = [name for name in outputs if name in frame.columns]
    frame = frame.drop(columns=there) if there else frame
    return frame.images.map_batches(by_channels, outputs, batch_size=_BATCH_SIZE, keep_image=True)


def _by_channels(
    images: Any,
    function: Callable[..., Mapping[str, Any]],
    backend: BackendName,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    library = get_backend(backend)
    if isinstance(images, list):
        groups = [image[None] for image in images]
    elif library.numpy is np:
        groups = [images[start : start + _AT_ONCE] for start in range(0, len(images), _AT_ONCE)]
    else:
        groups = [images]
    for group in groups:
        if group.dtype != np.uint8:
            raise ArgumentError(
                f"an image is of {group.dtype}: curate takes values of uint8, as mode='RGB' and "
                "mode='L' give them"
            )
        if group.shape[3] not in (1, 3):
            raise ArgumentError(
                f"an image has {group.shape[3]} channels: curate takes images of 1 or 3, as they "
                "are read"
            )
    alike = [list(same) for _, same in itertools.groupby(groups, lambda group: group.shape[3])]
    made = [function(same, library, **options) for same in alike]
    return {name: _joined([each[name] for each in made], library) for name in made[0]}


def _joined(parts: list[Any], backend: Backend) -> Any:
    if isinstance(parts[0], list):
        return [value for part in parts for value in part]
    return backend.numpy.concatenate(parts)
