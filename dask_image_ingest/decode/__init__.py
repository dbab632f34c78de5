"""Encoded images to pixels: which decoder gets which image, and what becomes of the bad ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import tee
from typing import Any, Protocol

import numpy as np

from dask_image_ingest.decode import journal
from dask_image_ingest.decode.dali import BATCH_SIZE, Refused, check_output, decoder
from dask_image_ingest.decode.guard import crashed, decode_guarded
from dask_image_ingest.decode.header import BadImage, Header
from dask_image_ingest.decode.options import Decoding
from dask_image_ingest.decode.pillow import decode_with_pillow
from dask_image_ingest.decode.scaled import ScaledDecoder
from dask_image_ingest.decode.stored import checksums_hold

__all__ = ["Decoding", "PixelBuffer", "Pixels", "decode"]

# Decoded bytes that a batch may hold, since DALI keeps two of them; a GPU wants more work at once.
_BATCH_BYTES = {"cpu": 2**28, "gpu": 2**30}


class PixelBuffer(Protocol):
    """One flat buffer that takes decoded images one behind the other."""

    def append_batch(self, images: Any) -> None:
        """Take a DALI tensor list whole."""

    def append(self, image: Any) -> None:
        """Take one image: an array or a DALI tensor, of shape (height, width, channels)."""

    def finish(self) -> Any:
        """The bytes taken, as one array."""


@dataclass(frozen=True)
class Pixels:
    """The decoded images of a partition.

    Attributes
    ----------
    flat : array of uint8, shape (sum of all images' bytes,)
        CuPy or NumPy, image behind image.
    shapes : numpy array of int32, shape (rows, 3)
        Height, width, channels; all zero for a row without an image.
    errors : list of str or None
        For each row why it has no image.
    """

    flat: Any
    shapes: np.ndarray
    errors: list[str | None]

    def take(self, rows: np.ndarray) -> Pixels:
        """The pixels of the given rows, which must ascend; no copy where only empty rows go."""
        sizes = self.shapes.astype(np.int64).prod(axis=1)
        flat = self.flat
        if sizes[rows].sum() < sizes.sum():
            starts = np.cumsum(sizes) - sizes
            there = [row for row in rows.tolist() if sizes[row]]
            images = [flat[starts[row] : starts[row] + sizes[row]] for row in there]
            flat = np.concatenate(images) if images else flat[:0]
        return Pixels(flat, self.shapes[rows], [self.errors[row] for row in rows.tolist()])


@dataclass(frozen=True, slots=True)
class _Batch:
    rows: range
    trusted: list[int]
    encoded: list[np.ndarray]


def decode(
    headers: Sequence[Header],
    image_bytes: Callable[[int], Any],
    decoding: Decoding,
    buffer: PixelBuffer,
    seed: int = 0,
) -> Pixels:
    """Decode the images of a partition, in the order of its rows.

    Parameters
    ----------
    headers
        What each image's first bytes told; images with an error are not decoded.
    image_bytes
        Gives the encoded bytes of a row.
    decoding
        What the images should look like.
    buffer
        Takes the pixels.
    seed
        For the random operators of a transform, and to know a partition again: where a process has
        died in its midst, its images are decoded under guard.

    Notes
    -----
    DALI gets the images that are surely sound for it; while one batch is copied out, the next is
    decoded. What DALI refuses, and what it should not see, goes to Pillow, one by one. What both
    refuse becomes an error.
    """
    headers = _without_crashers(headers, image_bytes)
    with journal.underway(f"{decoding.token}-{seed:08x}-{len(headers)}") as died_before:
        if died_before:
            shapes, errors = decode_guarded(headers, image_bytes, decoding, buffer, seed)
            return Pixels(buffer.finish(), shapes, errors)
        return decode_in_batches(headers, image_bytes, decoding, buffer, seed)


def decode_in_batches(
    headers: Sequence[Header],
    image_bytes: Callable[[int], Any],
    decoding: Decoding,
    buffer: PixelBuffer,
    seed: int,
) -> Pixels:
    """Decode in this very process."""
    errors = [header.error for header in headers]
    shapes = np.zeros((len(headers), 3), np.int32)
    batches = _Batches(headers, image_bytes, decoding)
    dali = ScaledDecoder(decoding) if decoding.scaled else decoder(decoding, "encoded")
    if decoding.transform is not None:
        for source in ("encoded", "suspect", "pixels"):
            decoder(decoding, source).reseed(seed)
    planned, underway = tee(batches)
    for batch, images in zip(underway, dali.run(batch.encoded for batch in planned), strict=True):
        batches.adapt(isinstance(images, Refused))
        if isinstance(images, Refused):
            images = _isolate(batch.encoded, images.culprit, decoding)
        elif len(images) and not isinstance(images, list):
            check_output(images)
        decoded = {
            row: image
            for row, image in zip(batch.trusted, images, strict=True)
            if image is not None and _fits(image.shape(), headers[row], decoding)
        }
        if len(decoded) == len(batch.rows) and not isinstance(images, list):
            shapes[batch.rows.start : batch.rows.stop] = images.shape()
            buffer.append_batch(images)
            continue
        for row in batch.rows:
            if errors[row] is not None:
                continue
            try:
                image = decoded[row] if row in decoded else _careful(image_bytes(row), decoding)
            except BadImage as bad:
                errors[row] = str(bad)
                continue
            shapes[row] = image.shape() if callable(image.shape) else image.shape
            buffer.append(image)
    return Pixels(buffer.finish(), shapes, errors)


def _without_crashers(
    headers: Sequence[Header], image_bytes: Callable[[int], Any]
) -> Sequence[Header]:
    """Give the images that are known to kill a process an error, so that they are left alone."""
    crashers = journal.crashers()
    if not crashers:
        return headers
    return [
        header
        if header.error is not None or (death := crashers.death(image_bytes(row))) is None
        else header._replace(error=str(crashed(death)), careful=True)
        for row, header in enumerate(headers)
    ]


class _Batches:
    """The rows of a partition in batches, which are small for a while after one was refused.

    A batch that is refused has to be decoded again, image by image in the end: where that happens
    often, less should be lost each time.
    """

    def __init__(
        self, headers: Sequence[Header], image_bytes: Callable[[int], Any], decoding: Decoding
    ) -> None:
        self._headers = headers
        self._image_bytes = image_bytes
        self._decoding = decoding
        self._size = BATCH_SIZE

    def adapt(self, refused: bool) -> None:
        """Take account of what became of the batch before."""
        self._size = max(8, self._size // 4) if refused else min(BATCH_SIZE, self._size + 4)

    def __iter__(self) -> Iterator[_Batch]:
        most = _BATCH_BYTES[self._decoding.device]
        start, nbytes = 0, 0
        trusted: list[int] = []
        encoded: list[np.ndarray] = []
        for row, header in enumerate(self._headers):
            size = self._decoding.nbytes(header)
            if row > start and (len(trusted) >= self._size or nbytes + size > most):
                yield _Batch(range(start, row), trusted, encoded)
                start, trusted, encoded, nbytes = row, [], [], 0
            nbytes += size
            if header.error is None and not header.careful:
                data = self._image_bytes(row)
                if header.format != "png" or checksums_hold(data):
                    trusted.append(row)
                    encoded.append(_array(data))
        if start < len(self._headers):
            yield _Batch(range(start, len(self._headers)), trusted, encoded)


def _array(data: Any) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def _isolate(images: list[np.ndarray], culprit: int | None, decoding: Decoding) -> list:
    """Decode a batch that was refused in smaller parts; None for what DALI can't decode."""
    if culprit is None or culprit >= len(images):
        parts = list(_split(images, max(1, len(images) // 8)))
    else:
        step = max(1, len(images) // 4)
        before, after = images[:culprit], images[culprit + 1 :]
        parts = [*_split(before, step), [], *_split(after, step)]
    # All of them before the next step down, which runs on the same pipeline.
    outputs = list(decoder(decoding, "suspect").run(parts))
    isolated: list = []
    for encoded, decoded in zip(parts, outputs, strict=True):
        if not encoded:
            isolated.append(None)  # the culprit
        elif not isinstance(decoded, Refused):
            isolated.extend(decoded)
        else:
            alone = len(encoded) == 1
            isolated.extend([None] if alone else _isolate(encoded, decoded.culprit, decoding))
    return isolated


def _split(images: list[np.ndarray], size: int) -> Iterator[list[np.ndarray]]:
    return (images[start : start + size] for start in range(0, len(images), size))


def _fits(shape: Sequence[int], header: Header, decoding: Decoding) -> bool:
    # Where readers take a damaged header in two ways, Pillow's is the one that counts.
    resized = decoding.size is not None or decoding.transform is not None
    return resized or tuple(shape[:2]) == (header.height, header.width)


def _careful(data: Any, decoding: Decoding) -> Any:
    image = decode_with_pillow(data, decoding.mode, decoding.max_pixels)
    if decoding.size is None and decoding.transform is None:
        return image
    (images,) = decoder(decoding, "pixels").run([[image]])
    check_output(images)
    return images[0]
