"""Decoding of a partition's images, batch by batch: DALI, and Pillow beside it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import tee
from typing import Any

import numpy as np

from dask_image_ingest.decode.buffers import Origin, PixelBuffer, Pixels, unknown
from dask_image_ingest.decode.crash_guard import crash_log, crashed, decode_guarded
from dask_image_ingest.decode.dali import DaliDecoder, Refused
from dask_image_ingest.decode.decoders import DecoderSet, decoders_for
from dask_image_ingest.decode.formats import BadImage, Header
from dask_image_ingest.decode.options import DecodeSpec
from dask_image_ingest.decode.planner import Batch, Schedule
from dask_image_ingest.decode.resize import ResizedImage
from dask_image_ingest.decode.resources import decode_pool
from dask_image_ingest.decode.scaled_jpeg import ScaledDecoder, any_reduced
from dask_image_ingest.progress_bar import count_images


def decode(
    headers: Sequence[Header],
    image_bytes: Callable[[int], Any],
    decoding: DecodeSpec,
    buffer: PixelBuffer,
    origin: Callable[[int], Origin] = unknown,
    meanwhile: Callable[[], Any] | None = None,
) -> Pixels:
    """Decode the images of a partition, in the order of its rows.

    Parameters
    ----------
    headers
        Headers of the images; those with an error are not decoded.
    image_bytes
        Encoded bytes by row.
    decoding
        What the images should look like.
    buffer
        Takes the pixels.
    origin
        Origin by row: for random operators, and as the partition's name in the crash log. Where a
        process died in a partition, its images are decoded under guard.
    meanwhile
        Called at a moment when the decoder is busy, if there is one.

    Raises
    ------
    FunctionError
        If a transform fails.

    Notes
    -----
    DALI gets the images that are valid for it; while one batch is copied out, the next is decoded.
    Pillow decodes the others meanwhile, and then those that DALI refuses. What both refuse becomes
    an error.
    """
    headers = _without_crashers(headers, image_bytes)
    with crash_log.in_progress(_name(decoding, len(headers), origin)) as died_before:
        if died_before:
            pixels = decode_guarded(headers, image_bytes, decoding, buffer, origin)
        else:
            pixels = decode_in_batches(headers, image_bytes, decoding, buffer, origin, meanwhile)
    bad = sum(bool(error) for error in pixels.errors)
    count_images(len(headers) - bad, bad)
    return pixels


def _name(decoding: DecodeSpec, count: int, origin: Callable[[int], Origin]) -> str:
    """Name of a partition among those of the same options."""
    ends = repr([origin(row) for row in (0, count - 1)]) if count else ""
    return f"{decoding.token}-{zlib.crc32(ends.encode()):08x}-{count}"


def _without_crashers(
    headers: Sequence[Header], image_bytes: Callable[[int], Any]
) -> Sequence[Header]:
    """Headers with an error for images that are known to kill a process."""
    crashers = crash_log.crashers()
    if not crashers:
        return headers
    return [
        header
        if header.error is not None or (death := crashers.death(image_bytes(row))) is None
        else header._replace(error=str(crashed(death)), needs_pillow=True)
        for row, header in enumerate(headers)
    ]


def decode_in_batches(
    headers: Sequence[Header],
    image_bytes: Callable[[int], Any],
    decoding: DecodeSpec,
    buffer: PixelBuffer,
    origin: Callable[[int], Origin] = unknown,
    meanwhile: Callable[[], Any] | None = None,
) -> Pixels:
    """Decode in this process."""
    errors = [header.error for header in headers]
    shapes = np.zeros((len(headers), 3), np.int32)
    itemsizes = np.ones(len(headers), np.int64) if decoding.mode == "raw" else None
    schedule = Schedule(headers, image_bytes, decoding)
    dali = decoders_for(decoding)
    scaled = None
    if decoding.scaled and any_reduced(headers, decoding):
        scaled = ScaledDecoder(decoding, dali)
    # Reduced pictures are made by threads that all partitions share: DALI has moments of work then.
    with nullcontext() if scaled else dali.lock:
        try:
            dali.clear()
            for batch, images in _decoded(schedule, scaled, dali):
                schedule.learn(_rows_without_image(batch.dali_rows, images))
                rows, images = _merged(batch, images, schedule, headers, errors, decoding, dali)
                if decoding.resized_here:
                    images = _resized(images, decoding)
                if rows and dali.transform is not None:
                    images = dali.transform.run(_in_memory(images), [origin(row) for row in rows])
                shapes[rows] = _shapes(images)
                if itemsizes is not None:
                    itemsizes[rows] = [image.dtype.itemsize for image in images]
                buffer.append(images)
                if meanwhile is not None:
                    # DALI is decoding the next batch by now.
                    meanwhile()
                    meanwhile = None
        finally:
            dali.clear()
    return Pixels(buffer.finish(), shapes, errors, itemsizes)


def _decoded(
    schedule: Schedule, scaled: ScaledDecoder | None, dali: DecoderSet
) -> Iterator[tuple[Batch, Any]]:
    """Each batch of the schedule with DALI's images of it, None for those that it refuses."""
    first = scaled or dali.encoded
    planned, underway = tee(schedule)
    outputs = first.run(batch.encoded for batch in planned)
    for batch, images in zip(underway, outputs, strict=True):
        if isinstance(images, Refused):
            yield batch, decode_in_parts(batch.encoded, images.failed_index, dali.suspect)
        else:
            yield batch, images


