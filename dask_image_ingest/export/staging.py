"""Staging: compute a frame once, gather its keys and offsets, and spill its other columns to files.

A task per partition returns the key, shard and offset of each row, and the offsets of its members
if the partition's read has scanned the shard. Columns for sidecars and members may exceed this
machine's memory, so each task writes them to the staging folder (`staged_tables`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.computing import compute
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset.plan import select_columns
from dask_image_ingest.dataset.references import references_of
from dask_image_ingest.dataset.schema import EDGES, METADATA_COLUMNS, PLACE, image_field
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export.files import (
    ExportContext,
    parquet_bytes,
    staged_name,
    table_from_bytes,
    table_to_bytes,
    write_batches,
)
from dask_image_ingest.export.locate import SourceShard, locate_in_task
from dask_image_ingest.export.member_selection import Row, as_table
from dask_image_ingest.export.members import PART_FIELD, ColumnMember, member_bytes
from dask_image_ingest.export.query import encoded_columns
from dask_image_ingest.export.stored_images import (
    refusing_parts,
    stored_extension,
    stored_files,
    stored_name,
    with_stored,
)
from dask_image_ingest.frames import (
    backend_of,
    image_columns,
    one_chunk,
    reference_columns,
    with_urls,
    without,
)
from dask_image_ingest.typedefs import AnyFrame, DataFrame
from dask_image_ingest.url_secrets import url_identity

# Most rows and bytes of a batch of staged columns, which is read as a whole.
_BATCH_ROWS = 4096
_BATCH_BYTES = 16 << 20

_BYTES = pd.ArrowDtype(pa.large_binary())


@dataclass(frozen=True)
class StagedRows:
    """The rows of a frame, in order."""

    #: ``key``, ``url`` (dictionary-encoded), ``offset``, ``nbytes`` and ``error``; ``part``,
    #: ``batch`` and ``row``, the location of the row's other columns in staged files;
    #: ``made:<extension>``, the size of each member from columns, null if the row has none;
    #: ``located``, and the columns `SELECTED` where that is true.
    rows: pa.Table
    #: Schema of the sidecars; None without sidecars.
    schema: pa.Schema | None
    #: Sources with located rows, by URL; None where partitions have read different versions.
    known: dict[str, SourceShard | None]


def columns_to_export(frame: AnyFrame) -> list[str]:
    """The columns of a frame for its sidecars: valid in other shards, and without a decode.

    All except images, references, columns of encoded images that were decoded, ``error``, and
    columns about images beside ``image``, such as ``mask.offset``.
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


def _of_other_images(columns: Iterable[Hashable], images: Iterable[str]) -> Iterator[str]:
    """Columns about images beside ``image``, even if these images were dropped."""
    names = [name for name in columns if isinstance(name, str)]
    stems = {name.removesuffix(".offset") for name in names if name.endswith(".offset")}
    others = {*images, *(stem for stem in stems if f"{stem}.nbytes" in names)} - {"image"}
    return (image_field(image, name) for image in others for name in METADATA_COLUMNS)


def stage_frame(frame: AnyFrame, context: ExportContext, columns: Sequence[str]) -> StagedRows:
    """Compute a frame, one task per partition: its metadata, and members from columns."""
    options = context.options
    members = options.members
    if members.copies_images:
        encoded = {name for member in members.pixels for name in member.needs}
        copied = [n for n in (*image_columns(frame), *reference_columns(frame)) if n not in encoded]
        frame = refusing_parts(frame, copied)
    frame = _named_index(frame)
    needed = ["__key__", "__url__", "offset", "nbytes", *members.columns, *options.part]
    images = [name for member in members.pixels for name in member.needs]
    wanted = [*columns, *images, *members.stored] if options.sidecar else needed
    wanted = [name for name in dict.fromkeys(wanted) if name in frame.columns]
    finds_bad = options.errors != "null" and "error" in frame.columns
    if finds_bad:
        wanted.append("error")
    frame = select_columns(frame, wanted)
    decoded = [name for name in members.stored if name in image_columns(frame)]
    if decoded:
        frame = with_stored(frame, decoded, finds_bad)
    staging = partial(_stage_partition, context=context)
    if isinstance(frame, FrameBase):
        meta = pd.DataFrame({"rows": pd.array([], dtype=_BYTES)})
        staged = frame.map_partitions(staging, meta=meta, enforce_metadata=False)
        # Optimized here, since `dask.compute` would not fuse reads with what follows them.
        (parts,) = compute(staged.optimize())
        empty = frame._meta
    else:
        parts, empty = staging(frame), frame[:0]
    tables = [table_from_bytes(part) for part in parts["rows"]]
    rows = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
    empty = without(empty, [*image_columns(empty), *reference_columns(empty)])
    schema = _sidecar_schema(empty, tables) if options.sidecar else None
    if schema is not None:
        with _told_of_unfit_columns():
            parquet_bytes(schema.empty_table())
    known: dict[str, SourceShard | None] = {}
    for table in tables:
        facts = json.loads(table.schema.metadata[b"source"])
        if facts is not None:
            source = SourceShard(**facts)
            before = known.setdefault(source.url, source)
            if before is None or before.version != source.version:
                known[source.url] = None
            elif source.renamed:
                known[source.url] = source
    return StagedRows(rows.replace_schema_metadata(None), schema, known)


