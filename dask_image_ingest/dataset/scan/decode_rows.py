"""Decode the images of one task: check their size, decode, and report failures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from dask.dataframe.dispatch import concat

from dask_image_ingest.dataset.read_options import ErrorPolicy
from dask_image_ingest.dataset.warning import logger
from dask_image_ingest.decode import DecodeSpec, EncodedImages, Origin, PixelBuffer, Pixels, decode
from dask_image_ingest.errors import ImageDecodeError, PartitionTooLargeError
from dask_image_ingest.frames import Backend, backend_of, without


@dataclass(frozen=True, repr=False)
class ColumnDecode:
    """The decode of one column of references to images and errors.

    Attributes
    ----------
    image, error
        Names of the two columns; ``error`` is None if there is no such column.
    decoding
        Size, mode and transform of the images.
    errors
        What to do with an image that can't be decoded.
    storage_options
        For the fsspec filesystem of remote shards.
    pixels
        False if only the errors are needed: the image column is then dropped.
    """

    image: Any
    error: Any | None
    decoding: DecodeSpec
    errors: ErrorPolicy = "null"
    storage_options: dict[str, Any] | None = None
    pixels: bool = True

    @property
    def columns(self) -> set[Any]:
        """The columns that the decode creates."""
        return {self.image} if self.error is None else {self.image, self.error}

    def __repr__(self) -> str:
        return repr(self.image)  # short, for printed plans

    def renamed(self, names: Callable[[Any], Any]) -> ColumnDecode:
        """Rename the columns by the function ``names``."""
        error = None if self.error is None else names(self.error)
        return replace(self, image=names(self.image), error=error)

    def into(self, frame: Any, decoded: Pixels) -> Any:
        """Replace the references of ``frame`` by decoded images and errors."""
        backend = backend_of(frame)
        if self.pixels:
            return backend.with_images(frame, decoded, self.image, self.error)
        if self.error is not None:
            rows = [row for row, error in enumerate(decoded.errors) if error]
            values = [decoded.errors[row] for row in rows]
            frame = backend.with_columns(frame, {self.error: (values, pa.string())}, rows)
        return without(frame, [self.image])


def decoded_meta(meta: Any, images: Sequence[ColumnDecode]) -> Any:
    """The meta of a decoded frame."""
    for each in images:
        meta = each.into(meta, Pixels(np.empty(0, np.uint8), np.empty((0, 3), np.int32), []))
    return meta


#: Rows that a decode keeps: decoded images only, failed ones only, or all.
ErrorFilter: TypeAlias = Literal["good", "bad"] | None


def error_filter(errors: ErrorPolicy) -> ErrorFilter:
    """The filter for ``errors=``."""
    return "good" if errors == "drop" else None


def kept_rows(decoded: Sequence[Pixels], only: ErrorFilter) -> np.ndarray | None:
    """Numbers of the rows that ``only`` keeps, by the errors of all their images; None for all.

    They are taken before pixels are put into a frame, whose rows are taken by a copy: `Pixels.take`
    leaves out failed images, which have no pixels, without one.
    """
    if only is None:
        return None
    failed = np.array([any(row) for row in zip(*(each.errors for each in decoded), strict=True)])
    rows = np.flatnonzero(failed if only == "bad" else ~failed.astype(np.bool_))
    return None if len(rows) == len(failed) else rows


def decode_first_rows(frame: Any, decode: Callable[[Any], Any], limit: int | None) -> Any:
    """Decode until ``limit`` rows are kept, in slices that double in size."""
    if limit is None:
        return decode(frame)
    parts: list[Any] = []
    start, size = 0, max(1, limit)
    while not parts or (start < len(frame) and sum(map(len, parts)) < limit):
        parts.append(decode(frame.iloc[start : start + size]))
        start, size = start + size, 2 * size
    return concat(parts).head(limit)


@dataclass(frozen=True, repr=False)
class FusedDecode:
    """A decode that runs in the task of its scan, on the open shard.

    Attributes
    ----------
    images
        The image columns to decode.
    columns
        Columns of the result, in order.
    only, limit
        As for `Decode`.
    steps
        Operations between scan and decode, as one function of a frame whose image columns hold row
        positions (int64); None if there are none.
    passed_on
        Header columns that the steps don't use: read with the images, for the remaining rows.
    """

    images: tuple[ColumnDecode, ...]
    columns: tuple[Any, ...]
    only: ErrorFilter
    limit: int | None
    steps: Callable[[Any], Any] | None = None
    passed_on: tuple[str, ...] = ()

    def __repr__(self) -> str:
        names = ", ".join(repr(each.image) for each in self.images)
        options = {"only": self.only, "limit": self.limit}
        return names + "".join(f" {k}={value}" for k, value in options.items() if value is not None)


def decode_rows(
    encoded: EncodedImages,
    images: ColumnDecode,
    backend: Backend,
    *,
    what: str,
    fetch: Callable[[], None] | None = None,
    meanwhile: Callable[[], Any] | None = None,
) -> Pixels:
    """Decode the images of some rows, at most one partition's memory at a time.

    Parameters
    ----------
    encoded, meanwhile
        As for `decode`.
    images
        Options of the decode, and what to do with an image that can't be decoded.
    backend
        Allocates the pixels.
    what
        Names the rows in an error.
    fetch
        Called once the images are known to fit, before the first of them is read.

    Raises
    ------
    PartitionTooLargeError
        Before the decode, if the images exceed what one partition can hold.
    ImageDecodeError
        For the first image that can't be decoded, with ``errors="raise"``.
    """
    decoding = images.decoding
    sizes = np.array([decoding.nbytes(header) for header in encoded.headers], np.int64)
    nbytes = int(sizes.sum())
    if images.pixels:
        check_size(what, nbytes, backend.largest_partition)
    if fetch is not None:
        fetch()
    buffer = backend.pixel_buffer(nbytes) if images.pixels else NoPixels()
    pieces = []
    # In pieces: beside the pixels, a decoder holds batches as large as what one call decodes.
    for rows in slices_by_size([sizes], backend.partition_memory()):
        pieces.append(decode(encoded.slice(rows), decoding, _SharedBuffer(buffer), meanwhile))
        meanwhile = None
    errors = [error for piece in pieces for error in piece.errors]
    shapes = np.concatenate([piece.shapes for piece in pieces])
    per_piece = [piece.itemsizes for piece in pieces if piece.itemsizes is not None]
    itemsizes = np.concatenate(per_piece) if len(per_piece) == len(pieces) else None
    _report(errors, encoded.origin, images)
    return Pixels(buffer.finish(), shapes, errors, itemsizes)


def slices_by_size(sizes: Sequence[np.ndarray], largest: int) -> Iterator[slice]:
    """Cut rows into consecutive slices of about ``largest`` bytes; a larger row is its own slice.

    ``sizes`` are the bytes of each row, one array per image column. Cuts are where the running
    total passes a multiple of ``largest``, so one slice may exceed it by less than a row.
    """
    nbytes = np.sum(sizes, axis=0)
    full = (np.cumsum(nbytes) - nbytes) // largest
    alone = nbytes > largest
    ends = (full[1:] > full[:-1]) | alone[1:] | alone[:-1]
    edges = [0, *(1 + np.flatnonzero(ends)).tolist(), len(nbytes)]
    return (slice(start, end) for start, end in itertools.pairwise(edges))


def check_size(what: str, nbytes: int, largest: int) -> None:
    """Raise `PartitionTooLargeError`, before anything is decoded, above ``largest`` bytes."""
    if nbytes > largest:
        raise PartitionTooLargeError(
            f"{what} decode to {nbytes / 1e9:.1f} GB, and one partition holds at most "
            f'{largest / 1e9:.1f} GB of pixels here. Pass partition_size="512 MiB" to split shards '
            "(or repartition the frame), or size= to decode smaller images"
        )


def _report(
    errors: Sequence[str | None], origin: Callable[[int], Origin], images: ColumnDecode
) -> None:
    """Log how many images failed, or raise for the first."""
    # An unmatched row of a merge has no image and the error "", which is no failure.
    failed = [row for row, error in enumerate(errors) if error]
    if not failed:
        return
    first, error = origin(failed[0]), errors[failed[0]]
    named = first.name.startswith("sample")
    where = f"{first.shard}: " if first.shard else ""
    is_main = images.image == "image"
    if images.errors == "raise":
        what = "the image of " if is_main else f"{images.image!r} of "
        raise ImageDecodeError(
            f"{where}{what if named else ''}{first.name} can't be decoded: "
            f"{error}. Pass errors='null' to get it as a row without an image"
        )
    logger.warning(
        "%s%d of %d images%s could not be decoded, first %s: %s",
        where,
        len(failed),
        len(errors),
        "" if is_main else f" of {images.image!r}",
        f"that of {first.name}" if named else first.name,
        error,
    )


class _SharedBuffer:
    """One buffer for several `decode` calls, none of which may finish it."""

    def __init__(self, buffer: PixelBuffer) -> None:
        self.append = buffer.append

    def finish(self) -> None:
        """Do nothing: more pieces follow."""


class NoPixels:
    """Buffer that discards pixels, where only errors are needed."""

    def append(self, images: Any) -> None:
        """Discard a batch."""

    def finish(self) -> np.ndarray:
        """No pixels."""
        return np.empty(0, np.uint8)
