"""Decode the images of a partition, batch by batch, with DALI and Pillow in parallel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import tee
from typing import Any

import numpy as np

from dask_image_ingest.client import refuse_other_version
from dask_image_ingest.computing import BAD, DECODED, count
from dask_image_ingest.decode import crash_log
from dask_image_ingest.decode.buffers import (
    EncodedImages,
    PixelBuffer,
    Pixels,
    shape_of,
    shapes_of,
)
from dask_image_ingest.decode.crash_guard import crashed, decode_guarded
from dask_image_ingest.decode.dali import DaliDecoder, Item, Refused, decode_pool
from dask_image_ingest.decode.decode_spec import DecodeSpec
from dask_image_ingest.decode.formats import BadImage
from dask_image_ingest.decode.planner import Batch, BatchPlanner, DecoderSet, decoders_for
from dask_image_ingest.decode.region import Region
from dask_image_ingest.decode.resize import ResizedImage
from dask_image_ingest.decode.scaled_jpeg import ScaledDecoder, any_reduced
from dask_image_ingest.typedefs import ImageBatch


def decode(
    images: EncodedImages,
    decodings: Sequence[DecodeSpec],
    buffers: Sequence[PixelBuffer],
) -> list[Pixels]:
    """Decode the images of a partition, in the order of its rows.

    Parameters
    ----------
    images
        The encoded images. If a worker died during this task, they are decoded in a subprocess.
    decodings
        Decode options. With several, which `DecodeSpec.can_share` has to allow, each image is
        decoded once and in full, and their random regions are cut from it: this takes less time.
    buffers
        Receive the pixels, one for each of the options.

    Raises
    ------
    ClusterError
        If this process has another version of the package than the one that planned the decode.
    FunctionError
        If the transform fails.

    Notes
    -----
    DALI decodes the next batch while the last one is copied to the buffer. Pillow decodes in
    threads the images that DALI can't, then those that DALI refused. An image that Pillow refuses
    gets an error.
    """
    refuse_other_version(decodings[0].version)
    images = _without_crashers(images)
    if crash_log.has_crashed():
        pairs = zip(decodings, buffers, strict=True)
        results = [decode_guarded(images, *pair) for pair in pairs]
    else:
        results = decode_in_batches(images, decodings, buffers)
    for pixels in results:
        bad = sum(bool(error) for error in pixels.errors)
        count(DECODED, len(pixels.errors) - bad)
        count(BAD, bad)
    return results


def _without_crashers(images: EncodedImages) -> EncodedImages:
    """Set the error of images that are known to kill a decoder."""
    deaths = crash_log.known_deaths()
    if not deaths:
        return images
    sizes = {int(name.partition("-")[0]) for name in deaths}
    headers = [*images.headers]
    for row, header in enumerate(images.headers):
        if header.error is None and len(data := images.read(row)) in sizes:
            death = deaths.get(crash_log.crash_name(bytes(data[:])))
            if death is not None:
                headers[row] = header._replace(error=str(crashed(death)), needs_pillow=True)
    return replace(images, headers=headers)


def decode_in_batches(
    images: EncodedImages,
    decodings: Sequence[DecodeSpec],
    buffers: Sequence[PixelBuffer],
) -> list[Pixels]:
    """Decode the images of a partition in this process; parameters as in `decode`."""
    decoding, *others = decodings
    if others:
        decoding = replace(decoding, size=None, augment=None, pixel_augments=(), transform=None)
    if images.parts is not None:
        decoding = replace(decoding, in_parts=True)
    errors = [header.error for header in images.headers]
    shapes = [np.zeros((len(images), 3), np.int32) for _ in decodings]
    itemsizes = np.ones(len(images), np.int64) if decoding.mode == "raw" else None
    schedule = BatchPlanner(images, decoding)
    dali = schedule.decoders()
    # Those of the whole images neither augment nor transform.
    augmenting = [
        decoders_for(view) if others and (view.pixel_augments or view.transform) else dali
        for view in decodings
    ]
    scaled = None
    if decoding.scaled and any_reduced(images.headers, decoding):
        scaled = ScaledDecoder(decoding, dali)
    # A scaled decode runs in the shared thread pool, and hands DALI the few images that remain.
    with nullcontext() if scaled else dali.partitions:
        for batch, decoded in _dali_outputs(schedule, scaled, dali):
            # Of a tensor list, DALI has decoded all.
            found = decoded if isinstance(decoded, list) else ()
            schedule.learn(
                rows[0]
                for rows, image in zip(batch.dali_rows, found, strict=False)
                if image is None
            )
            rows, decoded = _with_pillow(batch, decoded, schedule, errors, dali)
            views = zip(decodings, augmenting, buffers, shapes, strict=True)
            for view, decoders, buffer, view_shapes in views:
                if others:
                    made: Any = _cut(decoded, rows, images, view)
                elif decoding.resized_here:
                    made = _resized(decoded, rows, schedule)
                else:
                    made = decoded
                made = _augmented(made, rows, images, view, decoders)
                view_shapes[rows] = shapes_of(made)
                if itemsizes is not None:
                    itemsizes[rows] = [image.dtype.itemsize for image in made]
                buffer.append(made)
    return [
        Pixels(buffer.finish(), view_shapes, list(errors), itemsizes)
        for buffer, view_shapes in zip(buffers, shapes, strict=True)
    ]


def _cut(
    decoded: ImageBatch, rows: list[int], images: EncodedImages, decoding: DecodeSpec
) -> list[ResizedImage]:
    """Regions of images that were decoded in full, to be resized."""
    cut = []
    for row, image in zip(rows, decoded, strict=True):
        # Of a part, its pixels alone were decoded.
        region = decoding.region(images.headers[row], partial(images.origin, row))
        assert region is not None
        geometry = decoding.geometry(region.height, region.width)
        pixels, mirrored = region.of(np.asarray(image)), region.mirrored
        cut.append(ResizedImage(pixels, geometry, decoding.filter, exact=False, mirrored=mirrored))
    return cut


def _augmented(
    decoded: ImageBatch,
    rows: list[int],
    images: EncodedImages,
    decoding: DecodeSpec,
    dali: DecoderSet,
) -> ImageBatch:
    """Apply the augmentations of pixels, and the transform, if there are any."""
    if not rows or (dali.augments is None and dali.transform is None):
        return decoded
    origins = [decoding.drawn(images.origin(row)) for row in rows]
    if dali.augments is not None:
        decoded = dali.augments.run(decoded, origins)
    if dali.transform is not None:
        decoded = dali.transform.run(_materialized(decoded), origins)
    return decoded


def _dali_outputs(
    schedule: BatchPlanner, scaled: ScaledDecoder | None, dali: DecoderSet
) -> Iterator[tuple[Batch, Any]]:
    """Each batch with DALI's images: a tensor list, or a list with None for a refused image."""
    decoder = scaled or dali.encoded
    # The decoder reads one batch ahead of the batch that it yields.
    ahead, batches = tee(schedule)
    outputs = decoder.run(batch.encoded for batch in ahead)
    for batch, images in zip(batches, outputs, strict=True):
        if isinstance(images, Refused):
            yield batch, decode_in_parts(batch.encoded, images.failed_index, dali.encoded)
        else:
            yield batch, images


