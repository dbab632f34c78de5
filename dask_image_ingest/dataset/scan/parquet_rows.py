"""Rows of a parquet file with columns of encoded images."""

from __future__ import annotations

from functools import cached_property
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.dataset.options import ReadOptions
from dask_image_ingest.dataset.predicates import Predicate, columns_of
from dask_image_ingest.dataset.scan.parquet_columns import ParquetColumns
from dask_image_ingest.dataset.scan.rows import NO_BYTES, ImageRows
from dask_image_ingest.dataset.schema.encoded_images import check_encoded_type, encoded_views
from dask_image_ingest.decode import Header, read_header
from dask_image_ingest.errors import PartitionTooLargeError, ShardError
from dask_image_ingest.frames import references_of_fields

Self = TypeVar("Self", bound="ParquetRows")

# Digits of a row number in a key, zero-padded so that keys sort like rows.
_DIGITS = 8


class ParquetRows(ImageRows):
    """The rows of one file. Columns are read for the row groups of the remaining rows alone."""

    cached = frozenset({"keys", "headers", "encoded"})
    of_image = frozenset({"headers", "encoded"})

    def __init__(self, columns: ParquetColumns, options: ReadOptions) -> None:
        super().__init__(columns.url or "", columns.rows, options)
        self._columns = columns
        self._max_pixels = options.decoding.max_pixels
        self._get_backend = options.get_backend

    @cached_property
    def keys(self) -> list[str]:
        keys: list[str] = self.column("__key__").to_pylist()
        return keys

    @cached_property
    def encoded(self) -> list[memoryview | None]:
        """The encoded image of each row, a view of the column; None for null."""
        arrays, positions = self._columns.values(self.extensions[0], self.numbers, packed=True)
        images: list[memoryview | None] = []
        try:
            for array in arrays:
                check_encoded_type(array.type)
                images += encoded_views(array)
        except (TypeError, pa.ArrowException) as error:
            raise ShardError(
                f"the column {self.extensions[0]!r} of {self.url} holds no encoded images: {error}"
            ) from error
        return [images[position] for position in positions.tolist()]

    @cached_property
    def headers(self) -> list[Header]:
        return [
            NO_BYTES
            if data is None
            else self._decoding.validated(read_header(data, self._max_pixels))
            for data in self.encoded
        ]

    def image_bytes(self, row: int) -> memoryview | None:
        return self.encoded[row]

    def keep(self: Self, filters: Predicate | None) -> Self:
        """The rows for which ``filters`` hold. Filters on columns of the file run first."""
        if not filters:
            return self
        candidates = self._columns.keep(filters, lambda: self.numbers)
        rows = self if candidates is None else self.take(candidates)
        only_file = all(name in self._columns for name in columns_of(filters))
        return rows if only_file else super(ParquetRows, rows).keep(filters)

    def part(self: Self, part: int, parts: int) -> Self:
        """One of ``parts`` parts, cut at the edge of a row group if one is near."""
        return self.take(range(self._edge(part, parts), self._edge(part + 1, parts)))

    def _edge(self, part: int, parts: int) -> int:
        # The edge of an equal part, or that of a row group less than half a part away.
        even = len(self) * part // parts
        edges = np.append(0, self._columns.ends)
        nearest = int(edges[np.abs(edges - even).argmin()])
        return nearest if 2 * abs(nearest - even) * parts < len(self) else even

    def column(self, name: str) -> pa.Array:
        if name in self._columns:
            return self._columns.column(name, self.numbers)
        if name == "__key__":
            file, _, suffix = self.url.rpartition("/")[2].rpartition(".")
            stem = file or suffix
            return pa.array([f"{stem}/{number:0{_DIGITS}}" for number in self.numbers.tolist()])
        if name == "nbytes":
            return self._sizes()
        return super().column(name)

    def _sizes(self) -> pa.Array:
        return pa.array([None if data is None else len(data) for data in self.encoded], pa.int64())

    def references(self) -> pa.StructArray:
        """References that carry the encoded images: parquet gives no offsets to read them by.

        Raises
        ------
        PartitionTooLargeError
            Before any is copied: a dictionary may repeat them.
        """
        sizes = self._sizes()
        nbytes = pc.sum(sizes).as_py() or 0
        if nbytes > (largest := self._get_backend().largest_partition):
            raise PartitionTooLargeError(
                f"rows {self.numbers[0]}-{self.numbers[-1]} of {self.url} are "
                f"{nbytes / 1e9:.1f} GB of encoded images, and one partition holds at most "
                f"{largest / 1e9:.1f} GB here. Read with decode=True and size=, or filter rows"
            )
        url = pa.scalar(self.url, pa.string())
        fields = {
            # No file for a row without bytes: nothing there could be opened.
            "url": pc.if_else(sizes.is_valid(), url, pa.scalar(None, pa.string())),
            "number": pa.array(self.numbers),
            "key": pa.array(self.keys, pa.string()),
            "nbytes": sizes,
            "bytes": pa.array(self.encoded, pa.large_binary()),
        }
        return references_of_fields(len(self), fields)
