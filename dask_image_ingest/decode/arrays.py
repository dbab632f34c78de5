"""Arrays that were decoded before, brought to another size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dask_image_ingest.decode.decoders import decoders_for
from dask_image_ingest.decode.options import Decoding
from dask_image_ingest.decode.pixels import PixelBuffer
from dask_image_ingest.decode.resize import ResizedImage

__all__ = ["resize_arrays"]

# DALI has a copy of each image that it is to resize.
_BATCH_SIZE = 64


def resize_arrays(
    arrays: Sequence[np.ndarray], decoding: Decoding, buffer: PixelBuffer
) -> np.ndarray:
    """Resize images, in order.

    Returns
    -------
    array of int32, shape (images, 3)
        The shapes of what ``buffer`` has got.
    """
    resize = _by_dali if decoding.device == "gpu" else _by_threads
    shapes = [np.zeros((0, 3), np.int32)]
    for images, found in resize(arrays, decoding):
        shapes.append(np.asarray(found, np.int32))
        buffer.append(images)
    return np.concatenate(shapes)


def _by_threads(
    arrays: Sequence[np.ndarray], decoding: Decoding
) -> Iterator[tuple[list[ResizedImage], list[tuple[int, ...]]]]:
    assert decoding.size is not None
    images = [ResizedImage(array, decoding.size, decoding.resize) for array in arrays]
    if images:
        yield images, [image.shape for image in images]


def _by_dali(arrays: Sequence[np.ndarray], decoding: Decoding) -> Iterator[tuple[Any, Any]]:
    dali = decoders_for(decoding)
    for start in range(0, len(arrays), _BATCH_SIZE):
        images = dali.resize(list(arrays[start : start + _BATCH_SIZE]))
        yield images, images.shape()
