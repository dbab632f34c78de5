"""Parquet files, local or remote: reads rows of single columns.

A few rows of a large row group are read in batches, so that no more of it is in memory at once.
pyarrow reads a column chunk from its first page on, so what comes before these rows is read, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage.open import open_shard
from dask_image_ingest.storage.reader import ByteReader, ReaderFile
from dask_image_ingest.storage.shard import Shard

# Bytes at the end of a file that hold most footers.
_FOOTER = 64 << 10

# A row group of more bytes is read in batches if most of its rows are not needed, with a buffer.
_LARGE_GROUP, _BUFFER = 8 << 20, 1 << 20

# Bytes that values which a dictionary repeats may take before they are measured; bytes of a read.
_HARMLESS, _LARGEST = 64 << 20, 2 << 30

# Bytes of a value by its type; texts and bytes take their length besides.
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT96": 12, "INT64": 8, "DOUBLE": 8}
_TEXT, _POINTER = "BYTE_ARRAY", 4

# A leaf of a column in a row group: its number, first byte and metadata.
_Leaf: TypeAlias = tuple[int, int, Any]


class RowSpan(NamedTuple):
    """Rows of a row group, from ``start`` to ``stop``."""

    group: int
    start: int
    stop: int


class NotParquetError(ShardError):
    """A file has no footer of parquet: it is cut off, or something else."""


class ParquetSource:
    """An open parquet file, read by column and row group.

    ``metadata`` is its footer, if that was read before.
    """

    def __init__(
        self, url: str, content: ByteReader, metadata: parquet.FileMetaData | None = None
    ) -> None:
        self.url = url
        self._content = content
        if metadata is None:
            content.prefetch([(max(0, len(content) - _FOOTER), len(content))])
        with self._translated_errors(NotParquetError):
            data = content.in_memory()
            is_whole = len(data) == len(content)
            source = pa.BufferReader(data) if is_whole else pa.PythonFile(ReaderFile(content), "r")
            self._file = parquet.ParquetFile(
                source, metadata=metadata, pre_buffer=False, page_checksum_verification=True
            )

    @cached_property
    def schema_arrow(self) -> pa.Schema:
        """The columns and their types."""
        return self._file.schema_arrow

    @property
    def metadata(self) -> Any:
        """The footer, with the statistics of row groups."""
        return self._file.metadata

    def read(self, column: str, groups: Sequence[int]) -> pa.ChunkedArray:
        """Read a column of some row groups, concatenated in the given order."""
        sizes = (self.metadata.row_group(group).num_rows for group in groups)
        arrays = self.read_rows(column, [*map(RowSpan, groups, itertools.repeat(0), sizes)])
        return pa.chunked_array(arrays, self.schema_arrow.field(column).type)

    def read_rows(
        self, column: str, spans: Sequence[RowSpan], limit: int = _LARGEST, packed: bool = False
    ) -> list[pa.Array]:
        """Read some rows of a column, or of a field of a struct (``image.bytes``), in order.

        A small file may unpack to any size. More than ``limit`` bytes are an error. If ``packed``,
        large values that a dictionary repeats stay one value of a dictionary.
        """
        name = column if column in self.schema_arrow.names else column.rpartition(".")[0]
        self._content.prefetch(
            (start, start + chunk.total_compressed_size)
            for span in spans
            if not self._is_small_part(span)
            for _, start, chunk in self._leaves(column, span.group)
        )
        chunks: list[pa.Array] = []
        for span in spans:
            with self._translated_errors():
                # Select again: pyarrow takes "a" for "a.b", too, hence may have read more columns.
                values = self._read(column, span, limit, packed).column(name)
                values.validate(full=True)  # pyarrow does not check that strings are UTF-8
            if len(values) != span.stop - span.start:
                # pyarrow skips pages with unknown headers.
                raise ShardError(
                    f"{self.url} cannot be read as parquet: its column {name!r} has "
                    f"{len(values)} of {span.stop - span.start} values"
                )
            chunks += values.chunks
        return chunks

    def _read(self, column: str, span: RowSpan, limit: int, packed: bool) -> pa.Table:
        leaves = self._leaves(column, span.group)
        group_rows = self.metadata.row_group(span.group).num_rows
        rows = span.stop - span.start if self._is_small_part(span) else group_rows
        stored = sum(
            max(chunk.total_uncompressed_size, chunk.num_values * self._width(number))
            for number, _, chunk in leaves
        )
        if stored * rows > limit * group_rows:
            raise self._too_large(column, limit)
        repeating = [
            chunk.path_in_schema
            for number, _, chunk in leaves
            if chunk.has_dictionary_page and chunk.physical_type == _TEXT
        ]
        if repeating and rows * stored > min(limit, _HARMLESS):
            table = self._table(column, span, repeating)
            if packed:
                return table
            arrays = (chunk for values in table.columns for chunk in values.chunks)
            if sum(map(unpacked_bytes, arrays)) > limit:
                raise self._too_large(column, limit)
        return self._table(column, span, [])

    def _table(self, column: str, span: RowSpan, packed: Sequence[str]) -> pa.Table:
        """Rows of a row group; the values of the leaves ``packed`` as dictionaries."""
        if not self._is_small_part(span):
            file = self._open(packed) if packed else self._file
            table = file.read_row_groups([span.group], columns=[column], use_threads=False)
            return table.slice(span.start, span.stop - span.start)
        self._content.prefetch_scan()
        parts, row = [], 0
        for batch in self._open(packed, buffer_size=_BUFFER).iter_batches(
            span.stop - span.start, row_groups=[span.group], columns=[column], use_threads=False
        ):
            first, row = row, row + len(batch)
            if row > span.start:
                start = max(span.start, first)
                parts.append(batch.slice(start - first, span.stop - start))
            if row >= span.stop:
                break
        if not parts:
            raise pa.ArrowInvalid("its pages have fewer rows than its footer says")
        return pa.Table.from_batches(parts)

    def _is_small_part(self, span: RowSpan) -> bool:
        """True if most of a large row group is not needed."""
        group = self.metadata.row_group(span.group)
        is_large = group.total_byte_size > _LARGE_GROUP
        return is_large and 2 * (span.stop - span.start) < group.num_rows

    def _leaves(self, column: str, group: int) -> list[_Leaf]:
        """Number, first byte and metadata of each chunk of a column, with its nested ones."""
        row_group = self.metadata.row_group(group)
        chunks = [(number, row_group.column(number)) for number in self._numbers.get(column, ())]
        return [
            (number, min(chunk.dictionary_page_offset or first, first), chunk)
            for number, chunk in chunks
            for first in [chunk.data_page_offset]
        ]

    @cached_property
    def _numbers(self) -> dict[str, list[int]]:
        """Numbers of the leaves of each column and field, by its path."""
        numbers: dict[str, list[int]] = {}
        for number in range(self.metadata.num_columns):
            names = self.metadata.schema.column(number).path.split(".")
            for path in itertools.accumulate(names, "{}.{}".format):
                numbers.setdefault(path, []).append(number)
        return numbers

    def _width(self, number: int) -> int:
        """Bytes of a value of a leaf, at least."""
        leaf = self.metadata.schema.column(number)
        fixed = leaf.physical_type == "FIXED_LEN_BYTE_ARRAY"
        return int(leaf.length) if fixed else _WIDTHS.get(leaf.physical_type, _POINTER)

    def _too_large(self, column: str, limit: int) -> ShardError:
        return ShardError(
            f"{self.url} has {len(self._content):,} bytes, and rows of its column {column!r} that "
            f"are read together unpack to more than {limit:,}: leave the column out, write the "
            "file again with smaller row groups, or give the worker more memory"
        )

    def _open(self, packed: Sequence[str], buffer_size: int = 0) -> parquet.ParquetFile:
        """Open the file with the footer that was read."""
        return parquet.ParquetFile(
            pa.PythonFile(ReaderFile(self._content), "r"),
            metadata=self.metadata,
            read_dictionary=packed,
            buffer_size=buffer_size,
            pre_buffer=False,
            page_checksum_verification=True,
        )

    @contextmanager
    def _translated_errors(self, kind: type[ShardError] = ShardError) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            if isinstance(error, ShardError):
                raise
            reason = str(error).strip()
            raise kind(f"{self.url} cannot be read as parquet: {reason}") from error


def unpacked_bytes(array: pa.Array) -> int:
    """Bytes of an array if its dictionaries were unpacked."""
    if pa.types.is_dictionary(array.type):
        sizes = pc.binary_length(array.dictionary)
        return int(pc.sum(sizes.take(array.indices)).as_py() or 0)
    if pa.types.is_struct(array.type):
        return sum(map(unpacked_bytes, array.flatten()))
    if pa.types.is_nested(array.type):  # lists and maps
        return unpacked_bytes(array.flatten() if hasattr(array, "flatten") else array.items)
    return int(array.nbytes)


@contextmanager
def open_parquet(file: Shard, storage_options: dict[str, Any] | None) -> Iterator[ParquetSource]:
    """Open a parquet file, which must not have changed since it was listed; reads its footer.

    Raises
    ------
    ShardNotFoundError, ShardError
    """
    with open_shard(file.url, storage_options, file) as content:
        yield ParquetSource(file.url, content)
