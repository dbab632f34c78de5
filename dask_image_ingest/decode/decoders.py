"""Cache of decoders, which a process keeps between partitions."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dask_image_ingest.decode.buffers import PixelBuffer
from dask_image_ingest.decode.dali import DaliDecoder, parses
from dask_image_ingest.decode.gpu import current_device
from dask_image_ingest.decode.options import DecodeSpec
from dask_image_ingest.decode.resize import ResizedImage
from dask_image_ingest.decode.transform import Transform

# Sets of options that queries use at the same time.
_CACHE_SIZE = 3


class DecoderSet:
    """Decoders of one set of options in this process.

    Use the decoders inside ``with decoders.lock``, but not in a generator: a stored traceback would
    keep the lock taken. Call `clear` before and after, so that the next caller gets no images of
    one that failed. `decode_alone` and `resize` do all that.

    Attributes
    ----------
    lock : threading.RLock
        A pipeline can't be fed from two threads, and Dask may run several tasks in one process.
    encoded, suspect, pixels : DaliDecoder
        Decoders by ``source``.
    transform : Transform or None
        The user's transform, to apply to their output; thread-safe.
    """

    def __init__(self, decoding: DecodeSpec) -> None:
        self.lock = threading.RLock()
        self.encoded = DaliDecoder(decoding, "encoded")
        self.suspect = DaliDecoder(decoding, "suspect")
        self.pixels = DaliDecoder(decoding, "pixels")
        self.transform = None if decoding.transform is None else Transform(decoding)

    def clear(self) -> None:
        """Drop batches that were not collected."""
        with self.lock:
            for decoder in (self.encoded, self.suspect, self.pixels):
                decoder.clear()

    def decode_alone(self, encoded: list[np.ndarray]) -> Any:
        """Decode a single batch: a tensor list, or `Refused`."""
        return self._run_one(self.encoded, encoded)

    def resize(self, arrays: list[np.ndarray]) -> Any:
        """Resize a single batch of arrays: a tensor list."""
        return self._run_one(self.pixels, arrays)

    def _run_one(self, decoder: DaliDecoder, batch: list[np.ndarray]) -> Any:
        with self.lock:
            decoder.clear()
            (images,) = decoder.run([batch])
            return images


def decode_one(encoded: np.ndarray, decoding: DecodeSpec) -> Any:
    """Decode one valid image: a tensor list. It also loads the parser, to warm up a worker."""
    parses(encoded)
    return decoders_for(decoding).decode_alone([encoded])


def decoders_for(decoding: DecodeSpec) -> DecoderSet:
    """The decoders of this process for these options."""
    device = current_device() if decoding.device == "gpu" else None
    return _decoders(decoding, os.getpid(), device)


@functools.lru_cache(maxsize=_CACHE_SIZE)
def _decoders(decoding: DecodeSpec, process: int, device: int | None) -> DecoderSet:
    # Pipelines can be used neither in a fork, which lacks their threads, nor on another GPU.
    return DecoderSet(decoding)


# Small, since DALI copies each image that it resizes.
_RESIZE_BATCH = 64


def resize_arrays(
    arrays: Sequence[np.ndarray], decoding: DecodeSpec, buffer: PixelBuffer
) -> np.ndarray:
    """Resize images into ``buffer``, in order.

    Returns
    -------
    array of int32, shape (images, 3)
        Shapes of the resized images.
    """
    resize = _resize_on_gpu if decoding.device == "gpu" else _resize_on_cpu
    shapes = [np.zeros((0, 3), np.int32)]
    for images, batch_shapes in resize(arrays, decoding):
        shapes.append(np.asarray(batch_shapes, np.int32))
        buffer.append(images)
    return np.concatenate(shapes)


def _resize_on_cpu(
    arrays: Sequence[np.ndarray], decoding: DecodeSpec
) -> Iterator[tuple[list[ResizedImage], list[tuple[int, ...]]]]:
    assert decoding.size is not None
    images = [
        ResizedImage(array, decoding.size, decoding.resize, nearest=decoding.nearest)
        for array in arrays
    ]
    if images:
        yield images, [image.shape for image in images]


def _resize_on_gpu(arrays: Sequence[np.ndarray], decoding: DecodeSpec) -> Iterator[tuple[Any, Any]]:
    dali = decoders_for(decoding)
    for start in range(0, len(arrays), _RESIZE_BATCH):
        images = dali.resize(list(arrays[start : start + _RESIZE_BATCH]))
        yield images, images.shape()
