"""The plan of an export: rejects rows, and assigns samples to shards.

A plan is a table with one row per sample in the order of writing (155 bytes if it has four
members), and the row at which each shard begins. It does not depend on the frame's partitions.

Rows of a shuffled shard are spread over all files as staged, and each shard's task would read all
of them. So they are repartitioned: each task reads as many files as fit into memory, and replaces
them by one file with a batch for each shard.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.computing import one_task_per_item
from dask_image_ingest.dataset.schema import EDGES, PLACE
from dask_image_ingest.decode import printable
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export.files import (
    SHARD_ROWS,
    ExportContext,
    Options,
    read_batch,
    staged_name,
    take_rows,
    write_batches,
)
from dask_image_ingest.export.locate import SourceShard, locate_members
from dask_image_ingest.export.staging import StagedRows
from dask_image_ingest.export.write_shards import headers, padding, room_for_members
from dask_image_ingest.frames import with_urls
from dask_image_ingest.storage import Shard
from dask_image_ingest.storage.output import STAGING, OutputStore
from dask_image_ingest.url_secrets import url_identity

# Rows that messages name as examples.
_NAMED = 3

# A key that every reader reads back: parts between slashes, the last one without a dot.
_GOOD_KEY = r"^([^/\\[:cntrl:]]+/)*[^/.\\[:cntrl:]]+$"
_BAD_PART = r"(^|/)(\.\.|__[^/]*__)(/|$)"


_BAD_KEY = (
    "bad-key: readers would change or skip it, or it is unsafe to unpack: a key has parts between "
    "slashes, none of them empty, '..' or __like_this__, the last without a dot, and no backslash "
    "or control character"
)

_AMBIGUOUS = (
    "no-pointer: it has no offset, and keys of the frame are not those of the shards, so that "
    "nothing says which sample it is; give new keys to rows with an offset alone"
)


class RefusedRowsError(ArgumentError):
    """Rows are rejected, and the export raises; the command line's exit status for bad data."""