def _with_pillow(
    batch: Batch,
    images: ImageBatch,
    schedule: BatchPlanner,
    errors: list[str | None],
    dali: DecoderSet,
) -> tuple[list[int], Any]:
    """Add Pillow's images to DALI's, and record errors.

    Returns
    -------
    (list of int, list of images)
        The rows that have an image, and their images. If DALI decoded them all, its tensor list.
    """
    if not isinstance(images, list) and len(images) == len(batch.rows):
        shapes = images.shape()
        if all(_as_expected(shapes[i], row, schedule) for i, row in enumerate(batch.rows)):
            return batch.rows, images
    by_row = {}
    for rows, item, image in zip(batch.dali_rows, batch.encoded, images, strict=True):
        for row in rows:
            cut = _cut_out(image, row, item, schedule)
            if cut is not None and _as_expected(shape_of(cut), row, schedule):
                by_row[row] = cut
    for row in batch.rows:
        if errors[row] is None and row not in by_row and row not in batch.by_pillow:
            schedule.assign_to_pillow(row, batch)
    by_row.update(_pillow_outputs(batch, errors, schedule, dali))
    rows = [row for row in batch.rows if row in by_row]
    return rows, [by_row[row] for row in rows]


def _pillow_outputs(
    batch: Batch, errors: list[str | None], schedule: BatchPlanner, dali: DecoderSet
) -> dict[int, Any]:
    """Pillow's images of a batch by row, errors recorded; on a GPU, moved there and resized."""
    decoding = schedule.decoding
    arrays: dict[int, np.ndarray] = {}
    for row, future in batch.by_pillow.items():
        # Don't raise: the traceback would keep this partition in memory until a gc run.
        failure = future.exception()
        if isinstance(failure, BadImage):
            errors[row] = str(failure)
        else:
            arrays[row] = future.result()
    if not arrays or decoding.device == "cpu":
        return arrays
    if decoding.mode == "raw" or not (
        decoding.size or decoding.transform or decoding.pixel_augments
    ):
        return arrays
    items: list[Item] = list(arrays.values())
    if decoding.takes_regions:
        items = [
            # DALI takes no views.
            (np.ascontiguousarray(array), Region.whole(array, _is_mirrored(row, schedule)))
            for row, array in arrays.items()
        ]
    return dict(zip(arrays, dali.resize(items), strict=True))


