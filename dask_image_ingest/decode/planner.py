"""Planning of a partition: which decoder gets which image, and how many at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dask_image_ingest.decode.dali import BATCH_SIZE, parses
from dask_image_ingest.decode.formats import Header, is_valid
from dask_image_ingest.decode.gpu import batch_bytes, current_device
from dask_image_ingest.decode.options import DecodeSpec
from dask_image_ingest.decode.pillow import decode_with_pillow
from dask_image_ingest.decode.resources import decode_pool, decode_threads

# Decoded bytes that a batch may hold, since DALI keeps two of them.
_BATCH_BYTES = 2**26

# By how much a batch may pass them for the sake of two images for each thread.
_STRETCH = 8

# While the first images are decoded, the next ones are looked at; a GPU wants more work at once.
_FIRST_BATCH = {"cpu": 64, "gpu": BATCH_SIZE}
_SMALLEST_BATCH = 8

# What part of a partition's images a format must be for DALI to get it, since one image that it
# refuses costs the batch. It gets every JPEG, of which few are refused after a look at them.
_LEAST_SHARE = 0.5


@dataclass(slots=True)
class Batch:
    """Rows that are decoded together.

    Attributes
    ----------
    rows : list of int
        All of them, one after the other.
    dali_rows : list of int
        Those whose images DALI gets.
    encoded : list of uint8 arrays
        These images.
    by_pillow : dict of int to Future
        The others, which Pillow decodes meanwhile; rows with an error are in neither.
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
    """The batches of a partition, in the order of its rows, made one by one."""

    def __init__(
        self, headers: Sequence[Header], image_bytes: Callable[[int], Any], decoding: DecodeSpec
    ) -> None:
        self._headers = headers
        self._image_bytes = image_bytes
        self._decoding = decoding
        self._size = BATCH_SIZE
        self._thorough = False
        self._most_bytes, self._stretched = _BATCH_BYTES, _STRETCH * _BATCH_BYTES
        if decoding.device == "gpu":
            # Its memory can't be stretched, and what decodes there are not the threads.
            self._most_bytes = self._stretched = batch_bytes(current_device())
        self._least_images = 2 * decode_threads()
        formats = Counter(header.format for header in headers if not header.needs_pillow)
        most = {f for f, count in formats.items() if count >= _LEAST_SHARE * formats.total()}
        self._for_dali: set[str | None] = {"jpeg", *most}
        if decoding.mode == "L":
            # DALI rounds the grey of a PNG down and Pillow to the nearest: one of them for all.
            self._for_dali = {"jpeg"}

    def learn(self, refused: Iterable[int]) -> None:
        """Adapt to the rows that DALI refused in a batch.

        Where one image was bad, others may be: less should be lost each time, and JPEG is looked
        at more thoroughly. Other formats, which can't be, go to Pillow from now on.
        """
        formats = {self._headers[row].format for row in refused}
        self._for_dali -= formats - {"jpeg"}
        self._thorough |= "jpeg" in formats
        self._size = _SMALLEST_BATCH if formats else min(BATCH_SIZE, 4 * self._size)

    def __iter__(self) -> Iterator[Batch]:
        batch, nbytes, most = Batch(), 0, _FIRST_BATCH[self._decoding.device]
        for row, header in enumerate(self._headers):
            size, images = self._nbytes(header), batch.images
            room = self._most_bytes if images >= self._least_images else self._stretched
            if images >= most or (images > 0 and nbytes + size > room):
                yield batch
                batch, nbytes, most = Batch(), 0, self._size
            nbytes += size
            batch.rows.append(row)
            if header.error is None:
                self._assign(row, header, batch)
        if batch.rows:
            yield batch

    def assign_to_pillow(self, row: int, batch: Batch) -> None:
        """Begin to decode an image of a batch with Pillow."""
        batch.by_pillow[row] = decode_pool().submit(
            decode_with_pillow,
            self._image_bytes(row),
            self._decoding.mode,
            self._decoding.max_pixels,
        )

    def _assign(self, row: int, header: Header, batch: Batch) -> None:
        if self._decoding.by_pillow:
            self.assign_to_pillow(row, batch)
            return
        data = self._image_bytes(row)
        if self._suits_dali(header, data):
            batch.dali_rows.append(row)
            batch.encoded.append(np.frombuffer(data, np.uint8))
        else:
            self.assign_to_pillow(row, batch)

    def _suits_dali(self, header: Header, data: Any) -> bool:
        wanted = header.format in self._for_dali or _is_deep(header.format, data)
        return (
            wanted
            and not header.needs_pillow
            and is_valid(header.format, data, self._thorough)
            and parses(np.frombuffer(data, np.uint8))
        )

    def _nbytes(self, header: Header) -> int:
        """Bytes that decoding an image takes, before or after its resize."""
        if header.error is not None or header.height is None or header.width is None:
            return 0
        in_full = header.height * header.width * self._decoding.bytes_per_pixel(header)
        resized = self._decoding.nbytes(header)
        if self._decoding.scaled and header.format == "jpeg":
            # The smallest scale that is large enough is less than twice as large.
            in_full = min(in_full, 4 * resized)
        return max(in_full, resized)


def _is_deep(format: str | None, data: Any) -> bool:
    # Pillow has no more than the upper byte of 16-bit colours, and a row's pixels must not depend
    # on the other rows: DALI gets these, however few they are.
    return format == "png" and data[24] == 16
