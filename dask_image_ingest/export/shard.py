"""One task: a batch of the plan becomes a shard, with its sidecar and its index.

Where everything will lie is known before a byte is read, so that members are written where they
belong in whatever order they come, and nothing but what is on its way is in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from dask_image_ingest.errors import ExportError
from dask_image_ingest.export.arrow_files import read_batch, take_rows
from dask_image_ingest.export.copy import copy_members
from dask_image_ingest.export.index_file import index_file
from dask_image_ingest.export.job import Job
from dask_image_ingest.export.layout import Layout, lay_out
from dask_image_ingest.export.lock import refuse_other_run
from dask_image_ingest.export.place import STAGING
from dask_image_ingest.export.sidecar import sidecar, table_bytes

__all__ = [
    "Written",
    "compare_shard",
    "done_name",
    "is_there",
    "write_shard",
]

#: What is known of a shard that is written, as JSON knows it.
Written = dict[str, Any]


def done_name(number: int) -> str:
    """The record of a shard that is written, for whoever goes on."""
    return f"{STAGING}/done-{number}.json"


def write_shard(number: int, job: Job) -> Written:
    """Write a shard and what lies beside it, unless a run before this one did.

    Nothing appears under its name before all of it is written, and the shard last: one that is
    there is complete.

    Raises
    ------
    ExportError
        If it can't be written, or if another export has begun there.
    ShardError
        If a source can't be read, or has changed.
    """
    finished = _finished(number, job)
    if finished:
        return finished
    place = job.place
    batch, layout, columns, contents, digest = _planned(number, job)
    name = job.options.files_of(number)[-1]
    with place.scratch() as file:
        sha256 = copy_members(file.fileno(), layout, batch, columns, job)
        written = {
            "name": name,
            "samples": len(batch),
            "members": len(layout.names),
            "bytes": layout.size,
            "sha256": sha256,
            "columns": digest,
            "beside": [_facts(*entry) for entry in contents.items()],
        }
        check = partial(refuse_other_run, place, job.run)
        for beside_name, content in contents.items():
            place.put(beside_name, content, check)
        place.commit(file, name, check)
    place.settle()
    place.put(done_name(number), json.dumps(written).encode(), check)
    return written


def compare_shard(number: int, job: Job) -> None:
    """Refuse to go on if a run before this one wrote a shard with other values in its columns.

    Raises
    ------
    ExportError
    """
    finished = _finished(number, job)
    if finished and finished["columns"] != _planned(number, job).digest:
        raise ExportError(
            f"the columns of the samples in {job.place.locate(finished['name'])} have other values "
            "now than when it was written, and nothing was written by this run. overwrite=True "
            "begins anew; or choose another folder"
        )


class _Planned(NamedTuple):
    """What the plan says of a shard: its samples, and what lies beside it."""

    batch: pa.RecordBatch
    layout: Layout
    columns: pa.Table | None
    contents: dict[str, bytes]
    digest: str


def _planned(number: int, job: Job) -> _Planned:
    place = job.place
    *beside, name = job.options.files_of(number)
    try:
        batch = read_batch(place, job.planned, number)
        columns = take_rows(place, *(batch.column(of) for of in ("part", "batch", "row")))
    except OSError:
        refuse_other_run(place, job.run)  # which has removed what this one had staged
        raise
    layout = lay_out(batch)
    contents = _contents(beside, batch, layout, columns, place.locate(name))
    return _Planned(batch, layout, columns, contents, _columns_digest(contents, columns))


def _finished(number: int, job: Job) -> Written | None:
    """What an earlier run wrote of a shard, if it is still there."""
    record = job.place.read(done_name(number))
    if record is None:
        return None
    with suppress(ValueError):  # cut short by a machine that went down
        written: Written = json.loads(record)
        return written if is_there(written, job.place.size) else None
    return None


def is_there(written: Written, size_of: Callable[[str], int | None]) -> bool:
    """Whether a shard and what lies beside it have the sizes that they should."""
    return all(size_of(file["name"]) == file["bytes"] for file in (written, *written["beside"]))


def _contents(
    names: list[str], batch: pa.RecordBatch, layout: Layout, columns: pa.Table | None, url: str
) -> dict[str, bytes]:
    """What lies beside a shard, by name."""
    contents = {}
    for name in names:
        if name.endswith(".idx"):
            contents[name] = index_file(layout, len(batch))
        elif columns is not None:
            schema = pa.ipc.read_schema(pa.py_buffer(batch.schema.metadata[b"sidecar"]))
            shapes = pa.Table.from_batches([batch.select(["height", "width"])])
            contents[name] = sidecar(columns, schema, layout, shapes, url)
    return contents


def _columns_digest(contents: dict[str, bytes], columns: pa.Table | None) -> str:
    """Stands for the values of the columns that went into a shard and its sidecar."""
    if columns is None:
        return ""
    digest = hashlib.sha256()
    for name, content in contents.items():
        if name.endswith(".parquet"):
            digest.update(content)
    made = [name for name in columns.column_names if name.startswith("made:")]
    if made:
        digest.update(table_bytes(columns.select(made)))
    return digest.hexdigest()


def _facts(name: str, content: bytes) -> dict[str, Any]:
    return {
        "name": name,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
