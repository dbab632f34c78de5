"""Columns computed from images of any shapes, batch by batch; and by functions of the user."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend, BackendName, backend_of, get_backend
from dask_image_ingest.ops import apply_batch_map, make_batch_map

# Copies of so many full-size images fit into memory beside a partition.
_BATCH_SIZE = 32

# On the host: images that fit in the CPU's caches, where sums of rows take a third of the time.
GROUP_SIZE = 4


def map_images(
    frame: Any,
    function: Callable[..., Any],
    outputs: Mapping[str, str],
    batch_size: int,
    image: str | None = None,
    **of_function: Any,
) -> Any:
    """Add or replace columns that a function makes of an image column; keep all others.

    ``image`` is the column, if the frame has several; ``of_function`` are fields of
    `BatchFunction`.
    """
    inputs = [(frame.images if image is None else frame.images[image]).column]
    columns = list(frame.columns)
    return apply_batch_map(
        frame,
        make_batch_map(function, outputs, batch_size, inputs, True, columns, **of_function),
    )


def in_batches(
    frame: Any,
    called_by: str,
    function: Callable[..., Mapping[str, Any]],
    outputs: Mapping[str, str],
    **options: Any,
) -> Any:
    """Add or replace columns ``outputs``, which ``function`` computes from the images; keep these.

    ``called_by`` is the public function, for errors.
    ``function(groups, backend, **options)`` takes a list of groups of images of one shape, uint8
    (n, height, width, channels), all of 1 or all of 3 channels. It returns an array or a list for
    each output: a value for each image, in order.
    """
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    backend = backend_of(meta).name
    by_channels = functools.partial(
        _by_channels, function=function, backend=backend, options=options
    )
    return map_images(
        frame, by_channels, outputs, _BATCH_SIZE, called_by=called_by, named=function, writes=False
    )


def _by_channels(
    images: Any,
    function: Callable[..., Mapping[str, Any]],
    backend: BackendName,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Call ``function`` once for each run of groups with the same number of channels."""
    library = get_backend(backend)
    if isinstance(images, list):
        groups = [image[None] for image in images]
    elif library.numpy is np:
        groups = [images[start : start + GROUP_SIZE] for start in range(0, len(images), GROUP_SIZE)]
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
    runs = itertools.groupby(groups, lambda group: group.shape[3])
    results = [function(list(run), library, **options) for _, run in runs]
    return {
        name: _concatenate([result[name] for result in results], library) for name in results[0]
    }


def _concatenate(parts: list[Any], backend: Backend) -> Any:
    if isinstance(parts[0], list):
        return [value for part in parts for value in part]
    return backend.numpy.concatenate(parts)
