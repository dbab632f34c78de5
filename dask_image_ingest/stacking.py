"""A column of equal images, or of equal lists, as one array."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of
from dask_image_ingest.frames.joined import joined


def stack(frame: Any, image: str) -> Any:
    """The images of a pandas or cuDF frame as one array."""
    backend = backend_of(frame)
    arrays = backend.arrays(frame[image])
    if not arrays:
        return backend.numpy.empty((0, 0, 0, 0), np.uint8)
    if any(array is None for array in arrays):
        missing = next(row for row, array in enumerate(arrays) if array is None)
        raise ArgumentError(
            f"stack: row {missing} of a partition has no image: drop such rows first, "
            "ddf[ddf.error.isna()]"
        )
    images = joined(arrays, backend)
    if isinstance(images, list):
        other = next(a.shape for a in images if a.shape != images[0].shape)
        raise ArgumentError(
            f"stack: the images of a partition differ in shape, {images[0].shape} and {other}: "
            "read with size="
        )
    return images


def vectors(frame: Any, column: str) -> Any:
    """A column of lists of a pandas or cuDF frame as (n, length)."""
    if column not in frame.columns:
        raise ArgumentError(f"the frame has no column {column!r}")
    values = backend_of(frame).values(frame[column])
    if values is None:
        raise ArgumentError(
            f"the lists of {column!r} differ in length, or some are null: drop these rows first, "
            f"frame[frame[{column!r}].notnull()]"
        )
    if len(values) == 0:
        return values.reshape(0, 0)
    if values.ndim != 2:
        raise ArgumentError(f"column {column!r} is no column of lists of numbers")
    return values
