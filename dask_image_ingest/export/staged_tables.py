"""Tables in the staging folder: written in batches, read back a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter

import numpy as np
import pyarrow as pa

from dask_image_ingest.storage import OutputStore

_COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")


def write_batches(
    output: OutputStore,
    name: str,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    compressed: bool = False,
) -> None:
    """Write a table in these batches. Only what is not compressed can be mapped."""
    with output.scratch() as file:
        options = _COMPRESSED if compressed else None
        with pa.ipc.new_file(file, schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
        output.commit(file, name)


def read_batch(output: OutputStore, name: str, number: int) -> pa.RecordBatch:
    """Read one batch."""
    with output.open(name) as file:
        return pa.ipc.open_file(file).get_batch(number)


def take_rows(
    output: OutputStore, parts: pa.Array, batches: pa.Array, rows: pa.Array
) -> pa.Table | None:
    """Read rows, each by its file, batch and place there; in the order that was asked for.

    None if they are in no file.
    """
    wanted: dict[tuple[str, int], list[int]] = {}
    where = zip(parts.to_pylist(), batches.to_pylist(), strict=True)
    for number, (part, batch) in enumerate(where):
        if part is not None:
            wanted.setdefault((part, batch), []).append(number)
    taken: list[pa.Table] = []
    order: list[int] = []
    for part, of_part in groupby(sorted(wanted), key=itemgetter(0)):
        with output.open(part) as file:
            reader = pa.ipc.open_file(file)
            for place_in_part in of_part:
                numbers = wanted[place_in_part]
                table = pa.Table.from_batches([reader.get_batch(place_in_part[1])])
                taken.append(table.take(rows.take(pa.array(numbers))))
                order += numbers
    if not taken:
        return None
    whole = pa.concat_tables(taken, promote_options="permissive")
    return whole.take(pa.array(np.argsort(order))).combine_chunks()


def to_bytes(table: pa.Table) -> bytes:
    """A table as bytes, its metadata included."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_bytes(data: bytes) -> pa.Table:
    """A table again."""
    return pa.ipc.open_stream(data).read_all()
