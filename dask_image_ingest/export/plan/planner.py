"""The planner: rejects rows, locates members, and assigns samples to shards."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.computing import run
from dask_image_ingest.export.options import ExportContext
from dask_image_ingest.export.plan.locate import POINTERS, Located, LocatedCache, locate
from dask_image_ingest.export.plan.rejected_rows import RejectedRows
from dask_image_ingest.export.plan.shard_plan import ShardPlan, make_plan
from dask_image_ingest.export.plan.spill_repartition import repartition_spill
from dask_image_ingest.export.plan.staging import StagedRows
from dask_image_ingest.export.staged_tables import write_batches

# Image files that one task locates.
_FILES = 64

logger = logging.getLogger("dask_image_ingest")


@dataclass(frozen=True)
class Prepared:
    """A plan, and the rejected rows."""

    plan: ShardPlan
    rejected: RejectedRows


def prepare(
    staged: StagedRows, context: ExportContext, keys_assigned: bool, show: bool
) -> Prepared:
    """Plan an export, and stage the plan for the tasks.

    Raises
    ------
    ArgumentError
        If rows can't be exported, unless such are to be left out and some shard can be read.
    """
    rows = staged.rows
    rejected = RejectedRows(rows)
    rejected.find_bad_pointers()
    rejected.find_bad_keys()
    if context.options.drop_bad_images:
        rejected.find_bad_images()
    urls, sources = _numbered(rows.column("url"))
    rejected.find_repeated_rows(sources)
    kept = rejected.kept
    by_source = kept[np.argsort(sources[kept], kind="stable")]
    located = _locate(rows, by_source, sources, urls, staged.known, context, show)
    found = _found(rows, by_source, located)
    has_samples = context.options.has_samples
    if has_samples and (keys_assigned or any(source.renamed for source in located)):
        rejected.find_unsure_rows()
    for number, reason in zip(by_source, found.column("reason").to_pylist(), strict=True):
        if reason is not None:
            rejected.add(number, reason)
    if has_samples:
        rejected.find_repeated_keys(sources)
    # Back into the order of the frame.
    position = np.empty(len(rows), np.int64)
    position[by_source] = np.arange(len(by_source))
    found = found.drop_columns(["reason"]).take(pa.array(position[rejected.kept]))
    plan, repeated = make_plan(found, located, context.options)
    for number in repeated:
        rejected.add(
            number,
            "repeated-key: its shard has another sample of this key; give it another __key__",
        )
    # Shards that could be read have a version. Refuse an export in which no shard is readable.
    nothing_read = bool(located) and not any(source.version for source in located)
    if nothing_read or not context.options.drop_rows:
        rejected.refuse(nothing_read)
    if context.options.shuffle is not None:
        plan = repartition_spill(plan, context, show)
    schema = None if staged.schema is None else {b"sidecar": staged.schema.serialize().to_pybytes()}
    batches = plan.batches()
    for first in batches:
        schema = first.schema.with_metadata(schema)
        # One after the other: together they are several times the plan, with URLs in every row.
        write_batches(
            context.output, context.planned, schema, chain([first], batches), compressed=True
        )
    logger.info(
        "%d samples of %d source shards are planned in %d shards",
        len(plan.rows),
        len(located),
        plan.shards,
    )
    return Prepared(plan, rejected)


def _numbered(urls: pa.ChunkedArray) -> tuple[list[str], np.ndarray]:
    """The shards in the order of their names, and for each row the number of its shard."""
    whole = urls.combine_chunks()
    names = whole.dictionary.to_pylist()
    order = sorted(range(len(names)), key=names.__getitem__)
    rank = np.empty(len(names) + 1, np.int32)
    rank[order] = np.arange(len(names))
    rank[-1] = -1  # where there is no shard
    codes = pc.fill_null(whole.indices, len(names)).to_numpy()
    return [names[code] for code in order], rank[codes]


def _locate(
    rows: pa.Table,
    by_source: np.ndarray,
    sources: np.ndarray,
    urls: list[str],
    known: LocatedCache,
    context: ExportContext,
    show: bool,
) -> list[Located]:
    """Walk each source of which something is not known, once: shards in tasks of their own."""
    used, starts = np.unique(sources[by_source], return_index=True)
    names = [urls[source] for source in used.tolist()]
    wanted = [by_source[start:end] for start, end in pairwise([*starts.tolist(), len(by_source)])]
    located = {
        url: found
        for url, numbers in zip(names, wanted, strict=True)
        if (found := known.take(url, numbers)) is not None
    }
    unknown = [number for number, url in enumerate(names) if url not in located]
    if unknown:
        made = [f"made:{made.extension}" for made in context.options.members.made]
        pointers = rows.select([*POINTERS, *made])
        tasks = list(_tasks(unknown, [_is_file(rows, wanted[number]) for number in unknown]))
        batches = (
            pointers.take(pa.array(np.concatenate([wanted[n] for n in each])))
            .combine_chunks()
            .to_batches()[0]
            for each in tasks
        )
        write_batches(context.output, context.pointers, pointers.schema, batches, compressed=True)
        items = [
            (batch, {names[n]: len(wanted[n]) for n in each}) for batch, each in enumerate(tasks)
        ]
        walked: list[list[Located]] = run(partial(locate, context=context), items, show)
        located |= {source.url: source for source in chain.from_iterable(walked)}
    return [located[url] for url in names]


def _is_file(rows: pa.Table, numbers: np.ndarray) -> bool:
    """True for a source that is an image: in a tar no member begins with the first byte."""
    return len(numbers) == 1 and rows.column("offset")[int(numbers[0])].as_py() == 0


def _tasks(sources: Sequence[int], is_file: Sequence[bool]) -> Iterator[list[int]]:
    """Sources that are walked in one task: each shard, or some image files."""
    files: list[int] = []
    for source, small in zip(sources, is_file, strict=True):
        if small:
            files.append(source)
        else:
            yield [source]
    yield from (files[start : start + _FILES] for start in range(0, len(files), _FILES))


def _found(rows: pa.Table, by_source: np.ndarray, located: list[Located]) -> pa.Table:
    """Join located members with the frame's pointers, in the order of the sources."""
    told = ["key", "offset", "part", "batch", "row"]
    found = rows.select(told).take(pa.array(by_source, pa.int64()))
    found = found.append_column("number", pa.array(by_source, pa.int64()))
    counts = [len(source.rows) for source in located]
    source = np.repeat(np.arange(len(located)), counts)
    found = found.append_column("source", pa.array(source, pa.int32()))
    tables = [source.rows for source in located] or [Located.no_rows()]
    whole = pa.concat_tables(tables)
    for name in whole.column_names:
        found = found.append_column(name, whole.column(name))
    return found
