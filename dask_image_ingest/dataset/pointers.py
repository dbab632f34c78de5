"""Rows that point to their encoded images: what they point to, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.decode import Header
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.storage import LazyBytes, announce, is_pipe, local_path, open_shard
from dask_image_ingest.tar import (
    Sample,
    duplicate_error,
    index_tar,
    read_member,
    too_large_error,
)

__all__ = ["NO_MEMBER", "POINTER", "checked_pointers", "each_shard", "read_encoded"]

# Shards whose rows are fetched at the same time.
_REMOTE_AT_ONCE = 8

POINTER = ("__url__", "offset", "nbytes")


def _no_image(why: str) -> Header:
    return Header(None, None, None, None, f"missing: {why}", True)


NO_MEMBER = _no_image("the sample has no image member")
_NO_POINTER = _no_image("the row points to no image bytes")
_OUTSIDE = _no_image("the row points beyond the end of its shard")
_NO_KEY = _no_image("the row tells no place of its image; one with its __key__ may have it found")


def checked_pointers(table: pa.Table) -> pa.Table:
    """Pointer columns in the types that the reader gives them: a merge makes floats of integers.

    Raises
    ------
    ArgumentError
        If a column holds something else.
    """
    for name in table.column_names:
        column = table.column(name)
        try:
            column = _as_text(column) if name.startswith("__") else _as_places(column)
        except (pa.ArrowException, TypeError):
            kind = "strings" if name.startswith("__") else "whole numbers"
            raise ArgumentError(
                f"the column {name!r} of the frame is of type {column.type}: decode_images needs "
                f"{kind}, as read_webdataset_images gives them"
            ) from None
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def read_encoded(
    pointers: pa.Table, storage_options: dict[str, Any] | None
) -> list[bytes | Header]:
    """The encoded image of each row, or a header that says why it has none."""
    urls, offsets, sizes = (pointers.column(name).to_pylist() for name in POINTER)
    keys: list[Any] = [None] * len(urls)
    if "__key__" in pointers.column_names:
        keys = pointers.column("__key__").to_pylist()
    encoded: list[bytes | Header] = [_NO_POINTER] * len(urls)
    by_shard: dict[str, list[int]] = {}
    for row, (url, size) in enumerate(zip(urls, sizes, strict=True)):
        if url and size is not None:
            by_shard.setdefault(url, []).append(row)
        elif url and offsets[row] is None:
            encoded[row] = NO_MEMBER

    def read(url: str, rows: list[int]) -> None:
        placed = sorted((r for r in rows if offsets[r] is not None), key=offsets.__getitem__)
        with open_shard(url, storage_options) as content:
            there = [r for r in placed if _is_inside(content, offsets[r], sizes[r])]
            announce(content, [(offsets[r], offsets[r] + sizes[r]) for r in there])
            # In order of place, and copied, so that the shard is read now.
            for row in placed:
                encoded[row] = _slice(content, offsets[row], sizes[row])
            if len(placed) < len(rows):
                members = _Members(content, url)
                for row in set(rows).difference(placed):
                    encoded[row] = members.find(keys[row], sizes[row])

    each_shard(by_shard, read)
    return encoded


def each_shard(rows: Mapping[str, list[int]], read: Callable[[str, list[int]], None]) -> None:
    """Read the rows of each shard, of a few shards at a time: no more are ever open."""
    # A command's output is in memory as a whole, and that of one at a time is enough.
    remote = any(local_path(url) is None and not is_pipe(url) for url in rows)
    with ThreadPoolExecutor(_REMOTE_AT_ONCE if remote else 1) as threads:
        # One after the other where they are at hand: they would wait for the same disk.
        list((threads.map if remote else map)(read, rows.keys(), rows.values()))


class _Members:
    """The images of a shard that no place tells: found by key and size."""

    def __init__(self, content: LazyBytes, url: str) -> None:
        self._content = content
        self._index = index_tar(content, url)
        self._by_key: dict[str, list[Sample]] = {}
        for sample in self._index.samples:
            self._by_key.setdefault(sample.key, []).append(sample)

    def find(self, key: str | None, size: int) -> bytes | Header:
        found = [
            (sample, span)
            for sample in self._by_key.get(key or "", ())
            for span in sample.members.values()
            if span[1] == size and (sample.duplicates or span[0] in self._index.sparse)
        ]
        if not found or any(sample is not found[0][0] for sample, _ in found):
            return _NO_POINTER if key else _NO_KEY
        sample, span = found[0]
        error = too_large_error(self._index, span)
        if sample.duplicates or error:
            return Header(None, None, None, None, error or duplicate_error(sample), True)
        return bytes(read_member(self._content, self._index, span))


def _slice(content: LazyBytes, offset: int, size: int) -> bytes | Header:
    if not _is_inside(content, offset, size):
        return _OUTSIDE
    return bytes(content[offset : offset + size])


def _is_inside(content: LazyBytes, offset: int, size: int) -> bool:
    return offset >= 0 and size >= 0 and offset + size <= len(content)


def _as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_null, pa.types.is_dictionary)
    if not any(kind(column.type) for kind in kinds):
        raise TypeError
    return column.cast(pa.string())


def _as_places(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_null)
    if not any(kind(column.type) for kind in kinds):
        raise TypeError
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
    return column.cast(pa.int64())
