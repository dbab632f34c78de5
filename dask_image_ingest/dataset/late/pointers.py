"""References from the columns of a read that say where each encoded image is."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import REFERENCE, backend_of

__all__ = ["POINTER", "references_of_pointers"]

#: The columns that an image is found by.
POINTER = ("__url__", "offset", "nbytes")

_FIELDS = {"url": "__url__", "key": "__key__", "offset": "offset", "nbytes": "nbytes"}


def references_of_pointers(frame: Any) -> pa.StructArray:
    """A reference for each row of a pandas or cuDF frame; they name no version of the shard.

    Raises
    ------
    ArgumentError
        If a column holds something else than the reader gives.
    """
    names = [name for name in (*POINTER, "__key__") if name in frame.columns]
    try:
        table = backend_of(frame).to_arrow(frame[names])
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise ArgumentError(
            f"the columns {', '.join(names)} of the frame are not those of read_webdataset_images: "
            f"{error}"
        ) from error
    table = _checked(table)
    fields = [
        table.column(name).combine_chunks()
        if (name := _FIELDS.get(field.name)) in table.column_names
        else pa.nulls(len(table), field.type)
        for field in REFERENCE
    ]
    return pa.StructArray.from_arrays(fields, fields=list(REFERENCE))


def _checked(table: pa.Table) -> pa.Table:
    """Pointer columns in the types that the reader gives them: a merge makes floats of integers."""
    for name in table.column_names:
        column = table.column(name)
        try:
            column = _as_text(column) if name.startswith("__") else _as_places(column)
        except (pa.ArrowException, TypeError):
            kind = "strings" if name.startswith("__") else "whole numbers"
            raise ArgumentError(
                f"the column {name!r} of the frame is of type {column.type}: decode_images needs "
                f"{kind}, as read_webdataset_images gives them"
            ) from None
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def _as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_null, pa.types.is_dictionary)
    if not any(kind(column.type) for kind in kinds):
        raise TypeError
    return column.cast(pa.string())


def _as_places(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_null)
    if not any(kind(column.type) for kind in kinds):
        raise TypeError
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
    return column.cast(pa.int64())
