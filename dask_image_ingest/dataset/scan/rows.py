"""Rows of one shard or file as a table of metadata: all about an image except its pixels."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa

from dask_image_ingest.dataset.filters import Filters, columns_of, matching
from dask_image_ingest.dataset.options import ReadOptions
from dask_image_ingest.dataset.schema.columns import POINTER_COLUMNS
from dask_image_ingest.dataset.schema.image_columns import ImageMember
from dask_image_ingest.decode import Header, Origin
from dask_image_ingest.tar import Damage

Self = TypeVar("Self", bound="ImageRows")

#: What is known of an image that its sample does not have.
NO_MEMBER = Header(
    None, None, None, None, "missing: the sample has no image member", needs_pillow=True
)

_HEADER_COLUMNS = frozenset(Header._fields) & frozenset(POINTER_COLUMNS)


def part_of(count: int, part: int, parts: int) -> range:
    """The numbers of the ``part``-th of so many equal parts of ``count`` rows."""
    return range(count * part // parts, count * (part + 1) // parts)


class ImageRows:
    """Rows with images, whose columns are made when they are asked for.

    ``keep`` and ``take`` give some of the rows, with what is known already, so that no byte is
    looked at twice and none for rows that are gone.

    Attributes
    ----------
    url
        The shard or file.
    numbers
        Of the rows, in it.
    extensions
        What the image of each row is called there, in order of preference.
    """

    #: The properties that are computed once, and keep their values when rows are taken; and those
    #: of them that are another one's for another image of the same rows.
    cached: ClassVar[frozenset[str]]
    of_image: ClassVar[frozenset[str]]

    def __init__(self, url: str, count: int, options: ReadOptions) -> None:
        self.url = url
        self.numbers = np.arange(count)
        self.extensions = options.image_extensions
        self._decoding = options.decoding
        self._fields = {f: each for each in options.other_images for f in each.fields()}
        self._others: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    @abstractmethod
    def keys(self) -> list[str]:
        """The key of each row."""

    @property
    @abstractmethod
    def headers(self) -> list[Header]:
        """The header of each image."""

    @property
    def damage(self) -> Damage | None:
        """The damage of the shard, if there is any."""
        return None

    @abstractmethod
    def image_bytes(self, row: int) -> Any:
        """The encoded image of one row; None where it has none."""

    @abstractmethod
    def references(self) -> pa.StructArray:
        """A reference to the image of each row, for a decode that comes later."""

    def announce_images(self) -> None:
        """Have the images of these rows fetched, since they will be read soon."""

    def origin(self, row: int) -> Origin:
        """The place of a row and its key."""
        return Origin(self.url, int(self.numbers[row]), f"sample {self.keys[row]!r}")

    def of(self: Self, member: ImageMember) -> Self:
        """The same rows, whose image is another one."""
        rows: Self | None = self._others.get(member.column)
        if rows is None:
            rows = copy.copy(self)
            rows.extensions, rows._decoding = member.extensions, member.decoding
            rows._fields, rows._others = {}, {}
            for name in self.of_image & rows.__dict__.keys():
                del rows.__dict__[name]
            self._others[member.column] = rows
        return rows

    def decoded_bytes(self) -> int:
        """Bytes that all images of these rows decode to, by their headers."""
        nbytes = sum(map(self._decoding.nbytes, self.headers))
        members = {each.column: each for each in self._fields.values()}
        return nbytes + sum(self.of(each).decoded_bytes() for each in members.values())

    def keep(self: Self, filters: Filters | None) -> Self:
        """The rows for which ``filters`` hold, judged by their metadata."""
        if not filters:
            return self
        return self.take(matching(self.table(sorted(columns_of(filters))), filters))

    def part(self: Self, part: int, parts: int) -> Self:
        """The ``part``-th of so many equal parts."""
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
        """The given metadata columns of every row."""
        return self.table_of({name: self.column(name) for name in columns})

    def table_of(self, arrays: Mapping[str, pa.Array]) -> pa.Table:
        """A table of columns, which has its length also where there are none."""
        if not arrays:
            return pa.table({"": pa.nulls(len(self))}).select([])
        return pa.table(dict(arrays))

    def column(self, name: str) -> pa.Array:
        """One metadata column."""
        if name == "__url__":
            return pa.repeat(pa.scalar(self.url, pa.string()), len(self))
        if name in _HEADER_COLUMNS:
            position = Header._fields.index(name)
            return pa.array([header[position] for header in self.headers], POINTER_COLUMNS[name])
        member = self._fields[name]
        return self.of(member).column(name.removeprefix(f"{member.column}."))
