"""Discovery of indexes, by listing the folders of the shards; stale or damaged ones are refused."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from dask_image_ingest.arguments import is_utf8, shown
from dask_image_ingest.errors import ArgumentError, ShardError, ShardNotFoundError, warn_user
from dask_image_ingest.index.index_file import (
    IndexTable,
    ShardFacts,
    StoredIndex,
    UnusableIndexError,
    stale,
)
from dask_image_ingest.storage import (
    COMBINED_INDEX,
    INDEX_SUFFIX,
    ByteReader,
    Listings,
    MemoryReader,
    ParquetSource,
    Shard,
    as_folder,
    by_folder,
    exists_remote,
    folder_of,
    inside,
    is_pipe,
    is_web,
    local_path,
    names_beside,
    names_in,
    open_late,
    open_shard,
    shard_name,
    takes_files,
)
from dask_image_ingest.url_secrets import UrlHolder, is_signed

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
    told
        The shard of this read that a warning has named, since its index is not used; shared.
    """

    url: str
    shard: Shard
    required: bool = False
    name: str = ""
    file: Shard | None = None
    samples: int | None = None
    told: set[str] = field(default_factory=set, compare=False)


@contextmanager
def open_stored(index: IndexFile, storage_options: dict[str, Any] | None) -> Iterator[StoredIndex]:
    """Open the index of a shard; columns are read on first use.

    Raises
    ------
    UnusableIndexError
        If it can't be read, or if the shard has another size; while it is open, if a column is
        damaged. Another content is detected by `StoredIndex.check`.
    """
    with ExitStack() as opened:
        cached = _tables.get(index.file) if index.file else None
        if cached is not None and index.file is not None:
            content: ByteReader = opened.enter_context(open_late(index.file, storage_options))
            table = cached
        else:
            try:
                content, table = _open(opened, index.url, storage_options)
            except ShardNotFoundError as error:
                other = inside(folder_of(index.url)[0], COMBINED_INDEX)
                told = f", and {other} has no index of the shard" if index.required else ""
                raise UnusableIndexError(f"there is no such file{told}") from error
        if index.name not in table.names:
            raise UnusableIndexError("it has no entry of the shard")
        facts, shard = table.facts(index.name), index.shard
        if shard.size not in (facts.size, -1):
            raise stale(f"has {shard.size:,} bytes, and had {facts.size:,}")
        if not table.may_hold(index.name, shard):
            raise stale("has another version than it had")
        read = _Columns(index.url, content, table, facts).read
        yield StoredIndex(facts, shard, table.nbytes, read)


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


class _Columns:
    """The columns of one shard in an index file, cached in `_recent`."""

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
        key = None if self._file is None else (self._file, facts.group, name)
        column = None if key is None else _recent.get(key)
        if column is None:
            column = self._read(name, [facts.group])
            if key is not None:
                _cache(key, column)
        return column.slice(facts.row, facts.samples)

    def _read(self, name: str, groups: list[int]) -> pa.Array:
        with self._lock:  # threads of a task share the open file
            try:
                if self._source is None:
                    self._source = ParquetSource(self._url, self._content, self._metadata)
                return self._source.read(name, groups).combine_chunks()
            except ShardError as error:
                raise UnusableIndexError(f"its column {name!r} can't be read ({error})") from error


# The columns that were read last, by version of their file, row group and name. Without a lock,
# which in a forked process might be held for ever: the number of bytes is about right.
_recent: dict[tuple[Shard, int, str], pa.Array] = {}
_recent_nbytes = 0


def _cache(key: tuple[Shard, int, str], column: pa.Array) -> None:
    global _recent_nbytes
    if _recent_nbytes + column.nbytes > _KEPT_COLUMNS:
        _recent.clear()
        _recent_nbytes = 0
    if column.nbytes <= _KEPT_COLUMNS:
        _recent[key] = column
        _recent_nbytes += column.nbytes


logger = logging.getLogger("dask_image_ingest")


