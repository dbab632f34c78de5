"""Repartitioning of staged columns by the shards of a shuffled plan.

As staged, the rows of a shuffled shard are spread over all files, and each shard's task would read
all of them. Each task here reads as many files as fit into memory, and replaces them by one file
with a batch for each shard.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa

from dask_image_ingest.computing import run
from dask_image_ingest.export.options import ExportContext, staged_name
from dask_image_ingest.export.plan.shard_plan import ShardPlan
from dask_image_ingest.export.staged_tables import read_batch, take_rows, write_batches
from dask_image_ingest.storage import STAGING

# Bytes of files per task, whose rows it has in memory twice.
_BYTES_PER_TASK = 256 << 20


def repartition_spill(plan: ShardPlan, context: ExportContext) -> ShardPlan:
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
    batches = (locations.slice(s, e - s).combine_chunks().to_batches()[0] for s, e in spans)
    write_batches(context.output, wanted, locations.schema, batches, compressed=True)
    files = run(partial(_repartition, name=wanted, context=context), range(len(groups)))
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
    table = take_rows(context.output, *(wanted.column(of) for of in ("part", "batch", "row")))
    assert table is not None  # all rows have a part
    starts = np.flatnonzero(np.diff(wanted.column("shard").to_numpy(), prepend=-1)).tolist()
    ends = [*starts[1:], len(table)]
    written = staged_name("columns")
    batches = (
        table.slice(start, end - start).combine_chunks().to_batches()[0]
        for start, end in zip(starts, ends, strict=True)
    )
    write_batches(context.output, written, table.schema, batches)
    return written
