"""Base class of the rows of a shard or file: metadata, headers and encoded bytes of images."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa

from dask_image_ingest.dataset.predicates import Predicate, columns_of, holds
from dask_image_ingest.dataset.read_options import ReadOptions
from dask_image_ingest.dataset.schema.columns import METADATA_COLUMNS, ImageMember
from dask_image_ingest.decode import DecodeSpec, EncodedImages, Header, Origin

Self = TypeVar("Self", bound="ImageRows")

#: The header of a sample without an image.
NO_MEMBER = Header(
    None, None, None, None, "missing: the sample has no image member", needs_pillow=True
)


#: The header of a row of a table without an image.
NO_BYTES = NO_MEMBER._replace(
    error="missing: the row has no bytes of an image, and a path in a table is not opened"
)

_HEADER_COLUMNS = frozenset(Header._fields) & frozenset(METADATA_COLUMNS)


def part_of(count: int, part: int, parts: int) -> range:
    """Row numbers of one of ``parts`` equal parts of ``count`` rows; ``part`` counts from 0."""
    return range(count * part // parts, count * (part + 1) // parts)


class ImageRows:
    """Rows with one image each, whose columns are computed lazily.

    ``keep`` and ``take`` return views of some rows with the values cached so far: nothing is read
    twice, and nothing for rows that were dropped.

    Attributes
    ----------
    url
        The shard or file.
    numbers
        Numbers of the rows in it; shape (n,), int64.
    first_label
        The index label of its first row.
    """

    first_label = 0

    #: Cached properties with a value per row, which ``take`` carries over.
    cached: ClassVar[frozenset[str]]
    #: Those of them that depend on which member is the image; `of` drops them.
    of_image: ClassVar[frozenset[str]]

    def __init__(self, url: str, count: int, options: ReadOptions) -> None:
        self.url = url
        self.numbers = np.arange(count)
        self._member, *others = options.images
        #: Header column ("mask.height") → the further image column that it describes.
        self._fields = {f: each for each in others for f in each.fields()}
        #: Views made by `of`, by image column.
        self._others: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def extensions(self) -> tuple[str, ...]:
        """Member extensions (or the parquet column) of the image, in order of preference."""
        return self._member.extensions

    @property
    def _decoding(self) -> DecodeSpec:
        return self._member.decoding

    @property
    def labels(self) -> np.ndarray:
        """The index label of each row; shape (n,), int64."""
        return self.first_label + self.numbers

    @property
    @abstractmethod
    def keys(self) -> list[str]:
        """The key of each row."""

    @property
    @abstractmethod
    def headers(self) -> list[Header]:
        """The header of each image."""

    @abstractmethod
    def image_bytes(self, row: int) -> Any:
        """The encoded image of one row; None without an image."""

    @abstractmethod
    def references(self) -> pa.StructArray:
        """A reference to the image of each row."""

    @property
    def encoded_images(self) -> EncodedImages:
        """The encoded images of these rows, read when they are decoded."""
        return EncodedImages(self.headers, self.image_bytes, self.origin)

    def expect_images(self) -> None:
        """Called before the headers of images that are all to be decoded."""

    def prefetch_images(self) -> None:
        """Prefetch the images of these rows."""

    def origin(self, row: int) -> Origin:
        """The identity of a row's image, for errors and random transforms."""
        return Origin(self.url, int(self.numbers[row]), f"sample {self.keys[row]!r}")

    def of(self: Self, member: ImageMember) -> Self:
        """A view of the same rows with the member of an image column as their image."""
        if member.column == self._member.column:
            return self
        rows: Self | None = self._others.get(member.column)
        if rows is None:
            rows = copy.copy(self)
            rows._member = member
            rows._fields, rows._others = {}, {}
            for name in self.of_image & rows.__dict__.keys():
                del rows.__dict__[name]
            self._others[member.column] = rows
        return rows

    def decoded_bytes(self) -> int:
        """Bytes that all images of these rows decode to, judged by their headers."""
        nbytes = sum(map(self._decoding.nbytes, self.headers))
        members = {each.column: each for each in self._fields.values()}
        return nbytes + sum(self.of(each).decoded_bytes() for each in members.values())

    def keep(self: Self, filters: Predicate | None) -> Self:
        """The rows for which ``filters`` (on metadata columns) hold."""
        if not filters:
            return self
        return self.take(np.flatnonzero(holds(filters, self.table(sorted(columns_of(filters))))))

    def part(self: Self, part: int, parts: int) -> Self:
        """One of ``parts`` equal parts; ``part`` counts from 0."""
        return self.take(part_of(len(self), part, parts))

    def take(self: Self, rows: np.ndarray | range) -> Self:
        """The given rows, by position."""
        positions = np.asarray(rows, dtype=np.int64)
        if len(positions) == len(self):
            return self
        taken = copy.copy(self)
        taken.numbers = self.numbers[positions]
        for name in self.cached & self.__dict__.keys():
            values = self.__dict__[name]
            taken.__dict__[name] = [values[position] for position in positions.tolist()]
        taken._others = {name: each.take(positions) for name, each in self._others.items()}
        return taken

    def table(self, columns: Sequence[str]) -> pa.Table:
        """The given metadata columns of all rows."""
        return self.table_of({name: self.column(name) for name in columns})

    def table_of(self, arrays: Mapping[str, pa.Array]) -> pa.Table:
        """A table of these columns; with the right number of rows even without any."""
        if not arrays:
            return pa.table({"": pa.nulls(len(self))}).select([])
        return pa.table(dict(arrays))

    def column(self, name: str) -> pa.Array:
        """One metadata column."""
        if name == "__url__":
            return pa.repeat(pa.scalar(self.url, pa.string()), len(self))
        if name in _HEADER_COLUMNS:
            position = Header._fields.index(name)
            return pa.array([header[position] for header in self.headers], METADATA_COLUMNS[name])
        member = self._fields[name]
        return self.of(member).column(name.removeprefix(f"{member.column}."))
