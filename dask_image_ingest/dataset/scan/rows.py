"""The rows of an open shard or file, and the decode of their images.

A task opens rows (`ImageRows`), makes a frame of their metadata, and puts pixels in it
(`decode_rows`): checks their size, decodes, and reports failures.
"""

from __future__ import annotations

import functools
import itertools
import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from dask.dataframe.dispatch import concat

from dask_image_ingest.dataset.predicates import Predicate, columns_of, holds
from dask_image_ingest.dataset.read_options import ErrorPolicy, ReadOptions
from dask_image_ingest.dataset.schema.annotations import Annotations, regions
from dask_image_ingest.dataset.schema.columns import (
    HEADERS,
    METADATA_COLUMNS,
    REGION,
    ImageMember,
)
from dask_image_ingest.decode import (
    DecodeSpec,
    EncodedImages,
    Header,
    Origin,
    Pixels,
    decode,
)
from dask_image_ingest.errors import ImageDecodeError, PartitionTooLargeError
from dask_image_ingest.frames import Backend, backend_of, without
from dask_image_ingest.typedefs import DataFrame, ImageBatch

logger = logging.getLogger("dask_image_ingest")


def missing_image(why: str) -> Header:
    """The header of a row without an image."""
    return Header(None, None, None, None, f"missing: {why}", needs_pillow=True)


#: The header of a sample without an image, and of a row of a table without one.
NO_MEMBER = missing_image("the sample has no image member")
NO_BYTES = missing_image("the row has no bytes of an image, and a path in a table is not opened")


