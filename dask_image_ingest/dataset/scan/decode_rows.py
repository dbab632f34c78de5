"""The one decode of a task: its images are checked for size, decoded, and the bad ones told."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from dask.dataframe.dispatch import concat

from dask_image_ingest.dataset.options import ErrorPolicy
from dask_image_ingest.dataset.warning import logger
from dask_image_ingest.decode import DecodeSpec, Header, Origin, PixelBuffer, Pixels, decode
from dask_image_ingest.errors import ImageDecodeError, PartitionTooLargeError
from dask_image_ingest.frames import Backend, backend_of


@dataclass(frozen=True, repr=False)
class ImageDecode:
    """The decode of a column of references to one of images, and of their errors.

    Attributes
    ----------
    image, error
        What the columns are called; ``error`` None where there is none.
    decoding
        What images should look like.
    errors
        What becomes of an image that can't be decoded.
    storage_options
        For the file system of remote shards.
    pixels
        Whether the images are asked for, or only their errors: their column goes then.
    """

    image: Any
    error: Any | None
    decoding: DecodeSpec
    errors: ErrorPolicy = "null"
    storage_options: dict[str, Any] | None = None
    pixels: bool = True

    @property
    def columns(self) -> set[Any]:
        """The columns that are made by the decode."""
        return {self.image} if self.error is None else {self.image, self.error}

    def __repr__(self) -> str:
        return repr(self.image)  # in a plan

    def renamed(self, names: Callable[[Any], Any]) -> ImageDecode:
        """The same for columns of other names."""
        error = None if self.error is None else names(self.error)
        return replace(self, image=names(self.image), error=error)

    def into(self, frame: Any, decoded: Pixels) -> Any:
        """A frame with references, with what was decoded in their place."""
        backend = backend_of(frame)
        if self.pixels:
            return backend.with_images(frame, decoded, self.image, self.error)
        if self.error is not None:
            rows = [row for row, error in enumerate(decoded.errors) if error]
            values = [decoded.errors[row] for row in rows]
            frame = backend.with_columns(frame, {self.error: (values, pa.string())}, rows)
        return frame.drop(columns=[self.image])


#: A frame with its images, and the error of each row.
Decoded: TypeAlias = tuple[Any, Sequence[str | None]]

#: Which rows a decode keeps: those of good images, those of bad ones, or all.
Kept: TypeAlias = Literal["good", "bad"] | None


def kept_by(errors: ErrorPolicy) -> Kept:
    """The rows that a decode keeps by its policy for errors."""
    return "good" if errors == "drop" else None


def first_errors(errors: Sequence[Sequence[str | None]]) -> Sequence[str | None]:
    """The first error of each row among those of several images."""
    if len(errors) == 1:
        return errors[0]
    return [next(filter(None, each), None) for each in zip(*errors, strict=True)]


def keep_rows(decoded: Decoded, keep: Kept) -> Any:
    """The rows of a decoded frame that are kept."""
    frame, errors = decoded
    if keep is None:
        return frame
    rows = [row for row, error in enumerate(errors) if bool(error) is (keep == "bad")]
    return frame if len(rows) == len(frame) else frame.iloc[rows]


def first_rows(frame: Any, decode: Callable[[Any], Decoded], keep: Kept, limit: int | None) -> Any:
    """The first ``limit`` rows that are kept once they are decoded: few at first, then more."""
    if limit is None:
        return keep_rows(decode(frame), keep)
    parts: list[Any] = []
    start, size = 0, max(1, limit)
    while not parts or (start < len(frame) and sum(map(len, parts)) < limit):
        parts.append(keep_rows(decode(frame.iloc[start : start + size]), keep))
        start, size = start + size, 2 * size
    return concat(parts).head(limit)


@dataclass(frozen=True)
class DecodeInRead:
    """A decode in the task of a read, which has the shard open.

    Attributes
    ----------
    images
        How the images of each column are decoded.
    columns
        Those of the result, in order.
    keep, limit
        Which rows are kept of those that are decoded, and how many of them at most.
    steps
        What is done to the rows before, with positions in place of their images; None for nothing.
    """

    images: tuple[ImageDecode, ...]
    columns: tuple[Any, ...]
    keep: Kept
    limit: int | None
    steps: Callable[[Any], Any] | None


def decode_rows(
    headers: Sequence[Header],
    image_bytes: Callable[[int], Any],
    origin: Callable[[int], Origin],
    decoding: DecodeSpec,
    errors: ErrorPolicy,
    backend: Backend,
    *,
    what: str,
    pixels: bool = True,
    fetch: Callable[[], None] | None = None,
    meanwhile: Callable[[], Any] | None = None,
) -> Pixels:
    """Decode the images of some rows.

    Parameters
    ----------
    headers, image_bytes, origin, decoding, meanwhile
        As for `decode`.
    errors
        Whether the first image that can't be decoded raises.
    backend
        Where the pixels are to be.
    what
        The rows, for an error.
    pixels
        Whether pixels are wanted, or their errors alone.
    fetch
        Called when the images are known to fit, before the first of them is asked for.

    Raises
    ------
    PartitionTooLargeError
        Where the images would decode to more than one partition can hold; before they do.
    ImageDecodeError
        For the first image that can't be decoded, with ``errors="raise"``.
    """
    sizes = np.array([decoding.nbytes(header) for header in headers], np.int64)
    nbytes = int(sizes.sum())
    if pixels:
        check_size(what, nbytes, backend.largest_partition)
    if fetch is not None:
        fetch()
    buffer = backend.pixel_buffer(nbytes) if pixels else NoPixels()

    def decode_piece(rows: slice) -> Pixels:
        start = rows.start
        return decode(
            headers[rows],
            lambda row: image_bytes(start + row),
            decoding,
            _Piecewise(buffer),
            lambda row: origin(start + row),
            meanwhile if start == 0 else None,
        )

    # A decoder keeps batches beside the pixels, as large as what it is given at a time.
    pieces = [decode_piece(rows) for rows in cuts([sizes], backend.partition_memory())]
    told = [error for piece in pieces for error in piece.errors]
    shapes = np.concatenate([piece.shapes for piece in pieces])
    itemsizes = [piece.itemsizes for piece in pieces if piece.itemsizes is not None]
    known = np.concatenate(itemsizes) if len(itemsizes) == len(pieces) else None
    decoded = Pixels(buffer.finish(), shapes, told, known)
    _report(decoded, origin, errors)
    return decoded


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


def check_size(what: str, nbytes: int, largest: int) -> None:
    """Refuse a partition that can't be held, before anything is decoded."""
    if nbytes > largest:
        raise PartitionTooLargeError(
            f"{what} decode to {nbytes / 1e9:.1f} GB, and one partition holds at most "
            f'{largest / 1e9:.1f} GB of pixels here. Pass partition_size="512 MiB" to split shards '
            "(or repartition a frame that is there already), or size= to decode smaller images"
        )