def _merged(
    batch: Batch,
    images: Any,
    schedule: Schedule,
    headers: Sequence[Header],
    errors: list[str | None],
    decoding: DecodeSpec,
    dali: DecoderSet,
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
        for row, image in zip(batch.dali_rows, images, strict=True)
        if image is not None and _fits(_shape(image), headers[row], decoding)
    }
    for row in batch.rows:
        if errors[row] is None and row not in pictures and row not in batch.by_pillow:
            schedule.assign_to_pillow(row, batch)
    pictures.update(_from_pillow(batch, errors, decoding, dali))
    rows = [row for row in batch.rows if row in pictures]
    return rows, [pictures[row] for row in rows]


def _shapes(images: Any) -> Any:
    if not isinstance(images, list):
        return images.shape()
    return np.array([_shape(image) for image in images], np.int32).reshape(-1, 3)


def _shape(image: Any) -> tuple[int, ...]:
    return image.shape() if callable(image.shape) else image.shape


def _rows_without_image(rows: list[int], images: Any) -> list[int]:
    if not isinstance(images, list):
        return []
    return [row for row, image in zip(rows, images, strict=True) if image is None]


def _from_pillow(
    batch: Batch, errors: list[str | None], decoding: DecodeSpec, dali: DecoderSet
) -> dict[int, Any]:
    """Pillow's images of a batch; on a GPU in the requested shape."""
    arrays: dict[int, np.ndarray] = {}
    for row, future in batch.by_pillow.items():
        # Not raised here: its traceback would hold this partition until a collection.
        failed = future.exception()
        if isinstance(failed, BadImage):
            errors[row] = str(failed)
        else:
            arrays[row] = future.result()
    if not arrays or decoding.device == "cpu":
        return arrays
    if decoding.size is None and decoding.transform is None:
        return arrays
    images = dali.resize(list(arrays.values()))
    return dict(zip(arrays, images, strict=True))


def _fits(shape: Sequence[int], header: Header, decoding: DecodeSpec) -> bool:
    # Where readers take a damaged header in two ways, Pillow's is the one that counts.
    return not decoding.decoded_in_full or tuple(shape[:2]) == (header.height, header.width)


def _resized(images: Any, decoding: DecodeSpec) -> list[ResizedImage]:
    """The images of a batch, resized when they are written to the buffer."""
    assert decoding.size is not None
    return [
        image
        if isinstance(image, ResizedImage)
        else ResizedImage(image, decoding.size, decoding.resize, nearest=decoding.nearest)
        for image in images
    ]


def _in_memory(images: Any) -> Any:
    """The images of a batch as a transform takes them: DALI's, or arrays."""
    if not isinstance(images, list):
        return images
    if not any(isinstance(image, (np.ndarray, ResizedImage)) for image in images):
        return images
    return list(decode_pool().map(np.asarray, images))


def decode_in_parts(
    images: list[np.ndarray], failed_index: int | None, suspect: DaliDecoder
) -> list[Any]:
    """Decode a batch that was refused in smaller parts; None for what DALI can't decode."""
    if failed_index is None or failed_index >= len(images):
        parts = list(_split(images, max(1, len(images) // 8)))
    else:
        step = max(1, len(images) // 4)
        before, after = images[:failed_index], images[failed_index + 1 :]
        parts = [*_split(before, step), [], *_split(after, step)]
    # All of them before the next step down, which runs on the same pipeline.
    outputs = list(suspect.run(parts))
    isolated: list[Any] = []
    for encoded, decoded in zip(parts, outputs, strict=True):
        if not encoded:
            isolated.append(None)  # the image that failed
        elif not isinstance(decoded, Refused):
            isolated.extend(decoded)
        else:
            alone = len(encoded) == 1
            isolated.extend(
                [None] if alone else decode_in_parts(encoded, decoded.failed_index, suspect)
            )
    return isolated


def _split(images: list[np.ndarray], size: int) -> Iterator[list[np.ndarray]]:
    return (images[start : start + size] for start in range(0, len(images), size))
