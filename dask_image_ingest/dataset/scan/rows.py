"""Base class of the rows of an open shard or file: metadata, headers and encoded images."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dask_image_ingest.dataset.predicates import Predicate, columns_of, holds
from dask_image_ingest.dataset.read_options import ReadOptions
from dask_image_ingest.dataset.schema.columns import HEADERS, METADATA_COLUMNS, ImageMember
from dask_image_ingest.decode import EncodedImages, Header, Origin


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
        return EncodedImages(headers, read, origin, what, prefetch)

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