def _report(pixels: Pixels, origin: Callable[[int], Origin], errors: ErrorPolicy) -> None:
    """Say how many images are bad, or raise for the first."""
    # A row of a merge that found nothing has no image, and an empty error.
    failed = [row for row, error in enumerate(pixels.errors) if error]
    if not failed:
        return
    first, error = origin(failed[0]), pixels.errors[failed[0]]
    named = first.name.startswith("sample")
    where = f"{first.shard}: " if first.shard else ""
    if errors == "raise":
        raise ImageDecodeError(
            f"{where}{'the image of ' if named else ''}{first.name} can't be decoded: "
            f"{error}. Pass errors='null' to get it as a row without an image"
        )
    logger.warning(
        "%s%d of %d images could not be decoded, first %s: %s",
        where,
        len(failed),
        len(pixels.errors),
        f"that of {first.name}" if named else first.name,
        error,
    )


class _Piecewise:
    """A buffer that is not finished with what comes next."""

    def __init__(self, buffer: PixelBuffer) -> None:
        self.append = buffer.append

    def finish(self) -> None:
        """Say nothing of what was taken so far."""


class NoPixels:
    """Takes decoded images where only their errors are asked for."""

    def append(self, images: Any) -> None:
        """Forget a batch."""

    def finish(self) -> np.ndarray:
        """Nothing was kept."""
        return np.empty(0, np.uint8)
