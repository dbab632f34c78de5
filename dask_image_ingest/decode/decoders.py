"""Decoders that a process keeps from partition to partition."""

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

# As many options as a query and its neighbours use side by side.
_KEPT = 3


class DecoderSet:
    """Decoders of one set of options in this process, for one thread at a time.

    Use a decoder inside ``with decoders.lock``, in no generator: a traceback that is kept would
    keep the lock taken. Call `clear` before and after, so that no images of one caller come out for
    the next, however that one ended. The methods for one batch do all that.

    Attributes
    ----------
    lock : threading.RLock
        A pipeline can't be fed from two threads, and dask may run several tasks in one process.
    encoded, suspect, pixels : DaliDecoder
        Of these sources.
    transform : Transform or None
        What comes after each of them.
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
        """Decode one batch that no other follows: a tensor list, or `Refused`."""
        return self._alone(self.encoded, encoded)

    def resize(self, arrays: list[np.ndarray]) -> Any:
        """Resize arrays: a tensor list."""
        return self._alone(self.pixels, arrays)

    def _alone(self, decoder: DaliDecoder, batch: list[np.ndarray]) -> Any:
        with self.lock:
            decoder.clear()
            (images,) = decoder.run([batch])
            return images


def decode_one(encoded: np.ndarray, decoding: DecodeSpec) -> Any:
    """Decode one valid image by itself: a tensor list."""
    parses(encoded)
    return decoders_for(decoding).decode_alone([encoded])


def decoders_for(decoding: DecodeSpec) -> DecoderSet:
    """The decoders of this process for these options."""
    device = current_device() if decoding.device == "gpu" else None
    return _decoders(decoding, os.getpid(), device)


@functools.lru_cache(maxsize=_KEPT)
def _decoders(decoding: DecodeSpec, process: int, device: int | None) -> DecoderSet:
    # A fork of this process has none of the threads of its pipelines; another GPU has none of them.
    return DecoderSet(decoding)


# DALI has a copy of each image that it is to resize.
_BATCH_SIZE = 64


def resize_arrays(
    arrays: Sequence[np.ndarray], decoding: DecodeSpec, buffer: PixelBuffer
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
    arrays: Sequence[np.ndarray], decoding: DecodeSpec
) -> Iterator[tuple[list[ResizedImage], list[tuple[int, ...]]]]:
    assert decoding.size is not None
    images = [
        ResizedImage(array, decoding.size, decoding.resize, nearest=decoding.nearest)
        for array in arrays
    ]
    if images:
        yield images, [image.shape for image in images]


def _by_dali(arrays: Sequence[np.ndarray], decoding: DecodeSpec) -> Iterator[tuple[Any, Any]]:
    dali = decoders_for(decoding)
    for start in range(0, len(arrays), _BATCH_SIZE):
        images = dali.resize(list(arrays[start : start + _BATCH_SIZE]))
        yield images, images.shape()