class RejectedRows:
    """Rows of a frame (``key``, ``url``, ``offset``) that are not exported, each with a reason."""

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows
        self._reasons: dict[int, str] = {}

    @property
    def kept(self) -> np.ndarray:
        """The rows that are not rejected, in order."""
        kept = np.ones(len(self._rows), bool)
        kept[list(self._reasons)] = False
        return np.flatnonzero(kept)

    def add(self, row: int, reason: str) -> None:
        """Reject a row. A reason begins with a code: ``bad-key: it has an empty part``."""
        self._reasons.setdefault(int(row), reason)

    def find_bad_locations(self) -> None:
        """Reject rows without a key or shard."""
        for name, column in (("key", "__key__"), ("url", "__url__")):
            self._add_all(pc.is_null(self._rows.column(name)), f"no-pointer: its {column} is null")

    def find_bad_keys(self) -> None:
        """Reject rows whose key readers would not read back, or that leads out of its folder."""
        keys = self._rows.column("key")
        good = pc.match_substring_regex(keys, _GOOD_KEY)
        self._add_all(pc.or_(pc.invert(good), pc.match_substring_regex(keys, _BAD_PART)), _BAD_KEY)

    def find_ambiguous_rows(self) -> None:
        """Reject rows identified only by their key, if keys of the frame have changed."""
        self._add_all(pc.is_null(self._rows.column("offset")), _AMBIGUOUS)

    def find_bad_images(self) -> None:
        """Reject rows whose images could not be decoded."""
        for row, error in enumerate(self._rows.column("error").to_pylist()):
            if error is not None:
                self.add(row, f"bad-image: {error}")

    def find_repeated_rows(
        self, rows: np.ndarray, sources: np.ndarray, samples: pa.ChunkedArray
    ) -> None:
        """Reject rows whose sample an earlier row has, given the source and sample of each row."""
        samples_of_rows = pd.DataFrame({"source": sources, "sample": samples.to_numpy()}, rows)
        located = samples_of_rows.loc[np.isin(rows, self.kept)].dropna()
        for row in located.index[located.duplicated()]:
            self.add(row, "repeated-row: the frame has this sample more than once")

    def _add_all(self, mask: pa.ChunkedArray, reason: str) -> None:
        """Reject the rows for which a mask is true; null counts as false."""
        for row in np.flatnonzero(pc.fill_null(mask, False).to_numpy()).tolist():
            self.add(row, reason)

    def table(self) -> pa.Table:
        """The rejected rows: ``__key__``, ``__url__``, ``offset`` and ``reason``."""
        return self._table(sorted(self._reasons))

    def _table(self, rows: Sequence[int]) -> pa.Table:
        table = self._rows.select(["key", "url", "offset"]).take(pa.array(rows, pa.int64()))
        table = table.set_column(1, "url", table.column("url").cast(pa.string()))
        reasons = pa.array([self._reasons[row] for row in rows], pa.string())
        table = table.rename_columns(["__key__", "__url__", "offset"])
        return with_urls(table.append_column("reason", reasons), url_identity)

    def summary(self) -> dict[str, dict[str, Any]]:
        """Reason code → ``count`` of rows, ``first`` keys, and ``detail`` of the first reason."""
        summary: dict[str, dict[str, Any]] = {}
        for row in self.table().to_pylist():
            code, _, detail = row["reason"].partition(": ")
            entry = summary.setdefault(code, {"count": 0, "first": [], "detail": detail})
            entry["count"] += 1
            if len(entry["first"]) < _NAMED:
                entry["first"].append(printable(str(row["__key__"])))
        return dict(sorted(summary.items(), key=lambda item: -item[1]["count"]))

    def refuse(self, options: Options, nothing_read: bool) -> None:
        """Raise if ``options`` refuse a row, or none can be read, naming the first ones."""
        refused = [
            row
            for row, reason in sorted(self._reasons.items())
            if nothing_read or options.refuses(reason)
        ]
        if not refused:
            return
        table = self._table(refused)
        named = [
            f"{printable(str(row['__key__']))}{_place(row)}: {row['reason']}"
            for row in table[:_NAMED].to_pylist()
        ]
        more = f" ... and {len(table) - _NAMED:,} more" if len(table) > _NAMED else ""
        drop = "Filter them out, or pass row_errors='drop' to leave them out and list them"
        if options.errors == "raise":
            drop = f"{drop}, for bad images errors='drop'"
        raise RefusedRowsError(
            f"{len(table):,} of {len(self._rows):,} rows cannot be exported: {'; '.join(named)}"
            f"{more}. Nothing was written. "
            f"{'No shard of the frame can be read' if nothing_read else drop}"
        )


def _place(row: Mapping[str, Any]) -> str:
    """Location of a sample, for a message; empty for an image that is in no shard."""
    if not row["__url__"]:
        return ""
    # Without an offset, of a sample without an image, the key alone says which it is.
    at = "" if row["offset"] is None else f", byte {row['offset']}"
    return f" of {row['__url__']}{at}"


# Rows that are processed at once, to bound memory.
_CHUNK = 1 << 16

# Bytes of files per task, whose rows it has in memory twice.
_BYTES_PER_TASK = 256 << 20

logger = logging.getLogger("dask_image_ingest")


