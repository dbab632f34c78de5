"""Split a partition into batches, choose the decoder of each image, and cache the decoders."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dask_image_ingest.decode.augment_pixels import PixelAugments
from dask_image_ingest.decode.buffers import EncodedImages, Origin, PixelBuffer, shapes_of
from dask_image_ingest.decode.dali import (
    BATCH_SIZE,
    DaliDecoder,
    Item,
    batch_bytes,
    current_device,
    decode_pool,
    decode_threads,
    has_dali,
    parsed_shape,
)
from dask_image_ingest.decode.decode_spec import DecodeSpec, Mode
from dask_image_ingest.decode.formats import Header, has_several_pages, is_valid
from dask_image_ingest.decode.formats.jpeg import is_baseline_jpeg
from dask_image_ingest.decode.formats.png_webp import without_png_metadata
from dask_image_ingest.decode.formats.tiff import held_by
from dask_image_ingest.decode.pillow import Animation, decode_parts, decode_region
from dask_image_ingest.decode.region import Part, Region
from dask_image_ingest.decode.resize import ResizedImage
from dask_image_ingest.decode.transform import Transform
from dask_image_ingest.errors import warn_once
from dask_image_ingest.typedefs import ImageBatch

# Sets of options that queries use at the same time.
_CACHE_SIZE = 3

# Partitions that are decoded at once in a process.
_AT_ONCE = {"cpu": 1, "gpu": 2}


class DecoderSet:
    """Decoders of one set of options in this process; thread-safe.

    Attributes
    ----------
    partitions : threading.Semaphore
        To be held while a partition is decoded, so as to bound the memory of its batches. On a GPU
        there may be two, one of which is prepared or copied while DALI decodes the other.
    encoded, pixels : DaliDecoder
        Decoders by ``source``.
    augments : PixelAugments or None
        Augmentations of pixels, to apply to their output.
    transform : Transform or None
        The user's transform, to apply to that.
    """

    def __init__(self, decoding: DecodeSpec) -> None:
        self.partitions = threading.BoundedSemaphore(_AT_ONCE[decoding.device])
        self.encoded = DaliDecoder(decoding, "encoded")
        self.pixels = DaliDecoder(decoding, "pixels")
        self.augments = PixelAugments(decoding) if decoding.pixel_augments else None
        self.transform = None if decoding.transform is None else Transform(decoding)

    def decode_alone(self, encoded: list[Item]) -> Any:
        """Decode a single batch: a tensor list, or `Refused`."""
        (images,) = self.encoded.run([encoded])
        return images

    def resize(self, arrays: list[Item]) -> Any:
        """Resize a single batch of arrays: a tensor list."""
        (images,) = self.pixels.run([arrays])
        return images


def decode_one(encoded: np.ndarray, decoding: DecodeSpec) -> Any:
    """Decode one valid image: a tensor list. It also loads the parser, to warm up a worker."""
    parsed_shape(encoded)
    return decoders_for(decoding).decode_alone([encoded])


def decoders_for(decoding: DecodeSpec, batch: int = BATCH_SIZE) -> DecoderSet:
    """The decoders of this process for these options, and for batches of about so many images.

    Those of a GPU serve batches of one order of magnitude: see `first_batch`.
    """
    if decoding.draw or decoding.view:  # which change regions and inputs, and no pipeline
        decoding = replace(decoding, draw=0, view=0)
    on_gpu = decoding.device == "gpu"
    magnitude = round(math.log2(batch)) if on_gpu else 0
    return _decoders(decoding, os.getpid(), current_device() if on_gpu else None, magnitude)


@functools.lru_cache(maxsize=_CACHE_SIZE)
def _decoders(decoding: DecodeSpec, process: int, device: int | None, magnitude: int) -> DecoderSet:
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
    for images in resize(arrays, decoding):
        shapes.append(shapes_of(images))
        buffer.append(images)
    return np.concatenate(shapes)


def _resize_on_cpu(arrays: Sequence[np.ndarray], decoding: DecodeSpec) -> Iterator[ImageBatch]:
    images = [
        ResizedImage(array, decoding.geometry(*array.shape[:2]), decoding.filter)
        for array in arrays
    ]
    if images:
        yield images


def _resize_on_gpu(arrays: Sequence[np.ndarray], decoding: DecodeSpec) -> Iterator[ImageBatch]:
    dali = decoders_for(decoding)
    for start in range(0, len(arrays), _RESIZE_BATCH):
        batch = arrays[start : start + _RESIZE_BATCH]
        yield dali.resize([(image, Region.whole(image)) for image in batch])


# Limit of a batch's decoded bytes; DALI holds two batches. A process with one decoding thread has
# neighbours with as much, and is as fast with less.
_BATCH_BYTES, _BATCH_BYTES_OF_ONE_THREAD = 2**26, 2**24

# Decoded bytes that a loader has decoded at once on a GPU.
_PIECE_BYTES = 2**28

# Headers by which the size of batches is estimated.
_SAMPLED = 64

# Factor by which a batch of large images may exceed the limit, to have two images per thread.
_STRETCH = 8

# Share of the time of libjpeg for what is left of, right of and above the end of a region.
_COST_ABOVE = 0.3

# Limit of a batch's decoded bytes if rows share pictures.
_BYTES_OF_PICTURES = 2**24

# Small on a CPU, so that decoding starts early and the next images are checked meanwhile.
_FIRST_BATCH = {"cpu": 64, "gpu": BATCH_SIZE}

# Size after a batch was refused: so the next bad image costs less.
_SMALLEST_BATCH = 8

# Share of a partition's images that PNGs need to go to DALI, since one refused image costs its
# batch. JPEG always goes to DALI: few are refused after `is_valid`.
_MIN_FORMAT_SHARE = 0.5


@dataclass(slots=True)
class Batch:
    """Rows that are decoded together.

    Attributes
    ----------
    rows : list of int
        Consecutive rows of the partition, those with an error included.
    dali_rows : list of lists of int
        Rows of each image that DALI decodes, several for parts of one picture.
    encoded : list of uint8 arrays
        Encoded images of ``dali_rows``, each with its region if it has one.
    by_pillow : dict of int to Future
        Rows that Pillow decodes, already submitted to the thread pool.
    """

    rows: list[int] = field(default_factory=list)
    dali_rows: list[list[int]] = field(default_factory=list)
    encoded: list[Item] = field(default_factory=list)
    by_pillow: dict[int, Future[Any]] = field(default_factory=dict)

    @property
    def images(self) -> int:
        """Number of images to decode."""
        return len(self.dali_rows) + len(self.by_pillow)


class BatchPlanner:
    """Iterator over the batches of a partition, in row order; they adapt to refused images."""

    def __init__(self, images: EncodedImages, decoding: DecodeSpec) -> None:
        self.images = images
        self.decoding = decoding
        self._size = BATCH_SIZE  # most images in the next batch
        self._thorough = False  # check JPEGs more thoroughly
        self._max_bytes = _BATCH_BYTES if decode_threads() > 1 else _BATCH_BYTES_OF_ONE_THREAD
        self._stretched_bytes = _STRETCH * _BATCH_BYTES
        if decoding.device == "gpu":
            # Its memory is a hard limit, and the number of threads does not matter there.
            self._max_bytes = self._stretched_bytes = batch_bytes(current_device())
        self._min_images = 2 * decode_threads()
        self._by_pillow = decoding.by_pillow or (decoding.device == "cpu" and not has_dali())
        formats = Counter(header.format for header in images.headers if not header.needs_pillow)
        self._dali_formats: set[str | None] = {"jpeg"}
        # DALI rounds the grey of a PNG down, Pillow to nearest: use one of them for every PNG.
        if decoding.mode != "L" and formats["png"] >= _MIN_FORMAT_SHARE * formats.total():
            # Never WebP: DALI shows parts of damaged ones, and Pillow refuses them.
            self._dali_formats.add("png")
        self._walk: FrameWalk | None = None
        self._regions: dict[int, Region | None] = {}
        self._rows_of = {} if images.parts is None else self._joined_rows()
        self._joined = {row for rows in self._rows_of.values() for row in rows[1:]}
        # Where no batch begins; rows with an error may lie between those of a picture.
        self._inside = {
            row for rows in self._rows_of.values() for row in range(rows[0] + 1, rows[-1] + 1)
        }
        if self._rows_of and decoding.device == "cpu":
            # More is decoded than the rows get: a picture for each thread, or a few small ones.
            self._max_bytes, self._min_images = _BYTES_OF_PICTURES, decode_threads()

    def decoders(self) -> DecoderSet:
        """The decoders of this process for these images."""
        if self.decoding.device == "cpu":
            return decoders_for(self.decoding)
        rows = range(0, len(self.images), max(1, len(self.images) // _SAMPLED))
        headers = [self.images.headers[row] for row in rows]
        parts = map(self.images.part, rows)
        sizes = [self._nbytes(*image, None) for image in zip(headers, parts, strict=True)]
        largest = _batch_of(self._max_bytes, sizes)
        piece = _batch_of(_PIECE_BYTES, list(map(self.decoding.nbytes, headers)))
        decoders = decoders_for(self.decoding, largest)
        decoders.encoded.expect(min(largest, max(piece, len(self.images))))
        return decoders

    def learn(self, refused: Iterable[int]) -> None:
        """Adapt to the rows that DALI refused in a batch.

        Other images may be bad too, so batches become small and JPEGs are checked thoroughly. Other
        formats have no such check and go to Pillow from now on.
        """
        formats = {self.images.headers[row].format for row in refused}
        self._dali_formats -= formats - {"jpeg"}
        self._thorough |= "jpeg" in formats
        self._size = _SMALLEST_BATCH if formats else min(BATCH_SIZE, 4 * self._size)

    def __iter__(self) -> Iterator[Batch]:
        batch, nbytes, max_images = Batch(), 0, _FIRST_BATCH[self.decoding.device]
        for row, header in enumerate(self.images.headers):
            size = self._nbytes(header, self.images.part(row), self.region(row))
            images = batch.images
            if row in self._rows_of and (around := self._around(self._rows_of[row])):
                size += around.height * around.width * self.decoding.bytes_per_pixel(header)
            max_bytes = self._max_bytes if images >= self._min_images else self._stretched_bytes
            is_full = images >= max_images or (images > 0 and nbytes + size > max_bytes)
            if is_full and row not in self._inside:
                yield batch
                batch, nbytes, max_images = Batch(), 0, self._size
            nbytes += size
            batch.rows.append(row)
            if header.error is None:
                nbytes += self._assign(row, batch)
        if batch.rows:
            yield batch

    def assign_to_pillow(self, row: int, batch: Batch) -> None:
        """Start to decode an image of a batch with Pillow."""
        self._submit([row], self.images.read(row), batch)

    def _submit(self, rows: list[int], data: bytes | memoryview, batch: Batch) -> None:
        limits, part = (self.decoding.mode, self.decoding.max_pixels), self.images.part(rows[0])
        if part is None:
            (row,) = rows
            if has_several_pages(data, self.images.headers[row].format):
                _warn_of_pages(self.images.origin(row))
            decoded = decode_pool().submit(decode_region, data, *limits, self.region(row))
            batch.by_pillow[row] = decoded
            return
        wanted = [region for region in map(self.region, rows) if region is not None]
        images = [Future[Any]() for _ in rows]
        batch.by_pillow |= zip(rows, images, strict=True)
        if part.page and self.images.headers[rows[0]].format != "tiff":
            if self._walk is None or self._walk.picture != part.picture:
                self._walk = FrameWalk(part.picture, data, self.decoding.mode)
            self._walk.submit(images, part.page, wanted)
            return
        decode = functools.partial(decode_parts, data, *limits, part.page, part.shape)
        decode_pool().submit(_set_results, images, decode, wanted)

    def _assign(self, row: int, batch: Batch) -> int:
        """Assign an image to its decoder; the bytes that the batch now holds of it."""
        if row in self._joined:
            return 0
        rows = self._rows_of.get(row, [row])
        data = self.images.read(row)
        encoded = None if self._by_pillow else self._for_dali(row, data)
        if encoded is None:
            self._submit(rows, data, batch)
        else:
            region = self._around(rows)
            batch.dali_rows.append(rows)
            batch.encoded.append(encoded if region is None else (encoded, region))
        return len(data) if self.images.part(row) is None else 0  # those of parts are shared

    def _joined_rows(self) -> dict[int, list[int]]:
        """First row → all rows of each picture that is decoded once for several rows.

        Of a TIFF, those whose parts lie in the same strips or tiles.
        """
        pictures: dict[tuple[int, int, Region | None], list[int]] = {}
        for row, header in enumerate(self.images.headers):
            part = self.images.part(row)
            if part is not None and header.error is None:
                is_tiff = header.format == "tiff"
                held = held_by(self.images.read(row), part) if is_tiff else None
                pictures.setdefault((part.picture, part.page, held), []).append(row)
        several = (rows for rows in pictures.values() if len(rows) > 1)
        return {rows[0]: rows for rows in several if self._are_joined(rows)}

    def _are_joined(self, rows: list[int]) -> bool:
        """True if the picture of these rows is decoded once, rather than the region of each."""
        header = self.images.headers[rows[0]]
        if self._by_pillow or header.needs_pillow:
            return True
        data = self.images.read(rows[0])
        if header.format not in self._dali_formats and not _is_16_bit(header.format, data):
            return True
        if self.decoding.device == "gpu":
            return False
        if header.format != "jpeg" or not is_baseline_jpeg(data):
            return True
        parts = [part for part in map(self.images.part, rows) if part is not None]
        regions = [part.region.inside(part.shape) for part in parts]
        around = _cost(Region.around(regions), parts[0].shape)
        return sum(_cost(region, parts[0].shape) for region in regions) > around

    def _around(self, rows: list[int]) -> Region | None:
        """The region to decode for some rows of a picture, or for one; None for all of it."""
        first, part = self.region(rows[0]), self.images.part(rows[0])
        if part is None or self.decoding.device == "gpu":
            return first
        regions = [region.inside(part.shape) for region in map(self.region, rows) if region]
        return regions[0] if len(regions) == 1 else Region.around(regions)

    def _for_dali(self, row: int, data: bytes | memoryview) -> np.ndarray | None:
        """The bytes of an image that DALI decodes; None if it must not."""
        header, part = self.images.headers[row], self.images.part(row)
        chosen = header.format in self._dali_formats or _is_16_bit(header.format, data)
        if not chosen or header.needs_pillow:
            return None
        if header.format == "png":
            data = without_png_metadata(data, exif=True)
        encoded = np.frombuffer(data, np.uint8)
        if not is_valid(header.format, data, self._thorough):
            return None
        shape = parsed_shape(encoded)
        if shape is None:
            return None
        expected = (header.height, header.width) if part is None else part.shape
        if self.decoding.takes_regions and {*shape} != {*expected}:
            return None  # of an image of another size, the region is another one
        return encoded

    def region(self, row: int) -> Region | None:
        """The region of a row to decode; None for all of it."""
        if not self.decoding.takes_regions:
            return None
        if row not in self._regions:
            header, part = self.images.headers[row], self.images.part(row)
            origin = functools.partial(self.images.origin, row)
            self._regions[row] = self.decoding.region(header, origin, part)
        return self._regions[row]

    def _nbytes(self, header: Header, part: Part | None, region: Region | None) -> int:
        """Memory that decoding an image takes: the larger of its sizes before and after resize."""
        if header.error is not None or header.height is None or header.width is None:
            return 0
        on_gpu = self.decoding.device == "gpu"
        height, width = part.shape if on_gpu and part else (header.height, header.width)
        in_full = height * width * self.decoding.bytes_per_pixel(header)
        resized = self.decoding.nbytes(header)
        if region is not None and not self.decoding.scaled and not on_gpu:
            in_full = in_full * region.height * region.width // (height * width)
        elif self.decoding.scaled and region is None and header.format == "jpeg":
            # The chosen scale is less than twice the result's height and width.
            in_full = min(in_full, 4 * resized)
        return max(in_full, resized)


def _warn_of_pages(image: Origin) -> None:
    warn_once(
        f"several pages in {image.shard.rpartition('/')[0]}",
        f"{image.shard}: {image.name} is a TIFF of several pages, of which the first is read. "
        "For a row of every page, read with decode=False and call images.pages() of the frame",
    )


def _batch_of(nbytes: int, sizes: Sequence[int]) -> int:
    """Images in a batch of ``nbytes``, if they are as large as some on average."""
    mean = sum(sizes) // max(1, len(sizes))
    return min(BATCH_SIZE, max(1, nbytes // max(1, mean)))


def _cost(region: Region, shape: tuple[int, int]) -> float:
    """Time of decoding a region of a baseline JPEG, as a share of the whole picture's."""
    down = (region.top + region.height) / shape[0]
    area = region.height * region.width / math.prod(shape)
    return _COST_ABOVE * down + (1 - _COST_ABOVE) * area


