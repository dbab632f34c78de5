"""Conversion of Arrow types and arrays to those that cuDF supports, and back."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames.arrow_types import bytes_of, is_byte_list, is_bytes, is_list, is_text

# Most digits of a decimal in cuDF.
_MAX_DIGITS = 38


def holds(type_: pa.DataType) -> bool:
    """True if cuDF supports this type, directly or after conversion."""
    return _stored(type_) is not None


def stored(type_: pa.DataType) -> pa.DataType:
    """Type in which cuDF stores values of ``type_``.

    Bytes become lists of uint8, dates timestamps, half floats float32, and times with a zone
    timestamps in UTC.

    Raises
    ------
    TypeError
        For a type without a substitute: times of day, maps, decimals of many digits.
    """
    substitute = _stored(type_)
    if substitute is None:
        raise TypeError(f"cuDF has no type for {type_}")
    return substitute


def stored_types(types: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """`stored` types of columns.

    Raises
    ------
    ArgumentError
        For a type without a substitute.
    """
    for name, type_ in types.items():
        if not holds(type_):
            raise ArgumentError(
                f"column {name!r} is of type {type_}, for which cuDF has none: say another type, "
                "leave the column out, or pass backend='pandas'"
            )
    return {name: stored(type_) for name, type_ in types.items()}


def as_stored(array: pa.Array) -> pa.Array:
    """Convert a column to its `stored` type."""
    type_ = array.type
    if is_bytes(type_) or pa.types.is_fixed_size_binary(type_):
        return _byte_lists(array.cast(pa.binary()))
    if pa.types.is_struct(type_):
        children = [as_stored(child) for child in array.flatten()]
        return pa.StructArray.from_arrays(children, type_.names, mask=array.is_null())
    if pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_):
        array = array.cast(pa.list_(type_.value_type))
    if pa.types.is_list(array.type):
        return _with_values(array, as_stored(array.values))
    if pa.types.is_dictionary(type_):
        return as_stored(array.dictionary_decode())
    return array.cast(stored(type_))


def with_bytes(array: pa.Array) -> pa.Array:
    """Convert lists of uint8 back to bytes, also inside lists and structs."""
    if pa.types.is_struct(array.type):
        children = [with_bytes(child) for child in array.flatten()]
        return pa.StructArray.from_arrays(children, array.type.names, mask=array.is_null())
    if not pa.types.is_list(array.type):
        return array
    if is_byte_list(array.type):
        return bytes_of(array)
    return _with_values(array, with_bytes(array.values))


def _with_values(lists: pa.Array, values: pa.Array) -> pa.Array:
    return pa.Array.from_buffers(
        pa.list_(values.type),
        len(lists),
        lists.buffers()[:2],
        offset=lists.offset,
        children=[values],
    )


def _stored(type_: pa.DataType) -> pa.DataType | None:
    if is_bytes(type_) or pa.types.is_fixed_size_binary(type_):
        return pa.list_(pa.uint8())
    if pa.types.is_struct(type_):
        fields = [(field.name, _stored(field.type)) for field in type_]
        return None if any(stored is None for _, stored in fields) else pa.struct(fields)
    if is_list(type_) or pa.types.is_fixed_size_list(type_):
        value = _stored(type_.value_type)
        return None if value is None else pa.list_(value)
    if pa.types.is_dictionary(type_):
        return _stored(type_.value_type)
    if pa.types.is_timestamp(type_):
        return pa.timestamp(type_.unit)
    if pa.types.is_date(type_):
        # As cuDF does, but it needs a GPU even for no rows.
        return pa.timestamp("s" if pa.types.is_date32(type_) else "ms")
    if pa.types.is_decimal256(type_):
        fits = type_.precision <= _MAX_DIGITS
        return pa.decimal128(type_.precision, type_.scale) if fits else None
    if pa.types.is_float16(type_):
        return pa.float32()
    if pa.types.is_null(type_) or pa.types.is_string_view(type_):
        return pa.string()
    return type_ if any(is_kind(type_) for is_kind in _SUPPORTED) else None


_SUPPORTED = (
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_duration,
    is_text,
)


def _byte_lists(array: pa.Array) -> pa.Array:
    """View bytes as lists of uint8, which have the same layout in memory."""
    validity, offsets, data = array.buffers()
    data = data or pa.py_buffer(b"")
    values = pa.Array.from_buffers(pa.uint8(), data.size, [None, data])
    return pa.Array.from_buffers(
        pa.list_(pa.uint8()),
        len(array),
        [validity, offsets or pa.py_buffer(bytes(4))],
        offset=array.offset,
        children=[values],
    )