@dataclass(frozen=True)
class ShardPlan:
    """Samples in the order of writing."""

    rows: pa.Table  # ``key`` ... ``image`` as in `StagedRows`; ``source``, a position in sources
    sources: Sequence[SourceShard]
    starts: np.ndarray  # the row at which each new shard begins

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.starts)

    @property
    def counts(self) -> list[int]:
        """Number of samples of each shard."""
        counts: list[int] = np.diff(self.starts, append=len(self.rows)).tolist()
        return counts

    def _batches(self) -> Iterator[pa.Table]:
        """For the task of each shard, its rows with the facts of their sources."""
        for start, count in zip(self.starts.tolist(), self.counts, strict=True):
            rows = self.rows.slice(start, count)
            sources = [self.sources[code] for code in rows.column("source").to_numpy()]
            for name in ("url", "version", "expanded"):
                values = pa.array([getattr(source, name) for source in sources], pa.string())
                rows = rows.append_column(name, values)
            part = rows.column("part").cast(pa.string())
            rows = rows.set_column(rows.column_names.index("part"), "part", part)
            yield rows.drop_columns(["source"])

    def write(self, output: OutputStore, sidecar: pa.Schema | None) -> None:
        """Write it to the staging folder, for the tasks."""
        metadata = {} if sidecar is None else {b"sidecar": sidecar.serialize().to_pybytes()}
        batches = self._batches()
        for first in batches:
            # Streamed: with URLs in every row, all batches together are several times the plan.
            schema = first.schema.with_metadata(metadata)
            write_batches(output, SHARD_ROWS, schema, chain([first], batches), compressed=True)
        if not len(self.rows):
            output.put(SHARD_ROWS, b"")


def make_plan(
    staged: StagedRows, context: ExportContext, listed: Mapping[str, Shard]
) -> tuple[ShardPlan, RejectedRows]:
    """Plan an export.

    ``listed`` has the shards that the frame reads, by URL: no other version of them is scanned.
    """
    rows, options = staged.rows, context.options
    rejected = RejectedRows(rows)
    rejected.find_bad_locations()
    rejected.find_bad_keys()
    if options.errors != "null":
        rejected.find_bad_images()
    urls, codes = _numbered(rows.column("url"))
    kept = rejected.kept
    selected, positions, sources = locate_members(
        rows, kept, codes, urls, staged.known, listed, context
    )
    if options.has_samples and any(source.renamed for source in sources):
        rejected.find_ambiguous_rows()
    reasons = selected.column("reason")
    for number in np.flatnonzero(pc.is_valid(reasons).to_numpy()).tolist():
        rejected.add(kept[number], reasons[number].as_py())
    place = [*PLACE, *EDGES] if options.part else []
    located = rows.select(["key", "offset", "part", "batch", "row", *place]).take(pa.array(kept))
    samples = selected.column("sample")
    if place:  # a sample has any number of parts
        samples = pc.if_else(pc.is_valid(located.column("top")), None, samples)
    rejected.find_repeated_rows(kept, positions, samples)
    for name, values in (
        ("number", pa.array(kept)),
        ("source", pa.array(positions)),
        ("members", selected.column("members")),
        ("image", selected.column("image")),
    ):
        located = located.append_column(name, values)
    located = located.filter(pa.array(np.isin(kept, rejected.kept)))
    if place:
        located = _with_numbered_parts(located).drop_columns(place)
    plan, repeated = _assign_to_shards(located, sources, options)
    for number in repeated:
        rejected.add(
            number,
            "repeated-key: its shard has another sample of this key; give it another __key__",
        )
    # Refuse an export in which no shard is readable; those that are have a version.
    nothing_read = bool(sources) and not any(source.version for source in sources)
    rejected.refuse(options, nothing_read)
    if options.shuffle is not None:
        plan = _repartition_spill(plan, context)
    logger.info(
        "%d samples of %d source shards are planned in %d shards",
        len(plan.rows),
        len(sources),
        plan.shards,
    )
    return plan, rejected


def _with_numbered_parts(rows: pa.Table) -> pa.Table:
    """Number the parts of each key by their place, ``key_0``, ``key_1``, whatever their order."""
    names = ["key", *PLACE, *EDGES]
    parts = rows.select(names).to_pandas().dropna().sort_values(names[1:], kind="stable")
    new = parts["key"] + "_" + parts.groupby("key").cumcount().astype(str)
    keys = rows.column("key").to_pandas().where(lambda key: ~key.index.isin(new.index), new)
    # Without an offset, which they share, a shuffle goes by the key.
    offsets = pc.if_else(pc.is_valid(rows.column("top")), None, rows.column("offset"))
    rows = rows.set_column(rows.column_names.index("key"), "key", pa.array(keys, pa.string()))
    return rows.set_column(rows.column_names.index("offset"), "offset", offsets)


