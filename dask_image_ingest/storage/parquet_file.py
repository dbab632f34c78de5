"""Parquet files, local or remote: reads rows of single columns.

pyarrow reads a column chunk from its first page on. A row group of a whole file, which is the
default of many writers, would be read from the begin by each task that needs some of its rows. So
only the pages with these rows are given to it.
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
from dask_image_ingest.storage.reader import ByteReader, LazyBytes, ReaderFile
from dask_image_ingest.storage.shard import Shard

# Bytes to read of a page's header at first, and at most: it may hold values as statistics.
_HEADER, _LARGEST_HEADER = 256, 1 << 20

# Fields of Thrift's ``PageHeader``, and those of the two kinds of data pages.
_KIND, _UNPACKED, _PACKED = 1, 2, 3
_DATA, _DATA_V2 = 5, 8
_DICTIONARY_PAGE = 2
_ENCODINGS_OF_DICTIONARIES = (2, 8)


class Page(NamedTuple):
    """A page: its bytes in the file, header included, and its rows, those of the chunk from 0."""

    start: int
    stop: int
    unpacked: int
    first_row: int
    rows: int
    is_dictionary: bool
    needs_dictionary: bool


def walk_pages(content: LazyBytes, start: int, stop: int) -> Iterator[Page]:
    """The pages of a chunk of a column without lists, by their headers.

    Raises
    ------
    ValueError
        If a header is damaged.
    """
    row = 0
    while start < stop:
        fields, length = _header(content, start, stop)
        is_dictionary = fields.get(_KIND) == _DICTIONARY_PAGE
        data = fields.get(_DATA, fields.get(_DATA_V2, {}))
        rows = data.get(1, 0)
        encoding = data.get(2 if _DATA in fields else 4)
        end = start + length + fields.get(_PACKED, -1)
        if rows < 0 or end <= start or end > stop or not (rows or is_dictionary):
            raise ValueError(f"no page at byte {start}")
        uses = encoding in _ENCODINGS_OF_DICTIONARIES
        yield Page(start, end, fields.get(_UNPACKED, 0), row, rows, is_dictionary, uses)
        start, row = end, row + rows


class PagesOnly:
    """A file in which the bytes from ``first`` to ``last`` follow those before ``edge``.

    So a column chunk begins with a later page; what comes after ``last`` reads as zeros.
    """

    def __init__(self, content: LazyBytes, edge: int, first: int, last: int) -> None:
        self._content = content
        self._edge, self._first, self._last = edge, first, last

    def __len__(self) -> int:
        return len(self._content)

    def __getitem__(self, part: slice, /) -> bytes:
        start, stop, _ = part.indices(len(self))
        before = bytes(self._content[start : min(stop, self._edge)])
        shift = self._first - self._edge
        begin, end = max(start, self._edge) + shift, stop + shift
        after = bytes(self._content[begin : min(end, self._last)]) if begin < end else b""
        return (before + after).ljust(stop - start, b"\0")


def _header(content: LazyBytes, start: int, stop: int) -> tuple[dict[int, Any], int]:
    """The fields of a page's header, and its length."""
    size = _HEADER
    while True:
        data = bytes(content[start : min(start + size, stop)])
        try:
            fields, length = _struct(data, 0)
        except IndexError:
            if size >= _LARGEST_HEADER or len(data) < size:
                raise ValueError(f"no page at byte {start}") from None
            size *= 16
        else:
            return fields, length


# Thrift's compact protocol: numbers of types.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET = range(1, 11)
_STRUCT = 12


