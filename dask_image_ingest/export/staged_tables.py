"""Arrow IPC files in the staging folder: written in batches, read back by row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter

import numpy as np
import pyarrow as pa

from dask_image_ingest.storage.output import OutputStore, translate_write_errors

_COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")


def write_batches(
    output: OutputStore,
    name: str,
    schema: pa.Schema,
    batches: Iterable[pa.Table],
    compressed: bool = False,
) -> None:
    """Write tables that have rows, each as one batch: the unit of reading."""
    with output.scratch(name) as file:
        options = _COMPRESSED if compressed else None
        with pa.ipc.new_file(file, schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch.combine_chunks().to_batches()[0])
        output.commit(file, name)


def read_batch(output: OutputStore, name: str, number: int) -> pa.RecordBatch:
    """Read one batch."""
    with _opened(output, name) as reader:
        return reader.get_batch(number)


def take_rows(output: OutputStore, places: pa.RecordBatch) -> pa.Table | None:
    """Gather rows, given by file (``part``), ``batch`` in it, and ``row`` in that; in this order.

    Each batch is read once. None if no row is in a file (its part is null).
    """
    parts, batches, rows = (places.column(name) for name in ("part", "batch", "row"))
    by_batch: dict[tuple[str, int], list[int]] = {}
    for number, (part, batch) in enumerate(
        zip(parts.to_pylist(), batches.to_pylist(), strict=True)
    ):
        if part is not None:
            by_batch.setdefault((part, batch), []).append(number)
    tables: list[pa.Table] = []
    order: list[int] = []
    for part, of_part in groupby(sorted(by_batch), key=itemgetter(0)):
        with _opened(output, part) as reader:
            for _, batch in of_part:
                numbers = by_batch[part, batch]
                table = pa.Table.from_batches([reader.get_batch(batch)])
                tables.append(table.take(rows.take(pa.array(numbers))))
                order += numbers
    if not tables:
        return None
    whole = pa.concat_tables(tables, promote_options="permissive")
    return whole.take(pa.array(np.argsort(order))).combine_chunks()


@contextmanager
def _opened(output: OutputStore, name: str) -> Iterator[pa.ipc.RecordBatchFileReader]:
    with (
        translate_write_errors(output.locate(name), output.advice, done="read"),
        output.open(name) as file,
    ):
        yield pa.ipc.open_file(file)


def to_bytes(table: pa.Table) -> bytes:
    """Serialize a table, including its metadata."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_bytes(data: bytes) -> pa.Table:
    """Deserialize a table."""
    return pa.ipc.open_stream(data).read_all()
