"""Locating the members of samples in their source shards.

A frame points to images; the other members of a sample are found in its shard. If a task of the
frame has scanned the shard, that scan is used; any other source is scanned once, a shard by a task
of its own, image files some to a task. Members that are no byte range of the source (of compressed
shards, sparse members) are expanded to a staged file, so that writing a shard only copies ranges.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa

from dask_image_ingest.dataset import take_cached_scan
from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.export.member_selection import (
    EXPANDED,
    SOURCE,
    Row,
    select_made,
    select_members,
    select_stored,
    tabulated,
)
from dask_image_ingest.export.options import ExportContext, staged_name
from dask_image_ingest.export.staged_tables import from_bytes, read_batch, to_bytes
from dask_image_ingest.storage import LazyBytes, find_shards, is_web, open_shard
from dask_image_ingest.tar import Places, ShardIndex, index_tar, read_member

#: What is asked of each row, besides the sizes of members that are made.
POINTERS = ("key", "offset", "nbytes")

# The version of rows whose members are all made of columns.
_NOWHERE = "columns"

# The member of an image file whose name has none; readers take it for an image.
_NO_EXTENSION = "img"

# What the reader of sparse members takes.
LARGEST_MEMBER = 2**31 - 1


@dataclass
class Located:
    """Located members of a source shard.

    Attributes
    ----------
    url, version
        The shard, and what changes when it does.
    rows
        For each row asked for, in order: ``members``, in the order of the source; ``image``, which
        of them is the image; ``reason`` why the row can't be exported, else null.
    renamed
        Whether the key of any row is not that of the shard.
    expanded
        The file of members that are no ranges of the source, if there is one.
    damage
        What is wrong with the shard.
    interleaved
        How many samples' members lie apart in it.
    """

    url: str
    version: str
    rows: pa.Table
    renamed: bool = False
    expanded: str | None = None
    damage: str | None = None
    interleaved: int = 0

    @staticmethod
    def no_rows() -> pa.Table:
        """The rows of no shard."""
        return tabulated([])

    def to_bytes(self) -> bytes:
        """Serialize it."""
        facts = {name: value for name, value in vars(self).items() if name != "rows"}
        return to_bytes(self.rows.replace_schema_metadata({"facts": json.dumps(facts)}))

    @staticmethod
    def from_bytes(data: bytes) -> Located:
        """Deserialize it."""
        rows = from_bytes(data)
        facts = json.loads(rows.schema.metadata[b"facts"])
        return Located(rows=rows.replace_schema_metadata(None), **facts)


def locate_in_task(rows: pa.Table, context: ExportContext) -> Located | None:
    """Find the members of a partition's samples by what its read has walked through in this task.

    None where it is not known: with several shards, or another step between.
    """
    if not context.options.has_samples:
        made = rows.combine_chunks().to_batches()
        members = [row for batch in made for row in select_made(batch, context.options)]
        return Located("", _NOWHERE, tabulated(members))
    walked = take_cached_scan()
    if walked is None or rows.column("key").null_count:
        return None
    if rows.column("url").unique().to_pylist() != [walked.shard.url]:
        return None
    wanted = rows.combine_chunks().to_batches()[0]
    index, options = walked.index, context.options
    found = select_stored(index, wanted, options)
    if found is None:
        selected, renamed = select_members(index, wanted, options)
        found = tabulated(selected), renamed
    return Located(walked.shard.url, walked.shard.state, *found, **_facts(index))


def locate(batch: tuple[int, dict[str, int]], context: ExportContext) -> list[Located]:
    """Find the members of the samples that a batch of pointers points to.

    A batch has a number, and the rows of each of its sources, one behind the other.
    """
    number, counts = batch
    wanted = read_batch(context.output, context.pointers, number)
    ends = accumulate(counts.values())
    return [
        _locate(url, wanted.slice(end - count, count), context)
        for (url, count), end in zip(counts.items(), ends, strict=True)
    ]


def _locate(url: str, wanted: pa.RecordBatch, context: ExportContext) -> Located:
    try:
        shard = find_shards(url, context.source_options)[0]
        version = shard.state
        with open_shard(url, context.source_options) as content:
            index = _index(content, url, wanted)
            # Where a stream was decompressed, there is more than is stored.
            stored = len(content) == shard.size
            found = select_stored(index, wanted, context.options) if stored else None
            expanded = None
            if found is None:
                rows, renamed = select_members(index, wanted, context.options)
                if not stored or index.sparse:
                    rows, expanded = _expand(rows, content, index, stored, context)
                found = tabulated(rows), renamed
    except (ShardError, ShardNotFoundError) as error:
        reason = f"unreadable-shard: {error}"
        return Located(url, "", tabulated([Row(reason=reason)] * len(wanted)))
    return Located(url, version, *found, expanded, **_facts(index))


def _index(content: LazyBytes, url: str, wanted: pa.RecordBatch) -> ShardIndex:
    """The samples of a source: of a shard, or the one of a file that is an image."""
    if any(offset != 0 for offset in wanted.column("offset").to_pylist()):
        return index_tar(content, url)
    # Where a tar's first image lies there is a header before it.
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
    rows: list[Row], content: Any, index: ShardIndex, stored: bool, context: ExportContext
) -> tuple[list[Row], str | None]:
    """Write members that are no ranges of what is stored to a file, and point there."""
    with context.output.scratch() as file:
        rows = [_expanded(row, content, index, stored, file) for row in rows]
        if not file.tell():
            return rows, None
        name = staged_name("expanded")
        context.output.commit(file, name)
    return rows, name


def _expanded(row: Row, content: Any, index: ShardIndex, stored: bool, file: Any) -> Row:
    members = []
    for extension, where, offset, size in row.members:
        if size and where == SOURCE and (not stored or offset in index.sparse):
            if offset in index.sparse and size > LARGEST_MEMBER:
                return Row(reason=f"too-large: a sparse member of {size} bytes")
            data = read_member(content, index, (offset, size))
            where, offset = EXPANDED, file.tell()
            file.write(data)
        members.append((extension, where, offset, size))
    return row._replace(members=tuple(members))


class LocatedCache:
    """Rows of the frame whose members are known."""

    def __init__(self) -> None:
        # Source → the first row of a partition, and what was located for it and those that follow.
        self._parts: dict[str, list[tuple[int, Located]]] = {}

    def add(self, first: int, located: Located) -> None:
        """Add a partition, which begins with this row of the frame; in the frame's order."""
        self._parts.setdefault(located.url, []).append((first, located))

    def take(self, url: str, rows: np.ndarray) -> Located | None:
        """Take out the members of some rows of a source.

        None if not all of them are known, or if the source has changed while it was read.
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
        before = np.array([0, *accumulate(counts)])
        whole = pa.concat_tables([located.rows for _, located in parts])
        taken = whole.take(pa.array(before[part] + within)).combine_chunks()
        renamed = any(located.renamed for _, located in parts)
        return replace(parts[0][1], rows=taken, renamed=renamed)
