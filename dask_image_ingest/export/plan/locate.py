"""Locating the members of samples in their source shards.

A frame has the offsets of images; the other members of a sample are found in its shard. If a task
of the frame has scanned the shard, that scan is used. Any other source is scanned once, one shard
or several image files per task. Members that are no byte range of the source (of compressed shards,
sparse members) are expanded to a staged file, so that writing a shard only copies ranges.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from dask_image_ingest.computing import one_task_per_item
from dask_image_ingest.dataset.scan import scanned_index
from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.export.export_options import ExportContext, staged_name
from dask_image_ingest.export.json_fields import with_fields
from dask_image_ingest.export.member_selection import (
    EXPANDED,
    MERGED,
    SOURCE,
    Row,
    as_table,
    select_from_columns,
    select_members,
    select_vectorized,
)
from dask_image_ingest.export.staged_tables import (
    from_bytes,
    read_batch,
    take_rows,
    to_bytes,
    write_batches,
)
from dask_image_ingest.storage import LazyBytes, Shard, find_shards, is_web, open_shard
from dask_image_ingest.tar import LARGEST_VALUE, Places, ShardIndex, index_tar, read_member

# In place of a version, for rows that belong to no shard.
_NO_SHARD = "columns"

# Image files per task that locates members.
_FILES_PER_TASK = 64

# The extension of an image file without one; readers take it for an image.
_NO_EXTENSION = "img"


@dataclass
class Located:
    """Located members of a source shard.

    Attributes
    ----------
    url, version
        URL and state of the shard; an empty version if it can't be read.
    rows
        Table of `Row` fields, in the order of the rows to locate.
    renamed
        Whether any row's key is not the shard's.
    expanded
        Staged file of members that are no ranges of the source; None without any.
    damage
        Damage of the shard; None if it is complete.
    interleaved
        Number of samples whose members are not adjacent.
    """

    url: str
    version: str
    rows: pa.Table
    renamed: bool = False
    expanded: str | None = None
    damage: str | None = None
    interleaved: int = 0

    def to_bytes(self) -> bytes:
        """Serialize to Arrow IPC."""
        facts = {name: value for name, value in vars(self).items() if name != "rows"}
        return to_bytes(self.rows.replace_schema_metadata({"facts": json.dumps(facts)}))

    @staticmethod
    def from_bytes(data: bytes) -> Located:
        """Deserialize from Arrow IPC."""
        rows = from_bytes(data)
        facts = json.loads(rows.schema.metadata[b"facts"])
        return Located(rows=rows.replace_schema_metadata(None), **facts)


def locate_in_task(rows: pa.Table, context: ExportContext) -> Located | None:
    """Locate the members of a partition's samples by the scan that its read made in this task.

    None if there is no such scan: the partition has several shards, or was not read in this task.
    """
    if not context.options.has_samples:
        return Located("", _NO_SHARD, as_table(select_from_columns(rows, context.options)))
    if context.options.members.merged:  # the shard has to be opened
        return None
    urls = rows.column("url").unique().to_pylist()
    scanned = scanned_index(urls[0]) if len(urls) == 1 else None
    if scanned is None or rows.column("key").null_count:
        return None
    # As a lookup of this one shard tells its version, which is compared later.
    shard, index = find_shards(urls[0], context.source_options)[0], scanned[1]
    if shard.state != scanned[0].state:
        return None
    wanted = rows.combine_chunks().to_batches()[0]
    options = context.options
    selection = select_vectorized(index, wanted, options)
    if selection is None:
        selected, renamed = select_members(index, wanted, options)
        selection = as_table(selected), renamed
    return Located(shard.url, shard.state, *selection, **_facts(index))


def locate_members(
    rows: pa.Table,
    by_source: np.ndarray,
    sources: np.ndarray,
    urls: list[str],
    cache: LocatedCache,
    listed: Mapping[str, Shard],
    context: ExportContext,
) -> list[Located]:
    """Locate the members of all sources, in order; scans each that is not cached, once."""
    used, starts = np.unique(sources[by_source], return_index=True)
    names = [urls[source] for source in used.tolist()]
    wanted = [by_source[start:end] for start, end in pairwise([*starts.tolist(), len(by_source)])]
    located = {
        url: cached
        for url, numbers in zip(names, wanted, strict=True)
        if (cached := cache.take(url, numbers)) is not None
    }
    missing = [number for number, url in enumerate(names) if url not in located]
    if missing:
        sizes = [f"made:{member.extension}" for member in context.options.members.from_columns]
        staged = ["part", "batch", "row"] if context.options.members.merged else []
        to_locate = rows.select(["key", "offset", "nbytes", *sizes, *staged])
        tasks = list(_tasks(missing, [_is_file(rows, wanted[number]) for number in missing]))
        batches = (to_locate.take(pa.array(np.concatenate([wanted[n] for n in t]))) for t in tasks)
        name = staged_name("locations")
        write_batches(context.output, name, to_locate.schema, batches, compressed=True)
        items = [
            (batch, [(names[n], listed.get(names[n]), len(wanted[n])) for n in task])
            for batch, task in enumerate(tasks)
        ]
        results: list[list[Located]] = one_task_per_item(
            partial(_locate_batch, name=name, context=context), items
        )
        located |= {source.url: source for source in chain.from_iterable(results)}
    return [located[url] for url in names]


def _is_file(rows: pa.Table, numbers: np.ndarray) -> bool:
    """True for a source that is an image file: no member of a tar begins at byte 0."""
    return len(numbers) == 1 and rows.column("offset")[int(numbers[0])].as_py() == 0


def _tasks(sources: Sequence[int], is_file: Sequence[bool]) -> Iterator[list[int]]:
    """Group sources into tasks: one per shard, and several image files in one."""
    files: list[int] = []
    for source, is_image in zip(sources, is_file, strict=True):
        if is_image:
            files.append(source)
        else:
            yield [source]
    for start in range(0, len(files), _FILES_PER_TASK):
        yield files[start : start + _FILES_PER_TASK]


def _locate_batch(
    batch: tuple[int, list[tuple[str, Shard | None, int]]], name: str, context: ExportContext
) -> list[Located]:
    """Locate the members of the rows of a batch, for each of its sources.

    ``batch`` is its number in the staged table ``name``, and its sources in order of the rows: URL,
    the shard as the frame's read listed it if that is known, and number of rows.
    """
    number, sources = batch
    wanted = read_batch(context.output, name, number)
    ends = accumulate(count for *_, count in sources)
    return [
        _locate_source(url, listed, wanted.slice(end - count, count), context)
        for (url, listed, count), end in zip(sources, ends, strict=True)
    ]


def _locate_source(
    url: str, listed: Shard | None, wanted: pa.RecordBatch, context: ExportContext
) -> Located:
    try:
        shard = find_shards(url, context.source_options)[0]
        version = shard.state
        with open_shard(url, context.source_options, listed) as content:
            index = _index(content, url, wanted)
            # A decompressed shard has another size than the stored one.
            is_plain = len(content) == shard.size
            selection = select_vectorized(index, wanted, context.options) if is_plain else None
            expanded = None
            if selection is None:
                rows, renamed = select_members(index, wanted, context.options)
                merged = context.options.members.merged
                # The bytes of members from columns.
                made = take_rows(context.output, wanted) if merged else None
                if not is_plain or index.sparse or merged:
                    rows, expanded = _expand(rows, content, index, is_plain, made, context)
                selection = as_table(rows), renamed
    except (ShardError, ShardNotFoundError) as error:
        reason = f"unreadable-shard: {error}"
        return Located(url, "", as_table([Row(reason=reason)] * len(wanted)))
    return Located(url, version, *selection, expanded, **_facts(index))


def _index(content: LazyBytes, url: str, wanted: pa.RecordBatch) -> ShardIndex:
    """Index a source: a shard, or an image file, whose one sample has this file as its member."""
    # At offset 0 there is an image file; a tar has a header there.
    if any(offset != 0 for offset in wanted.column("offset").to_pylist()):
        return index_tar(content, url)
    name = (url.partition("?")[0] if is_web(url) else url).rpartition("/")[2]
    extension = name.rpartition(".")[2].lower() if "." in name else _NO_EXTENSION
    key = wanted.column("key")[0].as_py()
    whole = Places(*(np.array([value]) for value in (0, 0, len(content))))
    return ShardIndex([key], {extension: whole}, members=1)


def _facts(index: ShardIndex) -> dict[str, Any]:
    damage = index.damage
    return {
        "damage": None if damage is None else f"{damage.code}: {damage.reason}",
        "interleaved": len(index.interleaved),
    }


def _expand(
    rows: list[Row],
    content: Any,
    index: ShardIndex,
    is_plain: bool,
    made: pa.Table | None,
    context: ExportContext,
) -> tuple[list[Row], str | None]:
    """Write members that are no ranges of the source to a staged file; rows refer to it then."""
    merged = [
        (offset, offset + size)
        for row in rows
        for _, where, offset, size in row.members
        if where == MERGED and offset not in index.sparse
    ]
    content.prefetch(merged)
    with context.output.scratch() as file:
        rows = [
            _expand_row(row, content, index, is_plain, _fields_of(number, made, context), file)
            for number, row in enumerate(rows)
        ]
        if not file.tell():
            return rows, None
        name = staged_name("expanded")
        context.output.commit(file, name)
    return rows, name


#: Sets the fields of a row in the bytes of its own member, given the member's extension.
SetFields = Callable[[str, bytes], bytes]


def _fields_of(number: int, made: pa.Table | None, context: ExportContext) -> SetFields:
    """The fields of a row's merged members."""

    def set_fields(extension: str, own: bytes) -> bytes:
        if made is None:
            raise AssertionError("fields are set in members, and no column was staged")
        columns = made.column(f"made:{extension}")[number].as_py()
        return with_fields(own, columns, context.options.members.merged[extension].fields)

    return set_fields