class FrameWalk:
    """Decode of the frames of one animation, in the order in which they are submitted.

    One thread of the pool has it at a time: to decode a frame, all before it are drawn.
    """

    def __init__(self, picture: int, data: bytes | memoryview, mode: Mode) -> None:
        self.picture = picture
        self._frames = Animation(data, mode)
        self._lock = threading.Lock()
        self._waiting: deque[tuple[list[Future[Any]], int, list[Region]]] = deque()
        self._is_running = False

    def submit(self, images: list[Future[Any]], page: int, regions: list[Region]) -> None:
        """Set futures to regions of a frame, when those before have theirs."""
        with self._lock:
            self._waiting.append((images, page, regions))
            if self._is_running:
                return
            self._is_running = True
        decode_pool().submit(self._run)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                images, page, regions = self._waiting.popleft()
            _set_results(images, functools.partial(self._cut, page), regions)

    def _cut(self, page: int, regions: list[Region]) -> list[np.ndarray]:
        frame = self._frames.frame(page)
        return [region.of(frame).copy() for region in regions]


def _set_results(
    images: list[Future[Any]],
    decode: Callable[[list[Region]], list[np.ndarray]],
    regions: list[Region],
) -> None:
    """Set images to decoded regions, or all to the error of the decode."""
    try:
        pixels = decode(regions)
    except BaseException as error:
        while images:  # emptied, since the error's traceback has this frame
            images.pop().set_exception(error)
        return
    for image, its_pixels in zip(images, pixels, strict=True):
        image.set_result(its_pixels)


def _is_16_bit(format: str | None, data: bytes | memoryview) -> bool:
    # Pillow keeps only the upper byte of 16-bit colours. A row's pixels must not depend on the
    # other rows, so DALI decodes these even if they are few.
    return format == "png" and data[24] == 16
