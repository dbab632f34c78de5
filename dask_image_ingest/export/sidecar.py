"""A shard's samples → the table beside it: every metadata column, pointing to the new shard."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from dask_image_ingest.export.layout import Layout

__all__ = ["sidecar", "table_bytes"]


def sidecar(
    columns: pa.Table, schema: pa.Schema, layout: Layout, shapes: pa.Table, url: str
) -> bytes:
    """The columns of a shard's samples as a parquet file.

    ``__url__``, ``offset`` and ``nbytes`` are those of the image in the shard at ``url``, null
    where a sample has none; with them ``decode_images`` finds it. Of an image that was encoded anew
    (``shapes`` has heights and widths, null for all others), columns of its shape tell the new one.
    """
    columns = _reshaped(columns, shapes)
    table = pa.table([_conform(columns, field) for field in schema], schema=schema)
    # There is no sample without members, so that some member stands in for an image that is none.
    absent = layout.images < 0
    pointers = {
        "__url__": pa.array([url] * len(table), pa.string()),
        "offset": pa.array(layout.places[layout.images], pa.int64(), mask=absent),
        "nbytes": pa.array(layout.sizes[layout.images], pa.int64(), mask=absent),
    }
    for name, values in pointers.items():
        number = schema.get_field_index(name)
        if number < 0:
            table = table.append_column(name, values)
        else:
            field = schema.field(number)
            table = table.set_column(number, field, values.cast(field.type))
    return table_bytes(table)


def table_bytes(table: pa.Table) -> bytes:
    """A table as a parquet file; the same table gives the same bytes."""
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd", row_group_size=len(table) or None)
    return sink.getvalue().to_pybytes()


def _reshaped(columns: pa.Table, shapes: pa.Table) -> pa.Table:
    """The columns with the shapes of the images that were encoded anew."""
    anew = pc.is_valid(shapes.column("height"))
    new = {
        "height": shapes.column("height"),
        "width": shapes.column("width"),
        "channels": pa.scalar(3),
        "format": pa.scalar("jpeg"),
    }
    if not pc.any(anew).as_py():
        return columns
    for name, values in new.items():
        number = columns.schema.get_field_index(name)
        if number >= 0:
            values = values.cast(columns.schema.field(number).type)
            values = pc.if_else(anew, values, columns.column(number))
            columns = columns.set_column(number, name, values)
    return columns


def _conform(table: pa.Table, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    if field.name not in table.column_names:
        return pa.nulls(len(table), field.type)
    return table.column(field.name).cast(field.type)
