"""Writing of a shard: members are copied from their sources, each opened once and read in order.

Members are written in any order, and only those in flight are in memory.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa

from dask_image_ingest.computing import WRITTEN, count
from dask_image_ingest.errors import ShardError
from dask_image_ingest.export.manifest import (
    SHARD_ROWS,
    ExportContext,
    ShardRecord,
    done_name,
    file_names,
    has_recorded_sizes,
)
from dask_image_ingest.export.member_selection import COLUMN, EXPANDED, SOURCE
from dask_image_ingest.export.staged_tables import read_batch, take_rows
from dask_image_ingest.export.tar_layout import AT_ONCE, Chunk, Layout, TarWriter, lay_out
from dask_image_ingest.index import parquet_bytes, wds2idx_text
from dask_image_ingest.storage import ByteReader, find_shards, open_shard
from dask_image_ingest.storage.output import refuse_other_run
from dask_image_ingest.url_secrets import url_identity

# Members at most so many bytes apart are read together, which costs less than another call.
_GAP = 8 << 10

# Larger members are read in pieces of this size.
_LARGE = 16 << 20

# Reads bytes, given offset and size.
Read = Callable[[int, int], Chunk]


def copy_members(
    file: int,
    layout: Layout,
    batch: pa.RecordBatch,
    columns: pa.Table | None,
    context: ExportContext,
) -> str:
    """Write every member of a layout, with header and padding, to a file.

    Parameters
    ----------
    file
        Descriptor of an empty file, open for reading and writing.
    columns
        The bytes of members from columns, as ``made:<extension>``; one row per sample.

    Returns
    -------
    str
        The SHA-256 of the file, as hexadecimal digits.

    Raises
    ------
    ShardError
        If a source has changed since its members were located.
    """
    tar = TarWriter(file, layout)
    for (url, version), members in _group_members(batch, ("url", "version"), layout, SOURCE):
        with _open_source(url, version, context) as content:
            offsets, sizes = layout.offsets[members], layout.sizes[members]
            ends = (offsets + sizes).tolist()
            content.prefetch(zip(offsets.tolist(), ends, strict=True))
            _copy(members, layout, lambda at, size: content[at : at + size], tar)
    for (name,), members in _group_members(batch, ("expanded",), layout, EXPANDED):
        with context.output.open(name) as expanded:
            _copy(members, layout, lambda at, size: expanded.read_at(size, at), tar)
    from_columns = np.flatnonzero(layout.where == COLUMN).tolist()
    for extension in sorted({layout.extensions[member] for member in from_columns}):
        if columns is None:
            raise AssertionError("there are members from columns, and no column was staged")
        values = columns.column(f"made:{extension}")
        for member in from_columns:
            if layout.extensions[member] == extension:
                tar.write(member, values[int(layout.sample[member])].as_buffer())
    return tar.finish()


def _copy(members: np.ndarray, layout: Layout, read: Read, tar: TarWriter) -> None:
    """Copy some members of one source, in the order of the source."""
    order = members[np.argsort(layout.offsets[members], kind="stable")]
    starts = layout.offsets[order].tolist()
    ends = (layout.offsets[order] + layout.sizes[order]).tolist()
    numbers = order.tolist()
    for first, stop in _coalesce(starts, ends):
        start, end = starts[first], ends[stop - 1]
        if end - start > _LARGE:
            tar.write_large(numbers[first], _pieces(read, start, end))
            continue
        data = memoryview(read(start, end - start))
        for number in range(first, stop):
            content = data[starts[number] - start : ends[number] - start]
            tar.write(numbers[number], content)


def _coalesce(starts: list[int], ends: list[int]) -> Iterator[tuple[int, int]]:
    """Coalesce members into reads: yields the first member of each, and the one after its last."""
    gaps = np.asarray(starts[1:]) - ends[:-1]
    apart = np.flatnonzero((gaps > _GAP) | (gaps < 0)) + 1
    for first, last in pairwise([0, *apart.tolist(), len(starts)]):
        while first < last:
            stop = max(bisect_right(ends, starts[first] + AT_ONCE, first, last), first + 1)
            yield first, stop
            first = stop


def _pieces(read: Read, start: int, end: int) -> Iterator[Chunk]:
    for piece in range(start, end, _LARGE):
        yield read(piece, min(_LARGE, end - piece))


def _group_members(
    batch: pa.RecordBatch, columns: tuple[str, ...], layout: Layout, where: int
) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Group the members of this ``where`` by columns of their samples; numbers of each."""
    members = np.flatnonzero(layout.where == where)
    values = list(zip(*(batch.column(name).to_pylist() for name in columns), strict=True))
    groups: dict[tuple[str, ...], list[int]] = {}
    for member, row in zip(members.tolist(), layout.sample[members].tolist(), strict=True):
        groups.setdefault(values[row], []).append(member)
    for group, numbers in groups.items():
        yield group, np.array(numbers)


@contextmanager
def _open_source(url: str, version: str, context: ExportContext) -> Iterator[ByteReader]:
    with open_shard(url, context.source_options) as content:
        if find_shards(url, context.source_options)[0].state != version:
            raise ShardError(
                f"{url} has changed since its samples were read. Read it again, and export that"
            )
        yield content


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
    output, options = context.output, context.options
    *beside, name = file_names(options.template, options.sidecar, options.index, number)
    try:
        batch = read_batch(output, SHARD_ROWS, number)
        columns = take_rows(output, batch)
    except OSError:
        refuse_other_run(output, context.run)  # it has removed the staged files of this run
        raise
    layout = lay_out(batch)
    contents = _contents(beside, batch, layout, columns, f"{context.url}/{name}")
    with output.scratch(name) as file:
        sha256 = copy_members(file.fileno(), layout, batch, columns, context)
        record = {
            "name": name,
            "samples": len(batch),
            "members": len(layout.names),
            "bytes": layout.size,
            "sha256": sha256,
            "beside": [
                {"name": n, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                for n, data in contents.items()
            ],
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


def _contents(
    names: list[str], batch: pa.RecordBatch, layout: Layout, columns: pa.Table | None, url: str
) -> dict[str, bytes]:
    """Contents of the files beside a shard, by name."""
    contents = {}
    for name in names:
        if name.endswith(".idx"):
            members = zip(
                layout.sample.tolist(),
                layout.extensions,
                layout.places.tolist(),
                layout.sizes.tolist(),
                layout.names,
                strict=True,
            )
            contents[name] = wds2idx_text(len(batch), members)
        elif columns is not None:
            schema = pa.ipc.read_schema(pa.py_buffer(batch.schema.metadata[b"sidecar"]))
            contents[name] = sidecar(columns, schema, layout, url)
    return contents


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
            if pa.types.is_null(field.type):  # no row had a value
                field = field.with_type(values.type)
            table = table.set_column(number, field, values.cast(field.type))
    return parquet_bytes(table)


def _conform(table: pa.Table, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    """The column of a field, in its type; nulls if the table has none."""
    if field.name not in table.column_names:
        return pa.nulls(len(table), field.type)
    return table.column(field.name).cast(field.type)
