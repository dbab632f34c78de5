"""Decode the images of one task: check their size, decode, and report failures."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from dask.dataframe.dispatch import concat

from dask_image_ingest.dataset.read_options import ErrorPolicy
from dask_image_ingest.decode import DecodeSpec, EncodedImages, Origin, Pixels, decode
from dask_image_ingest.errors import ImageDecodeError, PartitionTooLargeError
from dask_image_ingest.frames import Backend, backend_of, without
from dask_image_ingest.typedefs import DataFrame, ImageBatch

logger = logging.getLogger("dask_image_ingest")


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

    def into(self, frame: DataFrame, decoded: Pixels) -> DataFrame:
        """Replace the references of ``frame`` by decoded images and errors."""
        backend = backend_of(frame)
        if self.pixels:
            return backend.with_images(frame, decoded, self.image, self.error)
        if self.error is not None:
            rows = [row for row, error in enumerate(decoded.errors) if error]
            values = [decoded.errors[row] for row in rows]
            frame = backend.with_columns(frame, {self.error: (values, pa.string())}, rows)
        return without(frame, [self.image])


def decoded_meta(meta: DataFrame, images: Sequence[ColumnDecode]) -> DataFrame:
    """The meta of a decoded frame."""
    for column in images:
        meta = column.into(meta, Pixels(np.empty(0, np.uint8), np.empty((0, 3), np.int32), []))
    return meta


#: Rows that a decode keeps: decoded images only, failed ones only, or all.
ErrorFilter: TypeAlias = Literal["good", "bad"] | None


def error_filter(errors: ErrorPolicy) -> ErrorFilter:
    """The filter for ``errors=``."""
    return "good" if errors == "drop" else None


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
        Operations between scan and decode, as one function of a frame whose image columns hold
        numbers of rows (int64); None if there are none.
    passed_on
        Header columns that the steps don't use: read with the images, for the remaining rows.
    """

    images: tuple[ColumnDecode, ...]
    columns: tuple[Any, ...]
    only: ErrorFilter
    limit: int | None
    steps: Callable[[Any], Any] | None = None
    passed_on: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """True if the images of all scanned rows are decoded."""
        return self.steps is None and self.limit is None

    def __repr__(self) -> str:
        names = ", ".join(repr(column.image) for column in self.images)
        options = {"only": self.only, "limit": self.limit}
        return names + "".join(f" {k}={value}" for k, value in options.items() if value is not None)


#: Opens the images of a frame's rows: the frame, and its encoded images by image column.
OpenImages: TypeAlias = Callable[[Any], tuple[Any, Sequence[EncodedImages]]]


def decode_rows(
    frame: DataFrame,
    images: Sequence[ColumnDecode],
    open_images: OpenImages,
    only: ErrorFilter = None,
    limit: int | None = None,
) -> DataFrame:
    """Put the pixels of the rows of a frame in place of what its image columns hold.

    With ``limit``, rows are decoded in slices that double in size, until so many are kept.

    Raises
    ------
    PartitionTooLargeError
        Before the decode, if the images exceed what one partition can hold.
    ImageDecodeError
        For the first image that can't be decoded, with ``errors="raise"``.
    """
    if limit is None:
        frame, encoded = open_images(frame)
        return put_pixels(frame, images, encoded, only)
    parts: list[Any] = []
    start, size = 0, max(1, limit)
    while not parts or (start < len(frame) and sum(map(len, parts)) < limit):
        some, encoded = open_images(frame.iloc[start : start + size])
        parts.append(put_pixels(some, images, encoded, only))
        start, size = start + size, 2 * size
    return concat(parts).head(limit)


def put_pixels(
    frame: DataFrame,
    images: Sequence[ColumnDecode],
    encoded: Sequence[EncodedImages],
    only: ErrorFilter = None,
) -> DataFrame:
    """Judge encoded images by their headers, decode them, and put the pixels into the frame.

    ``encoded`` are those of each column, for the rows of the frame; ``only`` as for `Decode`.
    """
    backend = backend_of(frame)
    sizes = [decoded_sizes(*column) for column in zip(images, encoded, strict=True)]
    with_pixels = [size for column, size in zip(images, sizes, strict=True) if column.pixels]
    nbytes = sum(int(size.sum()) for size in with_pixels)
    if nbytes > (largest := backend.largest_partition):
        raise PartitionTooLargeError(
            f"{encoded[0].what} decode to {nbytes / 1e9:.1f} GB, and one partition holds at most "
            f'{largest / 1e9:.1f} GB of pixels here. Pass partition_size="512 MiB" to split shards '
            "(or repartition the frame), or size= to decode smaller images"
        )
    decoded = [_decode(*column, backend) for column in zip(images, encoded, sizes, strict=True)]
    if only is not None:
        rows = zip(*(pixels.errors for pixels in decoded), strict=True)
        failed = np.array([any(errors) for errors in rows], np.bool_)
        kept = np.flatnonzero(failed == (only == "bad"))
        # Before the pixels are in the frame, whose rows are taken by a copy: failed images have no
        # pixels, and to leave them out of `Pixels` needs none.
        if len(kept) < len(failed):
            frame, decoded = frame.iloc[kept], [pixels.take(kept) for pixels in decoded]
    for column, pixels in zip(images, decoded, strict=True):
        frame = column.into(frame, pixels)
    return frame


def decoded_sizes(column: ColumnDecode, encoded: EncodedImages) -> np.ndarray:
    """Decoded bytes of each row's image, judged by its header; int64 (n,)."""
    return np.array(list(map(column.decoding.nbytes, encoded.headers)), np.int64)


def _decode(
    column: ColumnDecode, encoded: EncodedImages, sizes: np.ndarray, backend: Backend
) -> Pixels:
    """Decode one image column: of rows with the same picture, one."""
    places = None
    if encoded.pictures is not None:
        _, firsts, places = np.unique(encoded.pictures, return_index=True, return_inverse=True)
        # In the order of the rows, and with each picture's place in it.
        order = np.argsort(firsts)
        places = np.argsort(order)[places.reshape(-1)]
        encoded, sizes = encoded.take(firsts[order]), sizes[firsts[order]]
    encoded.prefetch()
    buffer = backend.pixel_buffer(int(sizes.sum())) if column.pixels else NoPixels()
    pixels = decode(encoded, column.decoding, buffer)
    _report(pixels.errors, encoded.origin, column)
    return pixels if places is None else pixels.take(places)


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


class NoPixels:
    """Buffer that discards pixels, where only errors are needed."""

    def append(self, images: ImageBatch) -> None:
        """Discard a batch."""

    def finish(self) -> np.ndarray:
        """No pixels."""
        return np.empty(0, np.uint8)
