"""The images of rows that were moved: decoded in their new partition, as the read would have."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_image_ingest.dataset.metadata import SampleRows
from dask_image_ingest.dataset.options import ReadOptions
from dask_image_ingest.dataset.partition import check_size
from dask_image_ingest.dataset.pointers import each_shard
from dask_image_ingest.dataset.row_pointers import RowPointer, parse
from dask_image_ingest.dataset.warning import logger
from dask_image_ingest.decode import Header, Origin, PixelBuffer, Pixels, decode, read_header
from dask_image_ingest.errors import ImageDecodeError
from dask_image_ingest.frames import backend_of
from dask_image_ingest.storage import Shard, announce, open_shard
from dask_image_ingest.tar import TarIndex, index_tar, read_member

__all__ = ["EncodedImages", "MovedImages", "cuts", "decode_moved", "decode_pieces", "encoded_sizes"]

# A merge that found nothing on one side: no image, and nothing wrong with it.
_NOTHING = Header(None, None, None, None, "", True)

# The index of a tar of which only plain members are read.
_PLAIN = TarIndex()


@dataclass(frozen=True)
class MovedImages:
    """A column of pointers that become images, and the column of their errors.

    Attributes
    ----------
    image, error
        What the columns are called; ``error`` None where there is none.
    options
        Those of the read.
    """

    image: Any
    error: Any | None
    options: ReadOptions

    @property
    def names(self) -> tuple[Any, Any | None]:
        """What the columns of images and errors are called."""
        return self.image, self.error

    @property
    def columns(self) -> set[Any]:
        """The columns that are made by the decode."""
        return {self.image} if self.error is None else {self.image, self.error}


def decode_moved(frame: Any, images: Sequence[MovedImages]) -> Any:
    """Decode the images that a partition points to.

    Raises
    ------
    PartitionTooLargeError
        Where they would decode to more than a worker can hold; before they do.
    ImageDecodeError
        For the first image that can't be decoded, with ``errors="raise"``.
    """
    backend = backend_of(frame)
    encoded = [EncodedImages(frame, each) for each in images]
    nbytes = int(sum(each.nbytes.sum() for each in encoded))
    what = f"the images of {len(frame)} rows that were moved to one partition"
    check_size(what, nbytes, backend.largest_partition)
    rows = np.arange(len(frame))
    for each in encoded:
        frame = backend.with_images(frame, each.decode(rows), *each.images.names)
    return frame


def decode_pieces(frame: Any, images: Sequence[MovedImages], largest: int) -> Iterator[Any]:
    """The same rows, decoded in pieces of about ``largest`` bytes of pixels at most.

    Nor are there more bytes of encoded images in memory at a time.
    """
    backend = backend_of(frame)
    for rows in cuts([encoded_sizes(frame, each) for each in images], largest):
        part = frame.iloc[rows]
        encoded = [EncodedImages(part, each) for each in images]
        for places in cuts([each.nbytes for each in encoded], largest):
            piece = part.iloc[places]
            for each in encoded:
                decoded = each.decode(np.arange(len(part))[places])
                piece = backend.with_images(piece, decoded, *each.images.names)
            yield piece


def cuts(sizes: Sequence[np.ndarray], largest: int) -> Iterator[slice]:
    """Rows that follow each other, cut where a multiple of ``largest`` bytes is full.

    A row that is larger stands alone.
    """
    nbytes = np.sum(sizes, axis=0)
    full = (np.cumsum(nbytes) - nbytes) // largest
    alone = nbytes > largest
    ends = (full[1:] > full[:-1]) | alone[1:] | alone[:-1]
    edges = [0, *(1 + np.flatnonzero(ends)).tolist(), len(nbytes)]
    return (slice(start, end) for start, end in itertools.pairwise(edges))


def encoded_sizes(frame: Any, images: MovedImages) -> np.ndarray:
    """The bytes of each encoded image that the rows of a frame point to; 0 where none are known."""
    (texts,) = backend_of(frame).to_arrow(frame[[images.image]]).columns
    places = (None if text is None else parse(text).place for text in texts.to_pylist())
    return np.array([0 if place is None else place[1] for place in places], np.int64)


class EncodedImages:
    """The encoded images that the rows of a frame point to, in memory; each of them once."""

    def __init__(self, frame: Any, images: MovedImages) -> None:
        self.images = images
        (texts,) = backend_of(frame).to_arrow(frame[[images.image]]).columns
        known = texts.combine_chunks().dictionary_encode()
        self._pointers = [parse(text) for text in known.dictionary.to_pylist()]
        self._backend = backend_of(frame)
        # A merge may have many rows of one image, and rows of none.
        self._which = np.asarray(known.indices.fill_null(len(self._pointers)), np.int64)
        self._headers, self._encoded = _read(self._pointers, images.options)
        self._headers.append(_NOTHING)
        self._encoded.append(None)
        sizes = [images.options.decoding.nbytes(header) for header in self._headers]
        self.nbytes = np.array(sizes, np.int64)[self._which]

    def decode(self, rows: np.ndarray) -> Pixels:
        """The images of the given rows."""
        which, places = np.unique(self._which[rows], return_index=True)
        order = which[np.argsort(places)]
        made = self._decode(order)
        if len(order) == len(rows):
            return made
        position = np.zeros(len(self._headers), np.int64)
        position[order] = np.arange(len(order))
        return made.take(position[self._which[rows]])

    def _decode(self, order: np.ndarray) -> Pixels:
        options = self.images.options
        wanted = order.tolist()
        headers = [self._headers[one] for one in wanted]

        def image_bytes(row: int) -> Any:
            return self._encoded[wanted[row]]

        def origin(row: int) -> Origin:
            if wanted[row] == len(self._pointers):
                return Origin("", 0, "no image")
            pointer = self._pointers[wanted[row]]
            return Origin(pointer.shard, pointer.number, f"sample {pointer.key!r}")

        sizes = np.array([options.decoding.nbytes(header) for header in headers], np.int64)
        buffer = self._backend.pixel_buffer(int(sizes.sum()))

        def decode_piece(rows: slice) -> Pixels:
            start = rows.start
            return decode(
                headers[rows],
                lambda row: image_bytes(start + row),
                options.decoding,
                _Piecewise(buffer),
                lambda row: origin(start + row),
            )

        # A decoder keeps batches beside the pixels, as large as what it is given at a time.
        largest = self._backend.partition_memory()
        pieces = [decode_piece(rows) for rows in cuts([sizes], largest)]
        errors = [error for piece in pieces for error in piece.errors]
        pixels = Pixels(buffer.finish(), np.concatenate([p.shapes for p in pieces]), errors)
        _report(pixels, origin, options)
        return pixels


class _Piecewise:
    """A buffer that is not finished with what comes next."""

    def __init__(self, buffer: PixelBuffer) -> None:
        self.append = buffer.append

    def finish(self) -> None:
        """Say nothing of what was taken so far."""


def _report(pixels: Pixels, origin: Callable[[int], Origin], options: ReadOptions) -> None:
    """Say how many images are bad, or raise for the first."""
    failed = [row for row, error in enumerate(pixels.errors) if error]
    if not failed:
        return
    first, error = origin(failed[0]), pixels.errors[failed[0]]
    if options.errors == "raise":
        raise ImageDecodeError(
            f"{first.shard}: the image of {first.name} can't be decoded: {error}. Pass "
            "errors='null' to get it as a row without an image"
        )
    logger.warning(
        "%d of %d images could not be decoded, first that of %s of %s: %s",
        len(failed),
        len(pixels.errors),
        first.name,
        first.shard,
        error,
    )


def _read(pointers: Sequence[RowPointer], options: ReadOptions) -> tuple[list[Header], list[Any]]:
    """What the first bytes of each image tell, and its bytes: shard by shard, in their order."""
    headers = [_NOTHING] * len(pointers)
    encoded: list[Any] = [None] * len(pointers)
    by_shard: dict[str, list[int]] = {}
    for row, pointer in enumerate(pointers):
        by_shard.setdefault(pointer.shard, []).append(row)

    def read_shard(url: str, rows: list[int]) -> None:
        by_version: dict[Shard | None, list[int]] = {}
        for row in rows:
            by_version.setdefault(pointers[row].listed, []).append(row)
        for listed, some in by_version.items():
            # The shard has to be as it was when its pointers were read.
            read(url, listed, some)

    def read(url: str, listed: Shard | None, rows: list[int]) -> None:
        places = {row: place for row in rows if (place := pointers[row].place) is not None}
        with open_shard(url, options.storage_options, listed) as content:
            announce(content, sorted((start, start + size) for start, size in places.values()))
            for row in sorted(places, key=places.__getitem__):
                # Copied, so that the shard is read now.
                encoded[row] = bytes(read_member(content, _PLAIN, places[row]))
                header = read_header(encoded[row], options.decoding.max_pixels)
                headers[row] = options.decoding.judged(header)
            others = [row for row in rows if row not in places]
            if others:
                samples = SampleRows(url, content, index_tar(content, url), options)
                samples = samples.take(np.array([pointers[row].number for row in others]))
                for at, row in enumerate(others):
                    headers[row] = samples.headers[at]
                    if headers[row].error is None:
                        encoded[row] = bytes(samples.image_bytes(at) or b"")

    each_shard(by_shard, read_shard)
    return headers, encoded
