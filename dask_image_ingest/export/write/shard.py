"""The task that writes a shard with its sidecar and index.

The layout is computed before a byte is read, so members are written in any order, and only those in
flight are in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa

from dask_image_ingest.export.options import ExportContext
from dask_image_ingest.export.staged_tables import read_batch, take_rows
from dask_image_ingest.export.tar_layout import Layout, index_file, lay_out
from dask_image_ingest.export.write.copy import copy_members
from dask_image_ingest.index import parquet_bytes
from dask_image_ingest.progress_bar import WRITTEN, count
from dask_image_ingest.storage import STAGING, refuse_other_run
from dask_image_ingest.url_secrets import url_identity

#: Record of a written shard, as JSON types: names, sizes and digests of its files.
ShardRecord = dict[str, Any]


def done_name(number: int) -> str:
    """Name of the record of a written shard, for a run that resumes."""
    return f"{STAGING}/done-{number}.json"


def write_shard(number: int, context: ExportContext) -> ShardRecord:
    """Write a shard, its sidecar and its index, unless an earlier run did.

    Files are committed after all are complete, the shard last: a shard that exists has its sidecar
    and index.

    Raises
    ------
    ExportError
        If it can't be written, or if another run has begun in the folder.
    ShardError
        If a source can't be read, or has changed.
    """
    finished = _finished(number, context)
    if finished:
        return finished
    output = context.output
    *beside, name = context.options.files_of(number)
    try:
        batch = read_batch(output, context.planned, number)
        columns = take_rows(output, *(batch.column(of) for of in ("part", "batch", "row")))
    except OSError:
        refuse_other_run(output, context.run)  # it has removed the staged files of this run
        raise
    layout = lay_out(batch)
    contents = _contents(beside, batch, layout, columns, f"{context.url}/{name}")
    with output.scratch() as file:
        sha256 = copy_members(file.fileno(), layout, batch, columns, context)
        record = {
            "name": name,
            "samples": len(batch),
            "members": len(layout.names),
            "bytes": layout.size,
            "sha256": sha256,
            "beside": [_facts(*entry) for entry in contents.items()],
        }
        check = partial(refuse_other_run, output, context.run)
        for beside_name, content in contents.items():
            output.put(beside_name, content, check)
        output.commit(file, name, check)
    count(WRITTEN, len(batch))
    output.fsync()
    output.put(done_name(number), json.dumps(record).encode(), check)
    return record


def _finished(number: int, context: ExportContext) -> ShardRecord | None:
    """Record of a shard that an earlier run finished; None if files are missing."""
    content = context.output.read(done_name(number))
    if content is None:
        return None
    with suppress(ValueError):  # truncated by a crash of the machine: records are not synced
        record: ShardRecord = json.loads(content)
        return record if has_recorded_sizes(record, context.output.size) else None
    return None


def has_recorded_sizes(record: ShardRecord, size_of: Callable[[str], int | None]) -> bool:
    """True if a shard and the files beside it have the recorded sizes."""
    return all(size_of(file["name"]) == file["bytes"] for file in (record, *record["beside"]))


def _contents(
    names: list[str], batch: pa.RecordBatch, layout: Layout, columns: pa.Table | None, url: str
) -> dict[str, bytes]:
    """Contents of the files beside a shard, by name."""
    contents = {}
    for name in names:
        if name.endswith(".idx"):
            contents[name] = index_file(layout, len(batch))
        elif columns is not None:
            schema = pa.ipc.read_schema(pa.py_buffer(batch.schema.metadata[b"sidecar"]))
            contents[name] = sidecar(columns, schema, layout, url)
    return contents


def _facts(name: str, content: bytes) -> dict[str, Any]:
    return {
        "name": name,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def sidecar(columns: pa.Table, schema: pa.Schema, layout: Layout, url: str) -> bytes:
    """The columns of a shard's samples as a parquet file.

    ``__url__``, ``offset`` and ``nbytes`` are replaced by those of the image in the new shard at
    ``url``, null without an image, so that ``decode_images`` finds it.
    """
    table = pa.table([_conform(columns, field) for field in schema], schema=schema)
    # Every sample has a member, so index -1 of a missing image is valid; its value is masked.
    absent = layout.images < 0
    locations = {
        "__url__": pa.array([url_identity(url)] * len(table), pa.string()),
        "offset": pa.array(layout.places[layout.images], pa.int64(), mask=absent),
        "nbytes": pa.array(layout.sizes[layout.images], pa.int64(), mask=absent),
    }
    for name, values in locations.items():
        number = schema.get_field_index(name)
        if number < 0:
            table = table.append_column(name, values)
        else:
            field = schema.field(number)
            table = table.set_column(number, field, values.cast(field.type))
    return parquet_bytes(table)


def _conform(table: pa.Table, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    """The column of a field, in its type; nulls if the table has none."""
    if field.name not in table.column_names:
        return pa.nulls(len(table), field.type)
    return table.column(field.name).cast(field.type)
