"""Pages of a parquet column chunk, so that rows are read without those before them.

pyarrow reads a chunk from its first page on. A row group of a whole file, which is the default of
many writers, would be read from the begin by each task that needs some of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from dask_image_ingest.storage.reader import LazyBytes

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