def part_of(count: int, part: int, parts: int) -> range:
    """Row numbers of one of ``parts`` equal parts of ``count`` rows; ``part`` counts from 0."""
    return range(count * part // parts, count * (part + 1) // parts)


class ImageRows:
    """The rows of an open shard or file; methods take the numbers of those that are wanted.

    Of an image column the header of each row is read once, and only if something asks for it.

    Attributes
    ----------
    url
        The shard or file.
    numbers
        Numbers of all rows; int64 (n,).
    options
        Options of the read.
    first_label
        The index label of row 0.
    """

    first_label = 0

    def __init__(self, url: str, numbers: np.ndarray, options: ReadOptions) -> None:
        self.url, self.numbers, self.options = url, numbers, options
        first, *others = options.images
        #: Column → the image column that it describes, and the name of the field there.
        self._fields = {name: (first, name) for name in ("offset", "nbytes", *HEADERS, "error")}
        for member in others:
            for column in member.fields():
                self._fields[column] = member, column.removeprefix(f"{member.column}.")
        #: Image column → number of a row → header.
        self._headers: dict[str, dict[int, Header]] = {}

    def part(self, part: int, parts: int) -> np.ndarray:
        """Numbers of one of ``parts`` equal parts of the rows; ``part`` counts from 0."""
        rows = part_of(len(self.numbers), part, parts)
        return self.numbers[rows.start : rows.stop]

    def labels(self, numbers: np.ndarray) -> np.ndarray:
        """The index label of each row; int64 (n,)."""
        return self.first_label + numbers

    def keep(self, numbers: np.ndarray, filters: Predicate | None) -> np.ndarray:
        """Those of the rows for which ``filters``, on metadata columns, hold."""
        if not filters:
            return numbers
        return numbers[holds(filters, self.table(sorted(columns_of(filters)), numbers))]

    def table(self, columns: Sequence[str], numbers: np.ndarray) -> pa.Table:
        """Metadata columns; with the right number of rows even without any column."""
        if not columns:
            return pa.table({"": pa.nulls(len(numbers))}).select([])
        return pa.table({name: self.column(name, numbers) for name in columns})

    def column(self, name: str, numbers: np.ndarray) -> pa.Array:
        """One metadata column."""
        if name == "__url__":
            return pa.repeat(pa.scalar(self.url, pa.string()), len(numbers))
        return self.field(*self._fields[name], numbers)

    def field(self, member: ImageMember, name: str, numbers: np.ndarray) -> pa.Array:
        """A column like ``height`` of an image column."""
        position = Header._fields.index(name)
        values = [header[position] for header in self.headers(member, numbers)]
        return pa.array(values, METADATA_COLUMNS[name])

    def keys(self, numbers: np.ndarray) -> list[str]:
        """The key of each row."""
        keys: list[str] = self.column("__key__", numbers).to_pylist()
        return keys

    def headers(self, member: ImageMember, numbers: np.ndarray) -> list[Header]:
        """The header of each row's image."""
        known = self._headers.setdefault(member.column, {})
        new = [number for number in numbers.tolist() if number not in known]
        if new:
            known.update(zip(new, self._read_headers(member, np.array(new)), strict=True))
        return [known[number] for number in numbers.tolist()]

    def decoded_bytes(self, numbers: np.ndarray) -> int:
        """Bytes that all images of these rows decode to, judged by their headers."""
        return sum(
            sum(map(member.decoding.nbytes, self.headers(member, numbers)))
            for member in self.options.images
        )

    def images(self, member: ImageMember, numbers: np.ndarray) -> EncodedImages:
        """The encoded images of these rows, each of which is read when it is decoded."""
        headers = self.headers(member, numbers)
        read, prefetch = self._reader(member, numbers)
        keys = functools.cache(functools.partial(self.keys, numbers))  # few images are named

        def origin(row: int) -> Origin:
            return self._origin(member, int(numbers[row]), keys()[row])

        what = f"samples {numbers[0]}-{numbers[-1]} of {self.url}" if len(numbers) else ""
        return EncodedImages(headers, read, origin, what, prefetch, source=member.extensions)

    def _origin(self, member: ImageMember, number: int, key: str) -> Origin:
        """The identity of an image, for errors and random transforms."""
        return Origin(self.url, number, f"sample {key!r}")

    def expect(self, member: ImageMember, numbers: np.ndarray) -> None:
        """Called before the headers of images that are all to be decoded."""

    @abstractmethod
    def references(self, member: ImageMember, numbers: np.ndarray) -> pa.StructArray:
        """A reference to the image of each row."""

    @abstractmethod
    def _read_headers(self, member: ImageMember, numbers: np.ndarray) -> Sequence[Header]:
        """The headers of images that nothing has asked for before."""

    @abstractmethod
    def _reader(
        self, member: ImageMember, numbers: np.ndarray
    ) -> tuple[Callable[[int], Any], Callable[[], None]]:
        """Function from a position in ``numbers`` to the encoded image, and one to prefetch all."""


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
        False if the images are not needed: their column is then dropped.
    region
        Column that tells the region of each image (`REGION`); None if there is none.
    annotations
        Columns of boxes and points of these images; None without.
    part
        Columns that tell which part of its picture each image is: `PLACE`, height and width; empty
        if they are not made.
    told
        Of rows that are decoded group by group, the failure that was logged: no other is. None to
        log those of each call.
    """

    image: Any
    error: Any | None
    decoding: DecodeSpec
    errors: ErrorPolicy = "null"
    storage_options: dict[str, Any] | None = None
    pixels: bool = True
    region: Any | None = None
    annotations: Annotations | None = None
    part: tuple[Any, ...] = ()
    told: set[str | None] | None = field(default=None, compare=False)

    @property
    def columns(self) -> set[Any]:
        """The columns that the decode creates or changes."""
        return self.made.union(self.annotations.columns if self.annotations else ())

    @property
    def made(self) -> set[Any]:
        """The columns whose values it makes of the references alone."""
        return {self.image, self.error, self.region, *self.part} - {None}

    @property
    def results(self) -> set[Any]:
        """The columns of the result that it creates or changes."""
        return self.columns if self.pixels else self.columns - {self.image}

    def selected(self, names: Collection[Any]) -> ColumnDecode:
        """The decode of those of its columns that are named."""
        return replace(
            self,
            error=self.error if self.error in names else None,
            pixels=self.pixels and self.image in names,
            region=self.region if self.region in names else None,
            annotations=None if self.annotations is None else self.annotations.selected(names),
            part=() if {*self.part}.isdisjoint(names) else self.part,
        )

    def __repr__(self) -> str:
        return repr(self.image)  # short, for printed plans

    def renamed(self, names: Callable[[Any], Any]) -> ColumnDecode:
        """Rename the columns by the function ``names``."""
        error = None if self.error is None else names(self.error)
        region = None if self.region is None else names(self.region)
        annotations = None if self.annotations is None else self.annotations.renamed(names)
        renamed = replace(self, error=error, region=region, annotations=annotations)
        return replace(renamed, image=names(self.image), part=tuple(map(names, self.part)))

    def into(self, frame: DataFrame, encoded: EncodedImages, decoded: Pixels | None) -> Any:
        """Replace the references of ``frame`` by decoded images, errors, and what follows them.

        ``decoded`` is None if neither images nor errors are needed.
        """
        backend = backend_of(frame)
        if self.region is not None or self.annotations is not None:
            placements = [
                self.decoding.placement(
                    header, functools.partial(encoded.origin, row), encoded.part(row)
                )
                for row, header in enumerate(encoded.headers)
            ]
            if self.annotations is not None:
                frame = self.annotations.follow(frame, placements)
            if self.region is not None:
                column = (regions(placements), REGION)
                frame = backend.with_columns(frame, {self.region: column}, range(len(frame)))
        if self.part:
            found = map(encoded.part, range(len(frame)))
            places = [None if of is None else (of.page, *of.region[:4]) for of in found]
            columns = {
                name: (pa.array([place and place[n] for place in places], pa.int32()), pa.int32())
                for n, name in enumerate(self.part)
            }
            frame = backend.with_columns(frame, columns, range(len(frame)))
        if decoded is not None and self.pixels:
            return backend.with_images(frame, decoded, self.image, self.error)
        if decoded is not None and self.error is not None:
            rows = [row for row, error in enumerate(decoded.errors) if error]
            values = [decoded.errors[row] for row in rows]
            frame = backend.with_columns(frame, {self.error: (values, pa.string())}, rows)
        return without(frame, [self.image])


def decoded_meta(meta: DataFrame, images: Sequence[ColumnDecode]) -> Any:
    """The meta of a decoded frame."""
    nothing = EncodedImages([], lambda row: b"")
    pixels = Pixels(np.empty(0, np.uint8), np.empty((0, 3), np.int32), [])
    for column in images:
        meta = column.into(meta, nothing, pixels)
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
) -> Any:
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
) -> Any:
    """Judge encoded images by their headers, decode them, and put the pixels into the frame.

    ``encoded`` are those of each column, for the rows of the frame; ``only`` as for `Decode`.
    """
    backend = backend_of(frame)
    sizes = [decoded_sizes(*column) for column in zip(images, encoded, strict=True)]
    with_pixels = [size for column, size in zip(images, sizes, strict=True) if column.pixels]
    nbytes = sum(int(size.sum()) for size in with_pixels)
    if nbytes > (largest := backend.largest_partition):
        pieces = -(-nbytes // largest)
        raise PartitionTooLargeError(
            f"{encoded[0].what} decode to {nbytes / 1e9:.1f} GB, and one partition holds at most "
            f"{largest / 1e9:.1f} GB of pixels here. Cut the partitions of undecoded rows, "
            f"repartition(npartitions={pieces + 1} * frame.npartitions), pass size= to decode "
            'smaller images, or partition_size="512 MiB" to the read, which splits shards'
        )
    made: dict[int, Pixels] = {}
    for group in _shared(images, encoded, only):
        columns, own_sizes = [images[n] for n in group], [sizes[n] for n in group]
        results = _decode(columns, encoded[group[0]], own_sizes, backend)
        made.update(zip(group, results, strict=True))
    decoded = [made.get(number) for number in range(len(images))]
    if only is not None:
        rows = zip(*(pixels.errors for pixels in decoded if pixels), strict=True)
        failed = np.array([any(errors) for errors in rows], np.bool_)
        kept = np.flatnonzero(failed == (only == "bad"))
        # Before the pixels are in the frame, whose rows are taken by a copy: failed images have no
        # pixels, and to leave them out of `Pixels` needs none.
        if len(kept) < len(failed):
            frame, decoded = frame.iloc[kept], [pixels and pixels.take(kept) for pixels in decoded]
            encoded = [column.take(kept) for column in encoded]
    for column, encoded_column, result in zip(images, encoded, decoded, strict=True):
        frame = column.into(frame, encoded_column, result)
    return frame


def decoded_sizes(column: ColumnDecode, encoded: EncodedImages) -> np.ndarray:
    """Decoded bytes of each row's image, judged by its header; int64 (n,)."""
    return np.array(list(map(column.decoding.nbytes, encoded.headers)), np.int64)


def _shared(
    images: Sequence[ColumnDecode], encoded: Sequence[EncodedImages], only: ErrorFilter
) -> list[list[int]]:
    """Numbers of the columns to decode; those of which one decode makes all are together."""
    groups: dict[Hashable, list[int]] = {}
    for number, (column, data) in enumerate(zip(images, encoded, strict=True)):
        if not (column.pixels or column.error is not None or only is not None):
            continue  # what follows from the header is all that is needed
        decoding = column.decoding
        key: tuple[Hashable, ...] = (number,)
        if len(images) > 1 and decoding.can_share and data.source is not None:
            key = (data.source, decoding.mode, decoding.max_pixels)
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _decode(
    columns: Sequence[ColumnDecode],
    encoded: EncodedImages,
    sizes: Sequence[np.ndarray],
    backend: Backend,
) -> list[Pixels]:
    """Decode an image column, or several of the same images: of rows with equal pixels, one."""
    places = None
    if encoded.pictures is not None:
        _, firsts, places = np.unique(encoded.pictures, return_index=True, return_inverse=True)
        # In the order of the rows, and with each picture's place in it.
        order = np.argsort(firsts)
        places = np.argsort(order)[places.reshape(-1)]
        encoded = encoded.take(firsts[order])
        sizes = [of_column[firsts[order]] for of_column in sizes]
    if encoded.parts is not None:
        # Side by side those of one picture, which it may be decoded for at once: frames one after
        # the other, and parts in the same strips of a TIFF.
        corners = [(-1,) * 4 if of is None else (*of[:2], *of.region[:2]) for of in encoded.parts]
        order = np.lexsort(np.array(corners, np.int64).reshape(-1, 4).T[::-1])
        if (order[1:] < order[:-1]).any():
            back = np.argsort(order)
            places = back if places is None else back[places]
            encoded, sizes = encoded.take(order), [of_column[order] for of_column in sizes]
    encoded.prefetch()
    buffers = [
        backend.pixel_buffer(int(of_column.sum())) if column.pixels else NoPixels()
        for column, of_column in zip(columns, sizes, strict=True)
    ]
    decoded = decode(encoded, [column.decoding for column in columns], buffers)
    for column, pixels in zip(columns, decoded, strict=True):
        _report(pixels.errors, encoded.origin, column)
    return decoded if places is None else [pixels.take(places) for pixels in decoded]


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
    if images.told:
        return
    if images.told is not None:
        images.told.add(error)
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