def _numbered(urls: pa.ChunkedArray) -> tuple[list[str], np.ndarray]:
    """URLs of shards, sorted, and for each row the number of its shard; any if it has none."""
    whole = urls.combine_chunks()
    names = whole.dictionary.to_pylist()
    order = sorted(range(len(names)), key=names.__getitem__)
    rank = np.argsort([*order, len(order)])
    codes = pc.fill_null(whole.indices, len(names)).to_numpy()
    return [names[code] for code in order], rank[codes]


def _assign_to_shards(
    rows: pa.Table, sources: Sequence[SourceShard], options: Options
) -> tuple[ShardPlan, np.ndarray]:
    """Order samples and assign them to shards.

    ``rows`` are those of the plan in the order of the frame, with ``number``, their position in it.
    Returns also the numbers of the rows that are in no shard, since theirs has their key already.
    """
    if options.shuffle is not None:
        rows = rows.take(pa.array(_shuffled(rows, sources, options.shuffle)))
    sizes = _tar_bytes(rows) if options.bytes_per_shard else None
    # Keys that unpack to the same file are equal: ./a and a.
    paths = pc.replace_substring_regex(rows.column("key"), r"(^|/)(\./)+", r"\1")
    keys = paths.combine_chunks().dictionary_encode().indices.to_numpy()
    repeated = []
    kept = np.arange(len(rows))
    while True:  # without the repeated rows, others move to another shard, and may be repeated
        starts = _starts(len(kept), None if sizes is None else sizes[kept], options)
        repeats = _repeated(keys[kept], starts)
        if not repeats.any():
            break
        repeated.append(kept[repeats])
        kept = kept[~repeats]
    numbers = rows.column("number").to_numpy()
    rejected = numbers[np.concatenate(repeated)] if repeated else numbers[:0]
    plan = ShardPlan(rows.take(pa.array(kept)).drop_columns(["number"]), sources, starts)
    return plan, rejected


def _starts(count: int, sizes: np.ndarray | None, options: Options) -> np.ndarray:
    """The row at which each shard begins."""
    most = options.samples_per_shard or count or 1
    if sizes is None:
        return np.arange(0, count, most)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    room = room_for_members(options.bytes_per_shard or 0)
    starts = []
    start = 0
    while start < count:
        starts.append(start)
        full = int(np.searchsorted(ends, ends[start] + room, side="right")) - 1
        start = min(max(full, start + 1), start + most)
    return np.array(starts, np.int64)


def _tar_bytes(rows: pa.Table) -> np.ndarray:
    """Bytes of each sample in a tar, with headers and padding; int64."""
    sizes_of_chunks = []
    for start in range(0, len(rows), _CHUNK):
        part = rows.slice(start, _CHUNK)
        members = part.column("members").combine_chunks()
        flat = members.flatten()
        keys = part.column("key").take(members.value_parent_indices())
        names = pc.binary_join_element_wise(keys, flat.field("extension"), ".").to_pylist()
        sizes = flat.field("size").to_numpy()
        lengths = list(map(len, headers(names, sizes, np.zeros(len(names), np.int64))))
        nbytes = np.array(lengths, np.int64) + sizes + padding(sizes)
        offsets = members.offsets.to_numpy()
        sizes_of_chunks.append(np.add.reduceat(nbytes, offsets[:-1] - offsets[0]))
    return np.concatenate(sizes_of_chunks) if sizes_of_chunks else np.zeros(0, np.int64)