def _struct(data: bytes, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Fields of a struct by their numbers, and where it ends. Only numbers and structs are kept."""
    fields: dict[int, Any] = {}
    number = 0
    while kind := data[at]:
        at += 1
        if kind >> 4:
            number += kind >> 4
        else:
            number, at = _integer(data, at)
        fields[number], at = _value(data, at, kind & 15, depth)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (_TRUE, _FALSE):
        return None, at
    if kind in (_I16, _I32, _I64):
        return _integer(data, at)
    if kind in (_BYTE, _DOUBLE):
        return None, at + (1 if kind == _BYTE else 8)
    if kind == _BINARY:
        length, at = _varint(data, at)
        return None, at + length
    if kind == _STRUCT and depth < 4:
        return _struct(data, at, depth + 1)
    raise ValueError(f"page headers have no field of type {kind}")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("no number of 64 bits")


# Bytes at the end of a file that hold most footers.
_FOOTER = 64 << 10

# A row group of more bytes is read by pages if most of its rows are not needed, with a buffer.
_LARGE_GROUP, _BUFFER = 8 << 20, 64 << 10

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
        pages = self._pages(leaves, span) if self._is_small_part(span) else []
        rows = span.stop - span.start if pages else self.metadata.row_group(span.group).num_rows
        stored = sum(
            max(chunk.total_uncompressed_size, chunk.num_values * self._width(number))
            for number, _, chunk in leaves
        )
        if pages:
            stored = sum(page.unpacked for page in pages)
            # pyarrow holds all of a page, packed and unpacked, for any of its rows.
            largest = max(page.stop - page.start + page.unpacked for page in pages)
        else:
            largest = stored
        if largest > limit:
            raise self._too_large(column, limit)
        repeating = [
            chunk.path_in_schema
            for number, _, chunk in leaves
            if chunk.has_dictionary_page and chunk.physical_type == _TEXT
        ]
        if repeating and rows * stored > min(limit, _HARMLESS):
            table = self._table(column, span, leaves, pages, repeating)
            if packed:
                return table
            arrays = (chunk for values in table.columns for chunk in values.chunks)
            if sum(map(unpacked_bytes, arrays)) > limit:
                raise self._too_large(column, limit)
        return self._table(column, span, leaves, pages, [])

    def _table(
        self,
        column: str,
        span: RowSpan,
        leaves: Sequence[_Leaf],
        pages: Sequence[Page],
        packed: Sequence[str],
    ) -> pa.Table:
        """Rows of a row group, from its ``pages`` if there are any; ``packed``: as dictionaries."""
        if not pages:
            file = self._open(self._content, packed) if packed else self._file
            table = file.read_row_groups([span.group], columns=[column], use_threads=False)
            return table.slice(span.start, span.stop - span.start)
        chunk_start, first = leaves[0][1], next(page for page in pages if not page.is_dictionary)
        edge = pages[0].stop if pages[0].is_dictionary else chunk_start
        self._content.prefetch((page.start, page.stop) for page in pages)
        only = PagesOnly(self._content, edge, first.start, pages[-1].stop)
        file = self._open(only, packed, buffer_size=_BUFFER)
        at, parts = first.first_row, []
        size = span.stop - span.start
        # Not beyond the last page: what follows it is not there.
        if at - (at - span.stop) // size * size > pages[-1].first_row + pages[-1].rows:
            size = span.stop - at
        for batch in file.iter_batches(
            size, row_groups=[span.group], columns=[column], use_threads=False
        ):
            part = batch.slice(max(0, span.start - at), max(0, span.stop - max(at, span.start)))
            parts += [part] * bool(len(part))
            at += len(batch)
            if at >= span.stop:
                break
        if not parts:
            raise pa.ArrowInvalid("its pages have fewer rows than their headers say")
        return pa.Table.from_batches(parts)

    def _pages(self, leaves: Sequence[_Leaf], span: RowSpan) -> list[Page]:
        """The pages with these rows, after that of the dictionary if they need it.

        Empty if the rows can't be read by pages: columns of several leaves, or of lists.
        """
        if len(leaves) > 1 or self.metadata.schema.column(leaves[0][0]).max_repetition_level:
            return []
        _, start, chunk = leaves[0]
        self._content.prefetch_scan()
        pages: list[Page] = []
        dictionary: list[Page] = []
        try:
            for page in walk_pages(self._content, start, start + chunk.total_compressed_size):
                if page.is_dictionary:
                    dictionary = [page]
                elif page.first_row + page.rows > span.start:
                    pages.append(page)
                if page.first_row + page.rows >= span.stop:
                    break
        except ValueError:
            return []  # a whole read tells what is damaged
        return [*dictionary, *pages] if any(page.needs_dictionary for page in pages) else pages

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

    def _open(self, content: LazyBytes, packed: Sequence[str], **options: Any) -> Any:
        """Open the file with the footer that was read."""
        return parquet.ParquetFile(
            pa.PythonFile(ReaderFile(content), "r"),
            metadata=self.metadata,
            read_dictionary=packed,
            pre_buffer=False,
            page_checksum_verification=True,
            **options,
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
