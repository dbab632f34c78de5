"""Locating the members of samples in their source shards.

A frame has the offsets of images; the other members of a sample are found in its shard. If a task
of the frame has scanned the shard, that scan is used. Any other source is scanned once, one shard
or several image files per task. Members that are no byte range of the source (of compressed shards,
sparse members) are expanded to a staged file, so that writing a shard only copies ranges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain

import numpy as np
import pyarrow as pa

from dask_image_ingest.computing import one_task_per_item
from dask_image_ingest.dataset.scan import scanned_index
from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.export.files import (
    ExportContext,
    read_batch,
    staged_name,
    take_rows,
    write_batches,
)
from dask_image_ingest.export.member_selection import (
    EXPANDED,
    MERGED,
    SELECTED,
    SOURCE,
    Row,
    as_table,
    select,
    select_from_columns,
    select_members,
)
from dask_image_ingest.export.members import with_fields
from dask_image_ingest.storage import (
    ByteReader,
    LazyBytes,
    Shard,
    find_shards,
    local_path,
    open_shard,
    without_query,
)
from dask_image_ingest.tar import LARGEST_VALUE, Places, ShardIndex, index_tar, read_member

# In place of a version, for rows that belong to no shard.
_NO_SHARD = "columns"

# Image files per task that locates members.
_FILES_PER_TASK = 64

# The extension of an image file without one; readers take it for an image.
_NO_EXTENSION = "img"


@dataclass(frozen=True)
class SourceShard:
    """A source of samples: a shard, or an image file."""

    url: str
    version: str  # its state; empty if it can't be read
    renamed: bool = False  # True if any row's key is not the shard's
    expanded: str | None = None  # staged file of members that are no ranges of the source
    damage: str | None = None
    interleaved: int = 0  # number of samples whose members are not adjacent


def locate_in_task(rows: pa.Table, context: ExportContext) -> tuple[SourceShard, pa.Table] | None:
    """Locate the members of a partition's samples by the scan that its read made in this task.

    None if there is no such scan: the partition has several shards, or was not read in this task.
    """
    if not context.options.has_samples:
        return SourceShard("", _NO_SHARD), as_table(select_from_columns(rows, context.options))
    if context.options.members.merged:  # the shard has to be opened
        return None
    urls = rows.column("url").unique().to_pylist()
    scanned = scanned_index(urls[0]) if len(urls) == 1 else None
    if scanned is None or rows.column("key").null_count:
        return None
    try:
        # As a lookup of this one shard tells its version, which is compared later.
        shard, index = find_shards(urls[0], context.source_options)[0], scanned[1]
    except (ShardError, ShardNotFoundError):  # told when it is scanned for the export
        return None
    if shard.state != scanned[0].state:
        return None
    wanted = rows.combine_chunks().to_batches()[0]
    selected, renamed = select(index, wanted, context.options)
    return _source(shard.url, shard.state, index, renamed), selected


def _source(
    url: str, version: str, index: ShardIndex, renamed: bool, expanded: str | None = None
) -> SourceShard:
    damage = None if index.damage is None else str(index.damage)
    return SourceShard(url, version, renamed, expanded, damage, len(index.interleaved))


def locate_members(
    rows: pa.Table,
    kept: np.ndarray,
    codes: np.ndarray,
    urls: Sequence[str],
    known: Mapping[str, SourceShard | None],
    listed: Mapping[str, Shard],
    context: ExportContext,
) -> tuple[pa.Table, np.ndarray, list[SourceShard]]:
    """Locate the members of some rows (``kept``, ascending); scans each source at most once.

    ``codes`` has for each of all rows its position in ``urls``; ``known`` is that of `StagedRows`.
    ``listed`` has the shards as the frame's read has listed them, by URL.

    Returns the columns `SELECTED` of these rows, for each of them its position in the sources, and
    these.
    """
    by_source = kept[np.argsort(codes[kept], kind="stable")]
    used, starts, inverse = np.unique(codes[by_source], return_index=True, return_inverse=True)
    numbers = np.split(by_source, starts[1:]) if len(used) else []
    is_located = rows.column("located").to_numpy()
    sources: list[SourceShard | None] = [
        known.get(urls[code]) if is_located[of_source].all() else None
        for code, of_source in zip(used.tolist(), numbers, strict=True)
    ]
    missing = [position for position, source in enumerate(sources) if source is None]
    tables = [rows.select(SELECTED)]
    # Where the columns of each row are in these tables, one after the other.
    places = np.arange(len(rows))
    if missing:
        # A task for each shard, and one for several image files.
        files = [position for position in missing if _is_file(rows, numbers[position])]
        tasks = [[position] for position in np.setdiff1d(missing, files).tolist()]
        tasks += [files[n : n + _FILES_PER_TASK] for n in range(0, len(files), _FILES_PER_TASK)]
        made = [f"made:{member.extension}" for member in context.options.members.from_columns]
        to_locate = rows.select(["key", "offset", "nbytes", "part", "batch", "row", *made])
        to_locate = to_locate.set_column(3, "part", to_locate.column("part").cast(pa.string()))
        batches = (
            to_locate.take(pa.array(np.concatenate([numbers[position] for position in task])))
            for task in tasks
        )
        name = staged_name("locations")
        write_batches(context.output, name, to_locate.schema, batches, compressed=True)
        items = [
            (batch, [(urls[used[p]], listed.get(urls[used[p]]), len(numbers[p])) for p in task])
            for batch, task in enumerate(tasks)
        ]
        results: list[list[tuple[SourceShard, pa.Table]]] = one_task_per_item(
            partial(_locate_batch, name=name, context=context), items
        )
        first = len(rows)
        for position, (source, table) in zip(
            chain.from_iterable(tasks), chain.from_iterable(results), strict=True
        ):
            sources[position] = source
            tables.append(table)
            places[numbers[position]] = first + np.arange(len(table))
            first += len(table)
    selected = pa.concat_tables(tables).take(pa.array(places[kept])).combine_chunks()
    positions = np.empty(len(rows), np.int32)
    positions[by_source] = inverse
    return selected, positions[kept], [source for source in sources if source is not None]


def _is_file(rows: pa.Table, numbers: np.ndarray) -> bool:
    """True for a source that is an image file: no member of a tar begins at byte 0."""
    return len(numbers) == 1 and rows.column("offset")[int(numbers[0])].as_py() == 0


def _locate_batch(
    batch: tuple[int, list[tuple[str, Shard | None, int]]], name: str, context: ExportContext
) -> list[tuple[SourceShard, pa.Table]]:
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
) -> tuple[SourceShard, pa.Table]:
    try:
        shard = find_shards(url, context.source_options)[0]
        version = shard.state
        with open_shard(url, context.source_options, listed) as content:
            index = _index(content, url, wanted)
            # A decompressed shard has another size than the stored one.
            is_plain = len(content) == shard.size
            merged = context.options.members.merged
            expanded = None
            if is_plain and not index.sparse and not merged:
                selected, renamed = select(index, wanted, context.options)
            else:
                rows, renamed = select_members(index, wanted, context.options)
                # The bytes of members from columns.
                made = take_rows(context.output, wanted) if merged else None
                rows, expanded = _expand(rows, content, index, is_plain, made, context)
                selected = as_table(rows)
    except (ShardError, ShardNotFoundError) as error:
        reason = f"unreadable-shard: {error}"
        if local_path(url) is None and context.source_options is None:
            reason += ". If its file system needs options, pass them as source_options=: a "
            reason += "computed or persisted frame has lost those of its read"
        return SourceShard(url, ""), as_table([Row(reason=reason)] * len(wanted))
    return _source(url, version, index, renamed, expanded), selected


def _index(content: LazyBytes, url: str, wanted: pa.RecordBatch) -> ShardIndex:
    """Index a source: a shard, or an image file, whose one sample has this file as its member."""
    # At offset 0 there is an image file; a tar has a header there.
    if any(offset != 0 for offset in wanted.column("offset").to_pylist()):
        return index_tar(content, url)
    name = without_query(url).rpartition("/")[2]
    extension = name.rpartition(".")[2].lower() if "." in name else _NO_EXTENSION
    key = wanted.column("key")[0].as_py()
    whole = Places(*(np.array([value]) for value in (0, 0, len(content))))
    return ShardIndex([key], {extension: whole}, members=1)


def _expand(
    rows: list[Row],
    content: ByteReader,
    index: ShardIndex,
    is_plain: bool,
    made: pa.Table | None,
    context: ExportContext,
) -> tuple[list[Row], str]:
    """Write members that are no ranges of the source to a staged file; rows refer to it then."""
    merged = context.options.members.merged
    content.prefetch(
        (offset, offset + size)
        for row in rows
        for _, where, offset, size in row.members
        if where == MERGED and offset not in index.sparse
    )
    expanded = []
    with context.output.scratch() as file:
        for number, row in enumerate(rows):
            members: list[tuple[str, int, int, int]] = []
            reason = row.reason
            for extension, where, offset, size in row.members:
                is_sparse = offset in index.sparse
                if (where == SOURCE and (is_sparse or not is_plain)) or where == MERGED:
                    if is_sparse and size > LARGEST_VALUE:
                        reason = f"too-large: a sparse member of {size} bytes"
                        break
                    data = bytes(read_member(content, index, (offset, size)))
                    if where == MERGED and made is not None:
                        values = made.column(f"made:{extension}")[number].as_py()
                        try:
                            data = with_fields(data, values, merged[extension].fields)
                        except ValueError as error:
                            reason = f"bad-json: no field can be set in its {extension}: {error}"
                            break
                    where, offset, size = EXPANDED, file.tell(), len(data)
                    file.write(data)
                members.append((extension, where, offset, size))
            kept = row._replace(members=tuple(members))
            expanded.append(kept if reason is None else Row(reason=reason))
        name = staged_name("expanded")
        context.output.commit(file, name)
    return expanded, name
