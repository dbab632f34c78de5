"""A staged frame → a plan: which rows can be exported, where their members are, in which order."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.export.arrow_files import write_batches
from dask_image_ingest.export.job import Job
from dask_image_ingest.export.keys import UNSURE, unsure_rows
from dask_image_ingest.export.known import Known
from dask_image_ingest.export.locate import POINTERS, Located, locate
from dask_image_ingest.export.plan import Plan, make_plan
from dask_image_ingest.export.reasons import Reasons
from dask_image_ingest.export.regroup import regroup
from dask_image_ingest.export.stage import Staged
from dask_image_ingest.progress import run

__all__ = ["Prepared", "prepare"]

logger = logging.getLogger("dask_image_ingest")


@dataclass(frozen=True)
class Prepared:
    """A plan, and the rows that are not in it."""

    plan: Plan
    reasons: Reasons


def prepare(staged: Staged, job: Job, keys_assigned: bool, show: bool) -> Prepared:
    """Find out what is to be written, and leave it where tasks find it.

    Parameters
    ----------
    keys_assigned
        Whether the frame says that keys were given anew.

    Raises
    ------
    ArgumentError
        If rows can't be exported, unless such are to be left out and some shard can be read.
    """
    rows = staged.rows
    reasons = Reasons(rows)
    reasons.find_bad_pointers()
    reasons.find_bad_keys()
    if job.options.drop_bad_images:
        reasons.find_bad_images()
    urls, sources = _numbered(rows.column("url"))
    reasons.find_repeated_rows(sources)
    kept = reasons.kept
    by_source = kept[np.argsort(sources[kept], kind="stable")]
    located = _locate(rows, by_source, sources, urls, staged.known, job, show)
    found = _found(rows, by_source, located)
    for number in by_source[unsure_rows(found, keys_assigned)]:
        reasons.add(number, UNSURE)
    for number, reason in zip(by_source, found.column("reason").to_pylist(), strict=True):
        if reason is not None:
            reasons.add(number, reason)
    reasons.find_repeated_keys(sources)
    # Back into the order of the frame.
    place = np.empty(len(rows), np.int64)
    place[by_source] = np.arange(len(by_source))
    found = found.drop_columns(["reason", "same_key"]).take(pa.array(place[reasons.kept]))
    plan, repeated = make_plan(found, located, job.options)
    for number in repeated:
        reasons.add(
            number,
            "repeated-key: its shard has another sample of this key; give it another __key__",
        )
    # What could be read has a version. An empty export of nothing but errors is nobody's wish.
    nothing_read = bool(located) and not any(source.version for source in located)
    if nothing_read or not job.options.drop_rows:
        reasons.refuse(nothing_read)
    if job.options.shuffle is not None:
        plan = regroup(plan, job, show)
    schema = None if staged.schema is None else {b"sidecar": staged.schema.serialize().to_pybytes()}
    batches = plan.batches()
    for first in batches:
        schema = first.schema.with_metadata(schema)
        # One after the other: together they are several times the plan, with URLs in every row.
        write_batches(job.place, job.planned, schema, chain([first], batches), compressed=True)
    logger.info(
        "%d samples of %d source shards are planned in %d shards",
        len(plan.rows),
        len(located),
        plan.shards,
    )
    return Prepared(plan, reasons)


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
    known: Known,
    job: Job,
    show: bool,
) -> list[Located]:
    """Walk each source of which something is not known, once, in a task of its own."""
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
        made = [f"made:{made.extension}" for made in job.options.members.made]
        counts = [len(wanted[number]) for number in unknown]
        taken = np.concatenate([wanted[number] for number in unknown])
        pointers = rows.select([*POINTERS, *made]).take(pa.array(taken))
        batches = (
            pointers.slice(end - count, count).combine_chunks().to_batches()[0]
            for count, end in zip(counts, accumulate(counts), strict=True)
        )
        write_batches(job.place, job.pointers, pointers.schema, batches, compressed=True)
        items = [(batch, names[number]) for batch, number in enumerate(unknown)]
        walked: list[Located] = run(partial(locate, job=job), items, show)
        located |= {source.url: source for source in walked}
    return [located[url] for url in names]


def _found(rows: pa.Table, by_source: np.ndarray, located: list[Located]) -> pa.Table:
    """What the tasks found beside what the frame says, in the order of the sources."""
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