def _named_index(frame: AnyFrame) -> AnyFrame:
    """Turn named index levels into columns, unless columns of these names exist."""
    names = {frame.index.name} if isinstance(frame, FrameBase) else {*frame.index.names}
    return frame if names == {None} else frame.reset_index(drop=names <= {*frame.columns})


def _stage_partition(frame: DataFrame, context: ExportContext) -> pd.DataFrame:
    """Write a partition's columns to a file of their own.

    Returns one row, the serialized table of `StagedRows`.
    """
    options = context.options
    metadata = without(frame, [*image_columns(frame), *reference_columns(frame)])
    with _told_of_unfit_columns():
        table = backend_of(frame).to_arrow(metadata).replace_schema_metadata(None)
    # Dictionaries may differ between partitions.
    table = _with_types(
        table, lambda type_: type_.value_type if pa.types.is_dictionary(type_) else type_
    )
    part = [table.column(name).cast(pa.int64()) for name in options.part]
    with_part = table.append_column(PART_FIELD, _part_json(table, part)) if part else table
    # In the new shard, the part is a whole image.
    table = table.drop_columns(options.part[: len(PLACE)])
    contents = {
        member.extension: member_bytes(
            with_part
            if member.pixels is None
            else backend_of(frame).to_arrow(member.encode(frame).to_frame()),
            member,
        )
        for member in options.members.from_columns
        if member.stored is None
    }
    for column, members in options.members.stored.items():
        contents |= _stored(frame, column, members, context.source_options)
    if options.members.main_pixels is not None:
        table = _with_shapes(table, frame, options.members.main_pixels)
    count = len(table)
    batch_rows = _rows_per_batch(contents.values())
    sizes = {name: pc.binary_length(data).cast(pa.int64()) for name, data in contents.items()}
    rows = {
        "key": table.column("__key__").cast(pa.string()),
        "url": _column(table, "__url__", pa.string()),
        "offset": _column(table, "offset", pa.int64()),
        "nbytes": _column(table, "nbytes", pa.int64()),
        "error": _column(table, "error", pa.string()),
        **dict(zip((*PLACE, *EDGES), part, strict=False)),
        "part": pa.nulls(count, pa.string()),
        "batch": pa.array(np.arange(count) // batch_rows, pa.int32()),
        "row": pa.array(np.arange(count) % batch_rows, pa.int32()),
        **{f"made:{name}": values for name, values in sizes.items()},
    }
    if not options.has_samples:
        rows |= {"url": pa.array([""] * count, pa.string()), "offset": pa.nulls(count, pa.int64())}
    rows["url"] = rows["url"].dictionary_encode()
    columns = table.select([n for n in table.column_names if options.sidecar and n != "error"])
    sidecar_schema = columns.schema
    for extension, data in contents.items():
        columns = columns.append_column(f"made:{extension}", data)
    if count and columns.num_columns:
        name = staged_name("columns")
        # A batch may have more than 2 GiB of strings and bytes: 64-bit offsets.
        large = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
        columns = _with_types(columns, lambda type_: large.get(type_, type_))
        batches = (columns.slice(start, batch_rows) for start in range(0, count, batch_rows))
        write_batches(context.output, name, columns.schema, batches)
        rows["part"] = pa.array([name] * count, pa.string())
    rows["part"] = rows["part"].dictionary_encode()
    staged = pa.table(rows)
    located = locate_in_task(staged, context)
    source, selected = located or (None, as_table([Row()] * count))
    for column in selected.column_names:
        staged = staged.append_column(column, selected.column(column))
    staged = staged.append_column("located", pa.array([located is not None] * count))
    metadata = {
        "columns": sidecar_schema.serialize().to_pybytes(),
        "source": json.dumps(source and asdict(source)),
    }
    staged = table_to_bytes(staged.replace_schema_metadata(metadata))
    return pd.DataFrame({"rows": pd.array([staged], dtype=_BYTES)})


def _part_json(table: pa.Table, part: Sequence[pa.ChunkedArray]) -> pa.Array:
    """The part of its picture that each image is; null for a whole one."""
    urls = with_urls(
        table.select(["__url__"] if "__url__" in table.column_names else []), url_identity
    )
    fields = {"key": table.column("__key__"), "shard": _column(urls, "__url__", pa.string())}
    fields |= zip((*PLACE, *EDGES), part, strict=True)
    arrays = [one_chunk(values) for values in fields.values()]
    return pa.StructArray.from_arrays(arrays, [*fields], mask=pc.is_null(arrays[-1]))


def _stored(
    frame: DataFrame,
    column: str,
    members: Sequence[ColumnMember],
    storage_options: dict[str, Any] | None,
) -> dict[str, pa.Array]:
    """Extension → the stored images of a column that become this member, null for other rows."""
    name = stored_name(column)
    references = references_of(frame, name if name in frame.columns else column)
    files = stored_files(references, storage_options)
    extensions = [None if file is None else stored_extension(file) for file in files]
    return {
        member.extension: pa.array(
            [
                file if member.stored in ("", extension) else None
                for file, extension in zip(files, extensions, strict=True)
            ],
            pa.large_binary(),
        )
        for member in members
    }


@contextmanager
def _told_of_unfit_columns() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ArgumentError(
            f"a column holds values that no parquet file can have ({error}): make them numbers, "
            "text, times, bytes, or lists and structs of these; or leave out the column"
        ) from error


def _with_types(table: pa.Table, change: Callable[[pa.DataType], pa.DataType]) -> pa.Table:
    return table.cast(pa.schema([field.with_type(change(field.type)) for field in table.schema]))


def _with_shapes(table: pa.Table, frame: DataFrame, member: ColumnMember) -> pa.Table:
    """Update the columns about the image for the encoded pixels that replace it."""
    images = backend_of(frame).arrays(frame[member.columns])
    columns: dict[str, list[Any]] = {
        name: [None if image is None else image.shape[axis] for image in images]
        for axis, name in enumerate(("height", "width", "channels"))
    }
    columns["format"] = [None if image is None else member.format for image in images]
    for name, values in columns.items():
        number = table.schema.get_field_index(name)
        if number >= 0:
            type_ = table.schema.field(number).type
            table = table.set_column(number, name, pa.array(values, type_))
    return table


def _rows_per_batch(contents: Iterable[pa.Array]) -> int:
    """Rows of a batch: fewer if members are large."""
    mean = sum(array.nbytes / max(len(array), 1) for array in contents)
    return max(1, min(_BATCH_ROWS, int(_BATCH_BYTES / max(mean, 1))))


def _column(table: pa.Table, name: str, type_: pa.DataType) -> Any:
    if name not in table.column_names:
        return pa.nulls(len(table), type_)
    values = table.column(name)
    try:
        return values.cast(type_)
    except pa.ArrowException:
        raise ArgumentError(
            f"the column {name!r} is of type {values.type}, and some of its values don't fit type "
            f"{type_}: it must be as the read gave it, or absent"
        ) from None


def _sidecar_schema(empty: DataFrame, tables: Sequence[pa.Table]) -> pa.Schema:
    """Common schema of the partitions, with pandas' metadata."""
    schemas = [
        pa.ipc.read_schema(pa.py_buffer(table.schema.metadata[b"columns"])) for table in tables
    ]
    # Not those of empty partitions, whose types may be arbitrary.
    nonempty = [schema for schema, table in zip(schemas, tables, strict=True) if len(table)]
    schema = pa.unify_schemas(nonempty or schemas[:1], promote_options="permissive")
    pandas = backend_of(empty).to_arrow(empty).schema.metadata or {}
    return schema.with_metadata({b"pandas": pandas[b"pandas"]} if b"pandas" in pandas else None)
