"""Encoded images to pixels: which decoder gets which image, and what becomes of the bad ones."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import tee
from typing import Any, Protocol

import numpy as np

from dask_image_ingest.decode import journal
from dask_image_ingest.decode.dali import Decoder, Refused
from dask_image_ingest.decode.decoders import Decoders, decoders_for
from dask_image_ingest.decode.guard import crashed, decode_guarded
from dask_image_ingest.decode.header import BadImage, Header
from dask_image_ingest.decode.options import Decoding
from dask_image_ingest.decode.origin import Origin, unknown
from dask_image_ingest.decode.plan import Batch, Plan
from dask_image_ingest.decode.scaled import ScaledDecoder

__all__ = ["Decoding", "Origin", "PixelBuffer", "Pixels", "decode"]


class PixelBuffer(Protocol):
    """One flat buffer that takes decoded images one behind the other."""

    def append(self, images: Any) -> None:
        """Take a batch: a DALI tensor list whole, or a list of arrays or DALI tensors.

        Each image is of shape (height, width, channels).
        """

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


def decode(
    headers: Sequence[Header],
    image_bytes: Callable[[int], Any],
    decoding: Decoding,
    buffer: PixelBuffer,
    origin: Callable[[int], Origin] = unknown,
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
    origin
        Gives the origin of a row, for the random operators of a transform, and to know a partition
        again: where a process has died in its midst, its images are decoded under guard.

    Raises
    ------
    FunctionError
        If a transform fails.

    Notes
    -----
    DALI gets the images that are surely sound for it; while one batch is copied out, the next is
    decoded. What it should not see is decoded by Pillow meanwhile, and after it what it refuses.
    What both refuse becomes an error.
    """
    headers = _without_crashers(headers, image_bytes)
    with journal.underway(_name(decoding, len(headers), origin)) as died_before:
        if died_before:
            shapes, errors = decode_guarded(headers, image_bytes, decoding, buffer, origin)
            return Pixels(buffer.finish(), shapes, errors)
        return decode_in_batches(headers, image_bytes, decoding, buffer, origin)


def decode_in_batches(
    headers: Sequence[Header],
    image_bytes: Callable[[int], Any],
    decoding: Decoding,
    buffer: PixelBuffer,
    origin: Callable[[int], Origin] = unknown,
) -> Pixels:
    """Decode in this very process."""
    errors = [header.error for header in headers]
    shapes = np.zeros((len(headers), 3), np.int32)
    plan = Plan(headers, image_bytes, decoding)
    dali = decoders_for(decoding)
    with dali.lock:
        try:
            dali.clear()
            for batch, images in _decoded(plan, decoding, dali):
                plan.learn(_rows_without_image(batch.trusted, images))
                rows, images = _pictures(batch, images, plan, headers, errors, decoding, dali)
                if rows and dali.transform is not None:
                    images = dali.transform.run(images, [origin(row) for row in rows])
                shapes[rows] = _shapes(images)
                buffer.append(images)
        finally:
            dali.clear()
    return Pixels(buffer.finish(), shapes, errors)


def _name(decoding: Decoding, count: int, origin: Callable[[int], Origin]) -> str:
    """What tells a partition from others of the same options."""
    ends = repr([origin(row) for row in (0, count - 1)]) if count else ""
    return f"{decoding.token}-{zlib.crc32(ends.encode()):08x}-{count}"


def _decoded(plan: Plan, decoding: Decoding, dali: Decoders) -> Iterator[tuple[Batch, Any]]:
    """Each batch of the plan with what DALI makes of it: None for an image that it refuses."""
    first = ScaledDecoder(decoding, dali) if decoding.scaled else dali.encoded
    planned, underway = tee(plan)
    outputs = first.run(batch.encoded for batch in planned)
    for batch, images in zip(underway, outputs, strict=True):
        if isinstance(images, Refused):
            yield batch, _isolate(batch.encoded, images.culprit, dali.suspect)
        else:
            yield batch, images


def _pictures(
    batch: Batch,
    images: Any,
    plan: Plan,
    headers: Sequence[Header],
    errors: list[str | None],
    decoding: Decoding,
    dali: Decoders,
) -> tuple[list[int], Any]:
    """The rows of a batch that have an image, and these: DALI's and Pillow's.

    A tensor list as DALI has given it, if that is all of them.
    """
    if not isinstance(images, list) and len(images) == len(batch.rows):
        found = images.shape()
        if all(_fits(found[at], headers[row], decoding) for at, row in enumerate(batch.rows)):
            return batch.rows, images
    pictures = {
        row: image
        for row, image in zip(batch.trusted, images, strict=True)
        if image is not None and _fits(image.shape(), headers[row], decoding)
    }
    for row in batch.rows:
        if errors[row] is None and row not in pictures and row not in batch.careful:
            plan.assign_to_pillow(row, batch)
    pictures.update(_careful(batch, errors, decoding, dali))
    rows = [row for row in batch.rows if row in pictures]
    return rows, [pictures[row] for row in rows]


def _shapes(images: Any) -> Any:
    if not isinstance(images, list):
        return images.shape()
    shapes = [image.shape() if callable(image.shape) else image.shape for image in images]
    return np.array(shapes, np.int32).reshape(-1, 3)


def _rows_without_image(rows: list[int], images: Any) -> list[int]:
    if not isinstance(images, list):
        return []
    return [row for row, image in zip(rows, images, strict=True) if image is None]


def _careful(
    batch: Batch, errors: list[str | None], decoding: Decoding, dali: Decoders
) -> dict[int, Any]:
    """What Pillow has made of its images of a batch, in the shape that was asked for."""
    arrays: dict[int, np.ndarray] = {}
    for row, future in batch.careful.items():
        # Not raised here: its traceback would hold this partition until a collection.
        failed = future.exception()
        if isinstance(failed, BadImage):
            errors[row] = str(failed)
        else:
            arrays[row] = future.result()
    if not arrays or (decoding.size is None and decoding.transform is None):
        return arrays
    (images,) = dali.pixels.run([list(arrays.values())])
    return dict(zip(arrays, images, strict=True))


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


def _isolate(images: list[np.ndarray], culprit: int | None, suspect: Decoder) -> list:
    """Decode a batch that was refused in smaller parts; None for what DALI can't decode."""
    if culprit is None or culprit >= len(images):
        parts = list(_split(images, max(1, len(images) // 8)))
    else:
        step = max(1, len(images) // 4)
        before, after = images[:culprit], images[culprit + 1 :]
        parts = [*_split(before, step), [], *_split(after, step)]
    # All of them before the next step down, which runs on the same pipeline.
    outputs = list(suspect.run(parts))
    isolated: list = []
    for encoded, decoded in zip(parts, outputs, strict=True):
        if not encoded:
            isolated.append(None)  # the culprit
        elif not isinstance(decoded, Refused):
            isolated.extend(decoded)
        else:
            alone = len(encoded) == 1
            isolated.extend([None] if alone else _isolate(encoded, decoded.culprit, suspect))
    return isolated


def _split(images: list[np.ndarray], size: int) -> Iterator[list[np.ndarray]]:
    return (images[start : start + size] for start in range(0, len(images), size))


def _fits(shape: Sequence[int], header: Header, decoding: Decoding) -> bool:
    # Where readers take a damaged header in two ways, Pillow's is the one that counts.
    return decoding.size is not None or tuple(shape[:2]) == (header.height, header.width)