def find_indexes(
    shards: Sequence[Shard],
    where: Literal["auto"] | bool | str,
    storage_options: dict[str, Any] | None,
    listings: Listings,
) -> dict[str, IndexFile]:
    """Find the index of each shard that has one; by the shard's URL.

    Prefers the folder's combined index if it has the listed version of the shard, else takes the
    shard's own.

    Parameters
    ----------
    where
        ``"auto"``: beside the shards, by one listing of each folder, or by two requests to a web
        server that lists none. True: beside the shards, each of which must have one; nothing is
        listed. False: nowhere. Else a folder.
    listings
        Listings to reuse.

    Raises
    ------
    ArgumentError
        If ``where`` is given and a shard can have no index, or if the folder does not exist.
    ShardError
        If the folder cannot be listed.
    """
    if where is False:
        return {}
    if where != "auto":
        for shard in shards:
            refuse_unindexed(shard.url, f"index={where!r}")
    folder = where if isinstance(where, str) and where != "auto" else None
    indexes = {}
    told: set[str] = set()
    for location, group in by_folder(shards) if folder is None else [(folder, shards)]:
        members = [(shard, shard_name(shard.url)) for shard in group]
        names: Collection[str] = {COMBINED_INDEX, *(name + INDEX_SUFFIX for _, name in members)}
        unlisted = where is True and local_path(location) is None
        if folder is not None:
            names = _in_folder(folder, members, storage_options)
        elif not unlisted:
            names = names_beside(location, names, storage_options, listings)
            if not names and is_web(location) and not is_signed(group[0].url):
                names = _asked_for(location, members, storage_options)
        combined = inside(location, COMBINED_INDEX)
        table = None
        if COMBINED_INDEX in names:
            table = _table(combined, group[0].url, storage_options)
        for shard, name in members:
            own = name + INDEX_SUFFIX
            holds = table is not None and table.holds(name, shard)
            # A stale entry is kept, so that the read warns of it.
            is_only = own not in names or (unlisted and table and table.may_hold(name, shard))
            if table is not None and (holds or (is_only and name in table.names)):
                samples = table.samples(name) if holds else None
                index = IndexFile(combined, shard, where is True, name, table.file, samples, told)
                indexes[shard.url] = index
            elif where is True or own in names:
                place = index_place(shard.url, folder)
                indexes[shard.url] = IndexFile(place, shard, where is True, told=told)
    if folder is not None and not indexes:
        warn_user(
            f"index={folder!r} holds an index of none of the {len(shards)} shards, which are read "
            "without. write_index(..., folder=) writes indexes there"
        )
    return indexes


def _table(url: str, first_shard: str, storage_options: dict[str, Any] | None) -> IndexTable | None:
    try:
        return open_table(url, storage_options)
    except UnusableIndexError as error:
        warn_user(f"the index {url} is not used: {error}. {way_out(url, first_shard)}")
    except (ShardError, ShardNotFoundError) as error:
        logger.debug("%s cannot be read: %s", url, error)
    return None


def _in_folder(
    folder: str, members: Sequence[tuple[Shard, str]], storage_options: dict[str, Any] | None
) -> Collection[str]:
    """Names in a folder of indexes that the user has named."""
    try:
        return names_in(folder, storage_options)
    except (ShardError, ShardNotFoundError) as error:
        if isinstance(error, ShardError) and not is_web(folder):
            raise
        names = _asked_for(folder, members, storage_options) if is_web(folder) else ()
        if not names:
            tried = (
                f", and has neither {COMBINED_INDEX} nor {members[0][1]}{INDEX_SUFFIX}"
                if is_web(folder)
                else ""
            )
            raise ArgumentError(
                f"index={folder!r}: there is no such folder, or its server lists none{tried}"
            ) from error
        return names


def _asked_for(
    folder: str, members: Sequence[tuple[Shard, str]], storage_options: dict[str, Any] | None
) -> Collection[str]:
    """Names of the indexes in a folder of which a web server gives no listing.

    Two files are asked for: the combined index, and that of the first shard, which stands for the
    others.
    """
    own = [name + INDEX_SUFFIX for _, name in members]
    there = [
        name
        for name in (COMBINED_INDEX, own[0])
        if exists_remote(inside(folder, name), storage_options)
    ]
    return {*there, *own} if own[0] in there else there


def parse_index(index: object) -> Literal["auto"] | bool | str:
    """Check the argument ``index=``; expand a local folder.

    Raises
    ------
    ArgumentError
    """
    path = os.fspath(index) if isinstance(index, os.PathLike) else index
    if isinstance(path, bool) or path == "auto":
        return path
    if not isinstance(path, str) or not path or "\0" in path or not is_utf8(path):
        raise ArgumentError(
            f"index={shown(index)}: pass 'auto', True, False, or the folder that the indexes are in"
        )
    local = local_path(path)
    if local is not None:
        return os.path.abspath(os.path.expanduser(local))
    return as_folder(path)


def way_out(index_url: str, shard_url: str) -> str:
    """Advice how to write an index in place of one that can't be used."""
    (folder, name), path = folder_of(index_url), local_path(index_url)
    elsewhere = "folder=) writes one into a folder of yours, which index= then names"
    if not takes_files(folder) or (path is not None and not os.access(folder or ".", os.W_OK)):
        return f"write_index(..., {elsewhere}"
    where = f"folder={folder!r}, " if folder != folder_of(shard_url)[0] else ""
    combined = "combined=True, " if name == COMBINED_INDEX else ""
    anew = f"write_index({where}{combined}overwrite=True) writes it anew"
    return anew if path is not None else f"{anew}, or if you can't write there, {elsewhere}"


def index_place(url: str, folder: str | None) -> str:
    """Path or URL of a shard's index."""
    beside, name = folder_of(url)
    if folder is None:
        return inside(beside, name + INDEX_SUFFIX)
    return inside(folder, shard_name(url) + INDEX_SUFFIX)


def refuse_unindexed(url: str, argument: str) -> None:
    """Refuse a shard that can have no index, naming the ``argument`` that asks for one.

    Raises
    ------
    ArgumentError
    """
    if is_pipe(url):
        raise ArgumentError(
            f"{argument}: {url} can have no index: it is a command, whose output has no version"
        )
