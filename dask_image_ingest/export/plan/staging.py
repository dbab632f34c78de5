"""Staging: compute a frame once, gather its pointers, and spill its other columns to files.

A task for each partition returns the key, shard and offset of each row, and the location of its
members if the task knows it. Columns for sidecars and members may be larger than this machine's
memory, so each task writes them to the staging folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.computing import compute
from dask_image_ingest.dask_internals import FrameBase, new_collection
from dask_image_ingest.dataset import POINTER_COLUMNS, ReadWebDataset, image_field, references_of
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export.members import Made, member_bytes
from dask_image_ingest.export.options import ExportContext, staged_name
from dask_image_ingest.export.plan.locate import Located, LocatedCache, locate_in_task
from dask_image_ingest.export.query import encoded_columns
from dask_image_ingest.export.staged_tables import from_bytes, to_bytes, write_batches
from dask_image_ingest.export.stored_images import (
    extension_of,
    stored_files,
    stored_name,
    with_stored,
)
from dask_image_ingest.frames import backend_of, image_columns, reference_columns
from dask_image_ingest.index import parquet_bytes

_POINTER = ("__key__", "__url__", "offset")

# A batch is what is read at once to have one of its rows.
_ROWS = 4096
_BATCH_BYTES = 16 << 20

_BYTES = pd.ArrowDtype(pa.large_binary())


@dataclass(frozen=True)
class StagedRows:
    """The rows of a frame, in order.

    ``rows`` has the columns ``key``, ``url`` (a dictionary), ``offset``, ``nbytes``, ``error``,
    ``part``, ``batch`` and ``row`` (where the other columns of this row are), and for each member
    that is made its size, as ``made:<extension>``. ``schema`` is that of the sidecars, None where
    there are none. ``known`` has the rows whose members are located already.
    """

    rows: pa.Table
    schema: pa.Schema | None
    known: LocatedCache


def metadata_columns(frame: Any) -> list[str]:
    """The columns of a frame that stay true in other shards, and cost no decoding.

    All but images, references, columns of encoded images that were decoded, ``error``, and what is
    known of images beside ``image``, such as ``mask.offset``.

    Raises
    ------
    ArgumentError
        If the frame has no keys.
    """
    encoded = encoded_columns(frame)
    empty = _named_index(frame)
    empty = empty._meta if isinstance(empty, FrameBase) else empty
    images = [*image_columns(empty), *reference_columns(empty)]
    left_out = {"error", *images, *encoded, *_of_other_images(empty.columns, images)}
    columns = [name for name in empty.columns if name not in left_out]
    if "__key__" not in columns:
        raise ArgumentError(
            "the frame has no column '__key__', which names the samples: make one, such as "
            "assign(__key__=...)"
        )
    odd = [name for name in columns if not isinstance(name, str)]
    if odd or len(set(columns)) < len(columns):
        raise ArgumentError(f"the frame has columns that are no names, or not unique: {columns}")
    return columns


def _of_other_images(columns: Iterable[Any], images: Iterable[str]) -> Iterator[str]:
    """Columns that tell of images beside ``image``, also where these were dropped."""
    names = [name for name in columns if isinstance(name, str)]
    pointed = {name.removesuffix(".offset") for name in names if name.endswith(".offset")}
    others = {*images, *(name for name in pointed if f"{name}.nbytes" in names)} - {"image"}
    return (image_field(image, name) for image in others for name in POINTER_COLUMNS)


def stage_frame(
    frame: Any, context: ExportContext, columns: Sequence[str], show: bool
) -> StagedRows:
    """Compute a frame without its pixels."""
    frame = _named_index(frame)
    options = context.options
    members = options.members
    needed = [*_POINTER, *members.columns, "nbytes"]
    images = [name for made in members.made if made.pixels for name in made.needs]
    wanted = [*columns, *images, *members.stored] if options.sidecar else needed
    wanted = [name for name in dict.fromkeys(wanted) if name in frame.columns]
    if options.drop_bad_images:
        if "error" not in frame.columns:
            raise ArgumentError("the frame has no column 'error', which names the bad images")
        wanted.append("error")
    frame = frame[wanted]
    decoded = [name for name in members.stored if name in image_columns(frame)]
    if decoded:
        frame = with_stored(frame, decoded, options.drop_bad_images)
    staging = partial(_stage_partition, context=context)
    if isinstance(frame, FrameBase):
        meta = pd.DataFrame({name: pd.array([], dtype=_BYTES) for name in ("rows", "located")})
        frame = _keeping_walks(frame)
        staged = frame.map_partitions(staging, meta=meta, enforce_metadata=False)
        # Optimised by itself, since dask fuses no read with what follows it in `dask.compute`.
        parts = compute(staged.optimize(), show)
        empty = frame._meta
    else:
        parts, empty = staging(frame), frame[:0]
    tables = [from_bytes(part) for part in parts["rows"]]
    rows = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
    empty = empty.drop(columns=[*image_columns(empty), *reference_columns(empty)])
    schema = _sidecar_schema(empty, tables) if options.sidecar else None
    for field in schema or ():
        try:
            parquet_bytes(pa.schema([field]).empty_table())
        except pa.ArrowException as error:
            raise _unfit(field.name, error) from error
    known = LocatedCache()
    first = 0
    for table, located in zip(tables, parts["located"], strict=True):
        if located:
            known.add(first, Located.from_bytes(located))
        first += len(table)
    return StagedRows(rows.replace_schema_metadata(None), schema, known)


def _keeping_walks(frame: Any) -> Any:
    """A frame whose reads leave what they walk through for the next step of their task."""
    expr = frame.expr
    for read in expr.find_operations(ReadWebDataset):
        expr = expr.substitute(read, read.substitute_parameters({"keeps_scan": True}))
    return new_collection(expr)


def _named_index(frame: Any) -> Any:
    """A frame whose index is a column, if it has a name that no column has."""
    index = frame.index
    names = [index.name] if isinstance(frame, FrameBase) else list(index.names)
    if names == [None]:
        return frame
    there = [name for name in names if name in frame.columns]
    if len(there) == len(names):
        return frame.reset_index(drop=True)
    return (frame.reset_index(level=there, drop=True) if there else frame).reset_index()


def _stage_partition(frame: Any, context: ExportContext) -> pd.DataFrame:
    """Write a partition's columns to a file of their own; give its pointers."""
    options = context.options
    metadata = frame.drop(columns=[*image_columns(frame), *reference_columns(frame)])
    table = _without_dictionaries(_to_arrow(metadata).replace_schema_metadata(None))
    made = {
        made.extension: member_bytes(
            table
            if made.pixels is None
            else backend_of(frame).to_arrow(made.encode(frame).to_frame()),
            made,
        )
        for made in options.members.made
        if made.stored is None
    }
    for column, members in options.members.stored.items():
        made |= _stored(frame, column, members, context.source_options)
    if options.members.picture is not None:
        table = _with_shapes(table, frame, options.members.picture)
    count = len(table)
    batch_rows = _rows_of_a_batch(made.values())
    rows = {
        "key": table.column("__key__").cast(pa.string()),
        "url": _column(table, "__url__", pa.string()),
        "offset": _column(table, "offset", pa.int64()),
        "nbytes": _column(table, "nbytes", pa.int64()),
        "error": _column(table, "error", pa.string()),
        "part": pa.nulls(count, pa.string()),
        "batch": pa.array(np.arange(count) // batch_rows, pa.int32()),
        "row": pa.array(np.arange(count) % batch_rows, pa.int32()),
        **{f"made:{name}": pc.binary_length(data).cast(pa.int64()) for name, data in made.items()},
    }
    if not options.has_samples:
        rows |= {"url": pa.array([""] * count), "offset": pa.nulls(count, pa.int64())}
    rows["url"] = rows["url"].dictionary_encode()
    kept = table.select([])
    if options.sidecar:
        kept = table.drop_columns([n for n in ("error",) if n in table.column_names])
    columns = kept.schema
    for extension, data in made.items():
        kept = kept.append_column(f"made:{extension}", data)
    if count and kept.num_columns:
        name = staged_name("columns")
        kept = _with_large_values(kept)
        write_batches(context.output, name, kept.schema, _batches(kept, batch_rows))
        rows["part"] = pa.array([name] * count, pa.string())
    rows["part"] = rows["part"].dictionary_encode()
    described = pa.table(rows).replace_schema_metadata(
        {"columns": columns.serialize().to_pybytes()}
    )
    located = locate_in_task(described, context)
    told = {"rows": to_bytes(described), "located": located.to_bytes() if located else b""}
    return pd.DataFrame({name: pd.array([data], dtype=_BYTES) for name, data in told.items()})


def _stored(
    frame: Any,
    column: str,
    members: Sequence[Made],
    storage_options: dict[str, Any] | None,
) -> dict[str, pa.Array]:
    """The stored images of a column, for each of the members that they become."""
    name = stored_name(column)
    references = references_of(frame, name if name in frame.columns else column)
    files = stored_files(references, storage_options)
    kinds = [None if file is None else extension_of(file) for file in files]
    return {
        made.extension: pa.array(
            [
                file if made.stored in ("", kind) else None
                for file, kind in zip(files, kinds, strict=True)
            ],
            pa.large_binary(),
        )
        for made in members
    }


def _to_arrow(frame: Any) -> pa.Table:
    backend = backend_of(frame)
    try:
        return backend.to_arrow(frame)
    except (pa.ArrowException, TypeError, ValueError) as error:
        for name in frame.columns:
            try:
                backend.to_arrow(frame[[name]])
            except (pa.ArrowException, TypeError, ValueError) as why:
                raise _unfit(name, why) from error
        raise


def _unfit(name: str, error: Exception) -> ArgumentError:
    return ArgumentError(
        f"the column {name!r} holds values that no parquet file can have ({error}): make them "
        "numbers, text, times, bytes, or lists and structs of these; or leave out the column"
    )


def _with_shapes(table: pa.Table, frame: Any, made: Made) -> pa.Table:
    """The columns that tell of a stored image, as they are for the one that takes its place."""
    shapes = [
        (None, None, None) if image is None else image.shape
        for image in backend_of(frame).arrays(frame[made.columns])
    ]
    told: dict[str, list[Any]] = {
        name: [shape[axis] for shape in shapes]
        for axis, name in enumerate(("height", "width", "channels"))
    }
    told["format"] = [None if shape[0] is None else made.format for shape in shapes]
    for name, values in told.items():
        number = table.schema.get_field_index(name)
        if number >= 0:
            type_ = table.schema.field(number).type
            table = table.set_column(number, name, pa.array(values, type_))
    return table


def _rows_of_a_batch(made: Iterable[pa.Array]) -> int:
    """Rows that are read together to have one of them: fewer where members are large."""
    arrays = list(made)
    mean = sum(array.nbytes for array in arrays) / max(len(arrays[0]), 1) if arrays else 0
    return max(1, min(_ROWS, int(_BATCH_BYTES / max(mean, 1))))


def _batches(table: pa.Table, rows: int) -> Iterator[pa.RecordBatch]:
    """Each of as many rows, however the table is cut into chunks."""
    for start in range(0, len(table), rows):
        yield table.slice(start, rows).combine_chunks().to_batches()[0]


def _with_large_values(table: pa.Table) -> pa.Table:
    """A table of whose text and bytes a batch can have more than the 2 GiB of a small array."""
    large = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
    fields = [field.with_type(large.get(field.type, field.type)) for field in table.schema]
    return table.cast(pa.schema(fields))


def _column(table: pa.Table, name: str, type_: pa.DataType) -> Any:
    there = name in table.column_names
    return table.column(name).cast(type_) if there else pa.nulls(len(table), type_)


def _without_dictionaries(table: pa.Table) -> pa.Table:
    """A table whose categories are values, since each partition may number them otherwise."""
    for number, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            values = table.column(number).cast(field.type.value_type)
            table = table.set_column(number, field.name, values)
    return table


def _sidecar_schema(empty: Any, tables: Sequence[pa.Table]) -> pa.Schema:
    """Common schema of the partitions, with pandas' metadata."""
    found = [
        pa.ipc.read_schema(pa.py_buffer(table.schema.metadata[b"columns"])) for table in tables
    ]
    there = [schema for schema, table in zip(found, tables, strict=True) if len(table)]
    schema = pa.unify_schemas(there or found[:1], promote_options="permissive")
    pandas = backend_of(empty).to_arrow(empty).schema.metadata or {}
    return schema.with_metadata({b"pandas": pandas[b"pandas"]} if b"pandas" in pandas else None)