def _expand_row(
    row: Row, content: Any, index: ShardIndex, is_plain: bool, set_fields: SetFields, file: Any
) -> Row:
    members = []
    for extension, where, offset, size in row.members:
        is_apart = size and where == SOURCE and (not is_plain or offset in index.sparse)
        if is_apart or where == MERGED:
            if offset in index.sparse and size > LARGEST_VALUE:
                return Row(reason=f"too-large: a sparse member of {size} bytes")
            data = bytes(read_member(content, index, (offset, size)))
            if where == MERGED:
                try:
                    data = set_fields(extension, data)
                except ValueError as error:
                    return Row(reason=f"bad-json: no field can be set in its {extension}: {error}")
            where, offset, size = EXPANDED, file.tell(), len(data)
            file.write(data)
        members.append((extension, where, offset, size))
    return row._replace(members=tuple(members))


class LocatedCache:
    """Located members of rows of the frame, by source."""

    def __init__(self) -> None:
        #: Source → partitions: the first row in the frame, and the located members of its rows.
        self._parts: dict[str, list[tuple[int, Located]]] = {}

    def add(self, first: int, located: Located) -> None:
        """Add a partition that begins at row ``first`` of the frame; in ascending order."""
        self._parts.setdefault(located.url, []).append((first, located))

    def take(self, url: str, rows: np.ndarray) -> Located | None:
        """Remove and return the members of some rows of a source.

        None if a row is missing, or if partitions have read different versions of the source.
        """
        parts = self._parts.pop(url, [])
        if len({located.version for _, located in parts}) != 1:
            return None
        firsts = np.array([first for first, _ in parts])
        counts = [len(located.rows) for _, located in parts]
        part = np.searchsorted(firsts, rows, side="right") - 1
        within = rows - firsts[part]
        if (part < 0).any() or (within >= np.array(counts)[part]).any():
            return None
        starts = np.array([0, *accumulate(counts)])
        whole = pa.concat_tables([located.rows for _, located in parts])
        taken = whole.take(pa.array(starts[part] + within)).combine_chunks()
        renamed = any(located.renamed for _, located in parts)
        return replace(parts[0][1], rows=taken, renamed=renamed)
