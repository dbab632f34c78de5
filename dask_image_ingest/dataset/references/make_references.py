"""Make references from columns that locate encoded images, or that hold them."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.plan.columns import MapColumns
from dask_image_ingest.dataset.schema.columns import EDGES, PLACE, part_columns
from dask_image_ingest.dataset.schema.file_columns import check_encoded_type, encoded_bytes
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import (
    REFERENCE,
    backend_of,
    is_number,
    is_text,
    references_of_fields,
)
from dask_image_ingest.typedefs import DataFrame

#: The columns that locate an image: shard, offset and size.
LOCATION_COLUMNS = ("__url__", "offset", "nbytes")

_KEY = "__key__"


def add_references(frame: DataFrame, image: str, error: str | None) -> DataFrame:
    """Add references from the columns `LOCATION_COLUMNS` to a pandas or cuDF frame."""
    return backend_of(frame).with_references(frame, references_of_locations(frame), image, error)


def with_encoded(frame: DataFrame, encoded: Hashable, image: str, error: str | None) -> DataFrame:
    """Add references that carry the encoded images of a column of a pandas or cuDF frame."""
    references = references_of_bytes(frame, encoded)
    return backend_of(frame).with_references(frame, references, image, error)


def point_to_images(rows: dx.Expr, image: str, error: str | None) -> dx.Expr:
    """Lazy `add_references`."""
    inputs = tuple(location_columns(rows.columns))
    return MapColumns(rows, add_references, (image, error), inputs, image, error)


def carry_images(rows: dx.Expr, encoded: Hashable, image: str, error: str | None) -> dx.Expr:
    """Lazy `with_encoded`."""
    outputs = (image,) if error is None else (image, error)
    return MapColumns(rows, with_encoded, outputs, (encoded, _KEY), encoded, image, error)


def adds_references(expr: dx.Expr) -> bool:
    """True for the expression of `point_to_images`."""
    return isinstance(expr, MapColumns) and expr.function is add_references


def encoded_by(expr: dx.Expr) -> Any | None:
    """The column of encoded images behind an expression of `carry_images`; else None."""
    carries = isinstance(expr, MapColumns) and expr.function is with_encoded
    return expr.inputs[0] if carries else None


def location_columns(columns: Collection[Any]) -> dict[str, str]:
    """The columns that locate an image, or the part of it that it is: field of the reference.

    The key identifies an image whose offset is null.
    """
    names = {name: name.strip("_") for name in (*LOCATION_COLUMNS, _KEY) if name in columns}
    part = part_columns(columns).get("image", ())
    return names | dict(zip(part, (*PLACE, *EDGES), strict=False))


def references_of_locations(frame: DataFrame) -> pa.StructArray:
    """References from the columns `LOCATION_COLUMNS`; without a version of the shard.

    They are to the parts that the columns of ``images.tiles`` tell, if the frame has them.

    Raises
    ------
    ArgumentError
        If the columns can't be converted to the types that the reader gives them.
    """
    fields = {}
    for name, field in location_columns(frame.columns).items():
        kind = "strings" if name.startswith("__") else "whole numbers"
        try:
            column = backend_of(frame).to_arrow(frame[[name]]).column(0).combine_chunks()
            fields[field] = _converted(column, kind)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise ArgumentError(
                f"the column {name!r} of the frame is of type {frame[name].dtype}: decode_images "
                f"needs {kind}, as read_webdataset_images gives them"
            ) from error
    return references_of_fields(len(frame), fields)


def _converted(column: pa.Array, kind: str) -> pa.Array:
    """Cast to the type that the reader gives: a merge, for example, makes floats of integers."""
    if kind == "strings":
        is_right = is_text(column.type) or pa.types.is_dictionary(column.type)
        target = pa.string()
    else:
        is_right, target = is_number(column.type), pa.int64()
    if not is_right and not pa.types.is_null(column.type):
        raise TypeError(column.type)
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
    return column.cast(target)


def check_encoded(meta: DataFrame, column: Hashable) -> None:
    """Raise `ArgumentError` if the column does not exist or can't hold encoded images."""
    if column not in meta.columns:
        raise ArgumentError(f"image={column!r}: the frame has {', '.join(map(repr, meta.columns))}")
    references_of_bytes(meta.iloc[:0], column)


def references_of_bytes(frame: DataFrame, column: Hashable) -> pa.ChunkedArray:
    """References that carry the encoded images of a column, without a copy.

    The key is the row's ``__key__``, or else the path in the struct. A row without bytes decodes to
    the error "missing": a path alone is not opened.

    Raises
    ------
    ArgumentError
        If the column holds no encoded images.
    """
    names = [column, *({_KEY} & set(frame.columns) - {column})]
    try:
        table = backend_of(frame).to_arrow(frame[names])
        check_encoded_type(table.schema.field(0).type)
        chunks = [_references(*batch.columns) for batch in table.to_batches()]
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ArgumentError(
            f"the column {column!r} of the frame holds no encoded images ({error}): it needs "
            "bytes, or structs of bytes and path as Hugging Face has them. Dask makes text of "
            "Python objects: give the column an Arrow type, astype(pd.ArrowDtype(pa.binary()))"
        ) from error
    return pa.chunked_array(chunks, REFERENCE)


def _references(encoded: pa.Array, keys: pa.Array | None = None) -> pa.StructArray:
    if keys is None and pa.types.is_struct(encoded.type) and "path" in encoded.type.names:
        keys = pc.struct_field(encoded, "path")
    data = encoded_bytes(encoded)
    fields = {"nbytes": pc.binary_length(data), "bytes": data}
    if keys is not None and (is_text(keys.type) or pa.types.is_string_view(keys.type)):
        fields["key"] = keys
    return references_of_fields(len(data), fields)