def _is_mirrored(row: int, schedule: BatchPlanner) -> bool:
    region = schedule.region(row)
    return region is not None and region.mirrored


def _cut_out(image: Any, row: int, item: Item, schedule: BatchPlanner) -> Any:
    """The part of a row, of DALI's image of an item, or None; on a GPU, DALI has cut it out."""
    on_gpu = schedule.decoding.device == "gpu"
    if image is None or on_gpu or schedule.images.part(row) is None or not isinstance(item, tuple):
        return image
    decoded, wanted = item[1], schedule.region(row)
    if wanted is None or tuple(shape_of(image)[:2]) != decoded[2:4]:
        return None
    if decoded[:4] == wanted[:4]:
        return image
    return wanted.shifted(-decoded.top, -decoded.left).of(np.asarray(image))


def _as_expected(shape: Sequence[int], row: int, schedule: BatchPlanner) -> bool:
    """True if DALI's image has the shape in the header, or of its region; if not, use Pillow.

    Decoders may read a damaged header differently, and Pillow's reading counts.
    """
    if not schedule.decoding.decoded_in_full:
        return True
    expected = schedule.region(row) or schedule.images.headers[row]
    return tuple(shape[:2]) == (expected.height, expected.width)


def _resized(images: ImageBatch, rows: list[int], schedule: BatchPlanner) -> list[Any]:
    """The images of a batch, to be resized when they are written to the buffer."""
    decoding, resized = schedule.decoding, []
    # With `crop` and `shorter` models are evaluated: see docs/design/resize.md.
    exact = not decoding.is_placed_at_random and decoding.resize in ("crop", "shorter")
    for row, image in zip(rows, images, strict=True):
        if isinstance(image, ResizedImage):
            resized.append(image)
            continue
        pixels, mirrored = np.asarray(image), _is_mirrored(row, schedule)
        geometry = decoding.geometry(*pixels.shape[:2])
        resized.append(
            ResizedImage(pixels, geometry, decoding.filter, exact=exact, mirrored=mirrored)
        )
    return resized if decoding.device == "cpu" else [np.asarray(image) for image in resized]


def _materialized(images: ImageBatch) -> ImageBatch:
    """The images of a batch for a transform: DALI's, or all as arrays."""
    if not isinstance(images, list):
        return images
    if not any(isinstance(image, (np.ndarray, ResizedImage)) for image in images):
        return images
    return list(decode_pool().map(np.ascontiguousarray, images))  # DALI takes no views


def decode_in_parts(
    images: list[Item], failed_index: int | None, decoder: DaliDecoder
) -> list[Any]:
    """Bisect a batch that DALI refused: its images in order, None for each that it can't decode.

    ``failed_index`` is the image that DALI named, if it named one.
    """
    if failed_index is None or failed_index >= len(images):
        parts = list(_split(images, max(1, len(images) // 8)))
    else:
        step = max(1, len(images) // 4)
        before, after = images[:failed_index], images[failed_index + 1 :]
        parts = [*_split(before, step), [], *_split(after, step)]
    # Exhaust it before the recursion, which uses the same pipeline.
    outputs = list(decoder.run(parts))
    isolated: list[Any] = []
    for encoded, decoded in zip(parts, outputs, strict=True):
        if not encoded:
            isolated.append(None)  # the image that DALI named
        elif not isinstance(decoded, Refused):
            isolated.extend(decoded)
        else:
            alone = len(encoded) == 1
            isolated.extend(
                [None] if alone else decode_in_parts(encoded, decoded.failed_index, decoder)
            )
    return isolated


def _split(images: list[Item], size: int) -> Iterator[list[Item]]:
    return (images[start : start + size] for start in range(0, len(images), size))
