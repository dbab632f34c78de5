"""What batches are made of: NumPy or CuPy arrays, or torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from dask_image_ingest.errors import MissingDependencyError
from dask_image_ingest.frames import Backend, joined
from dask_image_ingest.loader.normalize import Normalize
from dask_image_ingest.loader.rows import Rows

__all__ = ["FORMATS", "Convert", "Format", "batch_of", "converter"]

Format = Literal["numpy", "cupy", "torch"]
FORMATS = ("numpy", "cupy", "torch")

Convert = Callable[[Any], Any]


def converter(format: Format, backend: Backend) -> Convert:
    """A function from an array of the backend to one of ``format``; strings become lists for torch.

    Raises
    ------
    MissingDependencyError
    """
    if format == "numpy":
        return lambda array: array if isinstance(array, np.ndarray) else backend.host(array)
    try:
        if format == "cupy":
            from cupy import asarray as convert
        else:
            from torch.utils.dlpack import from_dlpack as convert
    except ImportError as error:
        raise MissingDependencyError(
            f"format={format!r} needs {format}, which is not installed: see its web page for the "
            "build that fits this machine"
        ) from error
    return lambda array: array.tolist() if array.dtype == object else convert(array)


def batch_of(
    rows: Rows, image: str, backend: Backend, convert: Convert, normalize: Normalize | None
) -> dict[str, Any]:
    """Rows as one batch: the images in one array, or in a list where their shapes differ."""
    if normalize is None:
        images = joined(rows.images, backend)
    else:
        images = normalize.batch(rows.images, backend)
    pixels = [convert(i) for i in images] if isinstance(images, list) else convert(images)
    return {image: pixels, **{name: convert(values) for name, values in rows.columns.items()}}
