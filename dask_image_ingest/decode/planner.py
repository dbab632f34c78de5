"""Split a partition into batches, and choose the decoder of each image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dask_image_ingest.decode.buffers import EncodedImages
from dask_image_ingest.decode.dali import BATCH_SIZE, parses
from dask_image_ingest.decode.formats import Header, is_valid
from dask_image_ingest.decode.formats.png_webp import without_png_metadata
from dask_image_ingest.decode.gpu import batch_bytes, current_device
from dask_image_ingest.decode.options import DecodeSpec
from dask_image_ingest.decode.pillow import decode_with_pillow
from dask_image_ingest.decode.resources import decode_pool, decode_threads

# Limit of a batch's decoded bytes; DALI holds two batches.
_BATCH_BYTES = 2**26

# Factor by which a batch of large images may exceed the limit, to have two images per thread.
_STRETCH = 8

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
    dali_rows : list of int
        Rows that DALI decodes.
    encoded : list of uint8 arrays
        Encoded images of ``dali_rows``.
    by_pillow : dict of int to Future
        Rows that Pillow decodes, already submitted to the thread pool.
    """

    rows: list[int] = field(default_factory=list)
    dali_rows: list[int] = field(default_factory=list)
    encoded: list[np.ndarray] = field(default_factory=list)
    by_pillow: dict[int, Future[Any]] = field(default_factory=dict)

    @property
    def images(self) -> int:
        """Number of rows with an image to decode."""
        return len(self.dali_rows) + len(self.by_pillow)


class Schedule:
    """Iterator over the batches of a partition, in row order; they adapt to refused images."""

    def __init__(self, images: EncodedImages, decoding: DecodeSpec) -> None:
        self.images = images
        self.decoding = decoding
        self._size = BATCH_SIZE  # most images in the next batch
        self._thorough = False  # check JPEGs more thoroughly
        self._max_bytes, self._stretched_bytes = _BATCH_BYTES, _STRETCH * _BATCH_BYTES
        if decoding.device == "gpu":
            # Its memory is a hard limit, and the number of threads does not matter there.
            self._max_bytes = self._stretched_bytes = batch_bytes(current_device())
        self._min_images = 2 * decode_threads()
        formats = Counter(header.format for header in images.headers if not header.needs_pillow)
        self._dali_formats: set[str | None] = {"jpeg"}
        # DALI rounds the grey of a PNG down, Pillow to nearest: use one of them for every PNG.
        if decoding.mode != "L" and formats["png"] >= _MIN_FORMAT_SHARE * formats.total():
            # Never WebP: DALI shows parts of damaged ones, and Pillow refuses them.
            self._dali_formats.add("png")

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
            size, images = self._nbytes(header), batch.images
            max_bytes = self._max_bytes if images >= self._min_images else self._stretched_bytes
            if images >= max_images or (images > 0 and nbytes + size > max_bytes):
                yield batch
                batch, nbytes, max_images = Batch(), 0, self._size
            nbytes += size
            batch.rows.append(row)
            if header.error is None:
                self._assign(row, header, batch)
        if batch.rows:
            yield batch

    def assign_to_pillow(self, row: int, batch: Batch) -> None:
        """Start to decode an image of a batch with Pillow."""
        batch.by_pillow[row] = decode_pool().submit(
            decode_with_pillow,
            self.images.read(row),
            self.decoding.mode,
            self.decoding.max_pixels,
        )

    def _assign(self, row: int, header: Header, batch: Batch) -> None:
        if self.decoding.by_pillow:
            self.assign_to_pillow(row, batch)
            return
        encoded = self._for_dali(header, self.images.read(row))
        if encoded is None:
            self.assign_to_pillow(row, batch)
        else:
            batch.dali_rows.append(row)
            batch.encoded.append(encoded)

    def _for_dali(self, header: Header, data: Any) -> np.ndarray | None:
        """The bytes of an image that DALI decodes; None if it must not."""
        chosen = header.format in self._dali_formats or _is_16_bit(header.format, data)
        if not chosen or header.needs_pillow:
            return None
        if header.format == "png":
            data = without_png_metadata(data, exif=True)
        encoded = np.frombuffer(data, np.uint8)
        suits = is_valid(header.format, data, self._thorough) and parses(encoded)
        return encoded if suits else None

    def _nbytes(self, header: Header) -> int:
        """Memory that decoding an image takes: the larger of its sizes before and after resize."""
        if header.error is not None or header.height is None or header.width is None:
            return 0
        in_full = header.height * header.width * self.decoding.bytes_per_pixel(header)
        resized = self.decoding.nbytes(header)
        if self.decoding.scaled and header.format == "jpeg":
            # The chosen scale is less than twice the result's height and width.
            in_full = min(in_full, 4 * resized)
        return max(in_full, resized)


def _is_16_bit(format: str | None, data: Any) -> bool:
    # Pillow keeps only the upper byte of 16-bit colours. A row's pixels must not depend on the
    # other rows, so DALI decodes these even if they are few.
    return format == "png" and data[24] == 16
