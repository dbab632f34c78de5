"""Opening of index files; a stale or damaged one is refused."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.index.index_file import IndexTable, ShardFacts, UnusableIndexError
from dask_image_ingest.index.stored_index import StoredIndex
from dask_image_ingest.storage import (
    ByteReader,
    MemoryReader,
    ParquetSource,
    Shard,
    open_late,
    open_shard,
)
from dask_image_ingest.url_secrets import UrlHolder

# Index files of up to so many bytes are read whole: one or two requests if remote.
_READ_WHOLE = 4 << 20

# Bytes at the end of a larger file that hold most footers.
_FOOTER = 1 << 20

# Bytes of columns to cache: the parts of a shard are read one after the other, and share them, as
# do small shards in one row group.
_KEPT_COLUMNS = 64 << 20

# Footers of combined indexes to cache: they are large to fetch and parse.
_KEPT_TABLES = 8
_tables: dict[Shard, IndexTable] = {}


@dataclass(frozen=True, slots=True, repr=False)
class IndexFile(UrlHolder):
    """Location of a shard's index.

    Attributes
    ----------
    required
        Whether reading the shard without it is an error.
    name
        The shard's name in a combined index; empty in an index of one shard.
    file
        The combined index as it was listed; None for an index of one shard.
    samples
        Number of samples of the shard; None if unknown.
    """

    url: str
    shard: Shard
    required: bool = False
    name: str = ""
    file: Shard | None = None
    samples: int | None = None


@contextmanager
def open_stored(index: IndexFile, storage_options: dict[str, Any] | None) -> Iterator[StoredIndex]:
    """Open the index of a shard; columns are read on first use.

    Raises
    ------
    UnusableIndexError
        If it can't be read, if it is stale, or if that can't be detected; while it is open, if a
        column is damaged.
    """
    if why := unknown_version(index.shard):
        raise UnusableIndexError(why)
    with ExitStack() as opened:
        cached = _tables.get(index.file) if index.file else None
        if cached is not None and index.file is not None:
            content = opened.enter_context(open_late(index.file, storage_options))
            table = cached
        else:
            try:
                content, table = _open(opened, index.url, storage_options)
            except ShardNotFoundError as error:
                raise UnusableIndexError("there is no such file") from error
        if not table.holds(index.name, index.shard):
            raise UnusableIndexError(
                "it is stale: the shard has changed, or was copied, since it was written. "
                "write_index() rewrites it"
            )
        facts = table.facts(index.name)
        yield StoredIndex(facts, table.nbytes, _Columns(index.url, content, table, facts).read)


def open_table(url: str, storage_options: dict[str, Any] | None) -> IndexTable:
    """Read the footer of an index file.

    Raises
    ------
    UnusableIndexError
        If it is damaged.
    ShardNotFoundError, ShardError
        If the file does not exist, or can't be read.
    """
    with ExitStack() as opened:
        return _open(opened, url, storage_options)[1]


def _open(
    opened: ExitStack, url: str, storage_options: dict[str, Any] | None
) -> tuple[ByteReader, IndexTable]:
    content = opened.enter_context(open_shard(url, storage_options))
    file = content.listed_as(url)
    if file is not None and not file.version:
        file = None  # not cached: a replacement could not be detected
    if file is not None and (cached := _tables.get(file)) is not None:
        return content, cached
    if len(content) <= _READ_WHOLE:
        content = MemoryReader(memoryview(content[:]), file)
        opened.close()
    else:
        content.prefetch([(len(content) - _FOOTER, len(content))])
    table = IndexTable(content, file)
    if file is not None and table.names != {""}:
        _tables[file] = table
        for oldest in list(_tables)[:-_KEPT_TABLES]:
            _tables.pop(oldest, None)
    return content, table


def unknown_version(shard: Shard) -> str:
    """Reason why a stale index of a shard can't be detected; empty if it can."""
    if shard.version:
        return ""
    return (
        f"the server of {shard.url} gives neither an ETag nor a modification time, so that a stale "
        "index would not be detected"
    )


class _Columns:
    """The columns of one shard in an index file, cached by `_recent`."""

    def __init__(self, url: str, content: ByteReader, table: IndexTable, facts: ShardFacts) -> None:
        self._url = url
        self._content = content
        self._metadata = table.metadata
        self._file = table.file
        self._facts = facts
        self._source: ParquetSource | None = None
        self._lock = threading.Lock()

    def read(self, name: str) -> pa.Array:
        """A column, with one value per sample."""
        facts = self._facts
        if not facts.samples:
            return self._read(name, [])
        key = self._file and (self._file, facts.group, name)
        column = _recent.get(key)
        if column is None:
            column = self._read(name, [facts.group])
            _recent.put(key, column)
        return column.slice(facts.row, facts.samples)

    def _read(self, name: str, groups: list[int]) -> pa.Array:
        with self._lock:  # threads of a task share the open file
            try:
                if self._source is None:
                    self._source = ParquetSource(self._url, self._content, self._metadata)
                return self._source.read(name, groups).combine_chunks()
            except ShardError as error:
                raise UnusableIndexError(
                    f"its column {name!r} can't be read ({error}). write_index(overwrite=True) "
                    "rewrites it"
                ) from error


class _RecentColumns:
    """LRU cache of columns, by version of their file, row group and name."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop all columns."""
        # A new lock, since in a forked process the old one may be held for ever.
        self._lock = threading.Lock()
        self._columns: OrderedDict[Any, pa.Array] = OrderedDict()
        self._nbytes = 0

    def get(self, key: Any) -> pa.Array | None:
        with self._lock:
            if key not in self._columns:
                return None
            self._columns.move_to_end(key)
            return self._columns[key]

    def put(self, key: Any, column: pa.Array) -> None:
        if key is None or column.nbytes > _KEPT_COLUMNS:
            return
        with self._lock:
            if key not in self._columns:
                self._columns[key] = column
                self._nbytes += column.nbytes
            while self._nbytes > _KEPT_COLUMNS:
                self._nbytes -= self._columns.popitem(last=False)[1].nbytes


_recent = _RecentColumns()
os.register_at_fork(after_in_child=_recent.forget)
