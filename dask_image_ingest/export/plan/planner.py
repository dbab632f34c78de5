"""The planner: rejects rows, locates members, and assigns samples to shards."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.computing import one_task_per_item
from dask_image_ingest.export.export_options import ExportContext
from dask_image_ingest.export.member_selection import as_table
from dask_image_ingest.export.plan.locate import (
    LOCATION_COLUMNS,
    Located,
    LocatedCache,
    locate_batch,
)
from dask_image_ingest.export.plan.rejected_rows import RejectedRows
from dask_image_ingest.export.plan.shard_plan import ShardPlan, make_plan
from dask_image_ingest.export.plan.staging import StagedRows, repartition_spill
from dask_image_ingest.export.staged_tables import write_batches
from dask_image_ingest.storage import Shard

# Image files per task that locates members.
_FILES_PER_TASK = 64

logger = logging.getLogger("dask_image_ingest")


@dataclass(frozen=True)
class Prepared:
    """A plan, and the rejected rows."""

    plan: ShardPlan
    rejected: RejectedRows


def prepare(
    staged: StagedRows,
    context: ExportContext,
    listed: Mapping[str, Shard],
    keys_assigned: bool,
) -> Prepared:
    """Plan an export, and write the plan to the staging folder, for the tasks.

    ``listed`` has the shards that the frame reads, by URL: no other version of them is scanned.

    Raises
    ------
    ArgumentError
        If ``errors`` or ``row_errors`` refuse a rejected row, or if no shard can be read.
    """
    rows = staged.rows
    rejected = RejectedRows(rows)
    rejected.find_bad_locations()
    rejected.find_bad_keys()
    if context.options.errors != "null":
        rejected.find_bad_images()
    urls, sources = _numbered(rows.column("url"))
    rejected.find_repeated_rows(sources)
    kept = rejected.kept
    by_source = kept[np.argsort(sources[kept], kind="stable")]
    located = _locate_members(rows, by_source, sources, urls, staged.located, listed, context)
    joined = _join(rows, by_source, located)
    has_samples = context.options.has_samples
    used = np.unique(sources[by_source])
    renamed = [number for number, each in zip(used, located, strict=True) if each.renamed]
    if renamed:
        rejected.find_repeated_renamed(sources, renamed)
    if has_samples and (keys_assigned or renamed):
        rejected.find_ambiguous_rows()
    for number, reason in zip(by_source, joined.column("reason").to_pylist(), strict=True):
        if reason is not None:
            rejected.add(number, reason)
    if has_samples:
        rejected.find_repeated_keys(sources)
    # Back to the order of the frame.
    position = np.empty(len(rows), np.int64)
    position[by_source] = np.arange(len(by_source))
    joined = joined.drop_columns(["reason"]).take(pa.array(position[rejected.kept]))
    plan, repeated = make_plan(joined, located, context.options)
    for number in repeated:
        rejected.add(
            number,
            "repeated-key: its shard has another sample of this key; give it another __key__",
        )
    # Refuse an export in which no shard is readable; those that are have a version.
    nothing_read = bool(located) and not any(source.version for source in located)
    rejected.refuse(context.options, nothing_read)
    if context.options.shuffle is not None:
        plan = repartition_spill(plan, context)
    schema = None if staged.schema is None else {b"sidecar": staged.schema.serialize().to_pybytes()}
    batches = plan.batches()
    for first in batches:
        schema = first.schema.with_metadata(schema)
        # Streamed: with URLs in every row, all batches together are several times the plan.
        write_batches(
            context.output, context.shard_rows, schema, chain([first], batches), compressed=True
        )
    logger.info(
        "%d samples of %d source shards are planned in %d shards",
        len(plan.rows),
        len(located),
        plan.shards,
    )
    return Prepared(plan, rejected)


def _numbered(urls: pa.ChunkedArray) -> tuple[list[str], np.ndarray]:
    """The shards' URLs, sorted, and for each row the number of its shard; -1 for none."""
    whole = urls.combine_chunks()
    names = whole.dictionary.to_pylist()
    order = sorted(range(len(names)), key=names.__getitem__)
    rank = np.empty(len(names) + 1, np.int32)
    rank[order] = np.arange(len(names))
    rank[-1] = -1
    codes = pc.fill_null(whole.indices, len(names)).to_numpy()
    return [names[code] for code in order], rank[codes]


def _locate_members(
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
        locations = rows.select([*LOCATION_COLUMNS, *sizes, *staged])
        tasks = list(_tasks(missing, [_is_file(rows, wanted[number]) for number in missing]))
        batches = (
            locations.take(pa.array(np.concatenate([wanted[n] for n in task])))
            .combine_chunks()
            .to_batches()[0]
            for task in tasks
        )
        write_batches(context.output, context.locations, locations.schema, batches, compressed=True)
        items = [
            (batch, [(names[n], listed.get(names[n]), len(wanted[n])) for n in task])
            for batch, task in enumerate(tasks)
        ]
        results: list[list[Located]] = one_task_per_item(
            partial(locate_batch, context=context), items
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


def _join(rows: pa.Table, by_source: np.ndarray, located: list[Located]) -> pa.Table:
    """Join the frame's rows with their located members, in order of the sources."""
    joined = rows.select(["key", "offset", "part", "batch", "row"])
    joined = joined.take(pa.array(by_source, pa.int64()))
    joined = joined.append_column("number", pa.array(by_source, pa.int64()))
    counts = [len(source.rows) for source in located]
    source = np.repeat(np.arange(len(located)), counts)
    joined = joined.append_column("source", pa.array(source, pa.int32()))
    members = pa.concat_tables([source.rows for source in located] or [as_table([])])
    for name in members.column_names:
        joined = joined.append_column(name, members.column(name))
    return joined