def _repeated(keys: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Mask of the rows whose key an earlier row of the same shard has."""
    shards = np.searchsorted(starts, np.arange(len(keys)), side="right")
    return pd.DataFrame({"shard": shards, "key": keys}).duplicated().to_numpy()


def _shuffled(rows: pa.Table, sources: Sequence[SourceShard], seed: int) -> np.ndarray:
    """Random order that depends only on the seed and on each sample's source and offset.

    Not on the order of the frame, which after a merge depends on partitions.
    """
    codes = rows.column("source").to_numpy()
    names = [f"{seed}\0{url_identity(source.url)}" for source in sources]
    offsets = rows.column("offset")
    places = pc.fill_null(offsets, 0).to_numpy().astype(np.uint64)
    absent = np.flatnonzero(pc.is_null(offsets).to_numpy())
    places[absent] = _hashed(rows.column("key").take(pa.array(absent)).to_pylist())
    mixed = _hashed(names)[codes] ^ pd.util.hash_array(places)
    return np.lexsort([places, codes, pd.util.hash_array(mixed)])


def _hashed(texts: list[str]) -> np.ndarray:
    return pd.util.hash_array(np.array(texts, object), categorize=False)


def _repartition_spill(plan: ShardPlan, context: ExportContext) -> ShardPlan:
    """Rewrite the staged columns of a plan's samples in batches by shard."""
    parts = plan.rows.column("part").combine_chunks()
    names = parts.dictionary.to_pylist()
    if not names or not len(parts):
        return plan
    codes = parts.indices.to_numpy()
    group = _groups(names, context)[codes]
    # Sorted by group, and within each by shard.
    order = np.argsort(group, kind="stable")
    shards = np.searchsorted(plan.starts, order, side="right")
    groups, starts = np.unique(group[order], return_index=True)
    ends = [*starts[1:].tolist(), len(order)]
    locations = plan.rows.select(["part", "batch", "row"]).take(pa.array(order))
    locations = locations.set_column(0, "part", locations.column("part").cast(pa.string()))
    locations = locations.append_column("shard", pa.array(shards, pa.int32()))
    spans = list(zip(starts.tolist(), ends, strict=True))
    wanted = staged_name("regrouped")
    batches = (locations.slice(start, end - start) for start, end in spans)
    write_batches(context.output, wanted, locations.schema, batches, compressed=True)
    files = one_task_per_item(
        partial(_repartition, name=wanted, context=context), range(len(groups))
    )
    context.output.remove([wanted, *names])

    # The new location of each row of the plan.
    batch, row = np.empty(len(order), np.int32), np.empty(len(order), np.int32)
    for start, end in spans:
        _, first, number = np.unique(shards[start:end], return_index=True, return_inverse=True)
        batch[order[start:end]] = number
        row[order[start:end]] = np.arange(end - start) - first[number]
    file = np.empty(len(order), np.int32)
    file[order] = np.repeat(np.arange(len(groups)), np.diff([*starts, len(order)]))
    rows = plan.rows
    for name, values in (
        ("part", pa.DictionaryArray.from_arrays(pa.array(file), pa.array(files))),
        ("batch", pa.array(batch)),
        ("row", pa.array(row)),
    ):
        rows = rows.set_column(rows.column_names.index(name), name, values)
    return replace(plan, rows=rows)


def _groups(names: list[str], context: ExportContext) -> np.ndarray:
    """For each file, the number of the task that reads it."""
    sizes = context.output.sizes(STAGING)
    starts = np.cumsum([0, *(sizes[name.rpartition("/")[2]] for name in names)])[:-1]
    return starts // _BYTES_PER_TASK


def _repartition(number: int, name: str, context: ExportContext) -> str:
    """Write the rows of one task to a new file, with a batch for each shard; its name."""
    wanted = read_batch(context.output, name, number)
    table = take_rows(context.output, wanted)
    assert table is not None  # all rows have a part
    starts = np.flatnonzero(np.diff(wanted.column("shard").to_numpy(), prepend=-1)).tolist()
    ends = [*starts[1:], len(table)]
    written = staged_name("columns")
    batches = (table.slice(start, end - start) for start, end in zip(starts, ends, strict=True))
    write_batches(context.output, written, table.schema, batches)
    return written
