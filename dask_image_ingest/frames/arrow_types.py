"""Arrow types: predicates, the names that users write, and the values of nested columns."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.typedefs import TypeLike

_PYTHON_TYPES: dict[object, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
}

# Arrow's names of floats, and ours.
_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}

# With or without the name of the items, which Arrow includes.
_LIST = re.compile(r"(large_)?list<(?:\w+: )?")
_STRUCT = re.compile(r"struct<")
_PLAIN_FIELD = re.compile(r"\w+", re.ASCII)
_LEAF = re.compile(r"\w+(\[[^\]]*\]|\([^)]*\))?")
_WITH_ZONE = re.compile(r"timestamp\[(\w+), tz=(.+)\]")
_WITH_SHAPE = re.compile(r"(\w+)\[(\d+(?:, ?\d+)*)\]")
_DECIMAL = re.compile(r"decimal(32|64|128|256)\((\d+), ?(-?\d+)\)")


def parse_type(type_: TypeLike) -> pa.DataType:
    """Arrow type for an Arrow type, a name, or a type of Python or NumPy."""
    if isinstance(type_, pa.DataType):
        return type_
    if isinstance(type_, str):
        return tensor_type(named := named_type(type_)) or named
    if type_ in _PYTHON_TYPES:
        return _PYTHON_TYPES[type_]
    if isinstance(type_, np.dtype) or (isinstance(type_, type) and issubclass(type_, np.generic)):
        return pa.from_numpy_dtype(type_)
    raise TypeError(f"{type_!r} is no type")


def is_text(type_: pa.DataType) -> bool:
    """True for string types."""
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def is_bytes(type_: pa.DataType) -> bool:
    """True for binary types of variable length."""
    return bool(pa.types.is_binary(type_) or pa.types.is_large_binary(type_))


def is_number(type_: pa.DataType) -> bool:
    """True for integers and floats."""
    return bool(pa.types.is_integer(type_) or pa.types.is_floating(type_))


def is_value(type_: pa.DataType) -> bool:
    """True for numbers and booleans."""
    return is_number(type_) or bool(pa.types.is_boolean(type_))


def is_list(type_: pa.DataType) -> bool:
    """True for lists of variable length."""
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_))


def is_any_list(type_: pa.DataType) -> bool:
    """True for lists of variable or fixed length."""
    return is_list(type_) or bool(pa.types.is_fixed_size_list(type_))


def has_type(type_: pa.DataType, is_wanted: Callable[[pa.DataType], bool]) -> bool:
    """True if a type, or one within it, is wanted."""
    fields = (type_.field(number).type for number in range(type_.num_fields))
    return is_wanted(type_) or any(has_type(field, is_wanted) for field in fields)


def nesting(type_: pa.DataType) -> tuple[int, pa.DataType]:
    """Number of nested lists, also of fixed size, or dimensions, and the type of the values."""
    if (tensor := tensor_type(type_)) is not None:
        return len(tensor.shape), tensor.value_type
    depth = 0
    while is_any_list(type_):
        depth, type_ = depth + 1, type_.value_type
    return depth, type_


def tensor_type(type_: pa.DataType) -> pa.FixedShapeTensorType | None:
    """Arrow's tensor type for arrays of one shape; None for other types.

    These are tensors, and lists of fixed size, also nested, of numbers.
    """
    if isinstance(type_, pa.FixedShapeTensorType):
        in_order = type_.permutation is None or type_.permutation == sorted(type_.permutation)
        return pa.fixed_shape_tensor(type_.value_type, type_.shape) if in_order else None
    shape = []
    while pa.types.is_fixed_size_list(type_):
        shape.append(type_.list_size)
        type_ = type_.value_type
    is_tensor = shape and all(shape) and is_number(type_)
    return pa.fixed_shape_tensor(type_, shape) if is_tensor else None


def list_sizes(type_: pa.DataType) -> list[int | None]:
    """Length of the lists of each level, or of each dimension of a tensor; None for any."""
    if (tensor := tensor_type(type_)) is not None:
        return list(tensor.shape)
    sizes: list[int | None] = []
    while is_any_list(type_):
        sizes.append(None if is_list(type_) else type_.list_size)
        type_ = type_.value_type
    return sizes


def as_lists(type_: pa.DataType) -> pa.DataType:
    """Nested lists of fixed size for a tensor type; any other type unchanged."""
    if not isinstance(type_, pa.FixedShapeTensorType):
        return type_
    lists = type_.value_type
    for length in reversed(type_.shape):
        lists = pa.list_(lists, length)
    return lists


def is_byte_list(type_: pa.DataType) -> bool:
    """True for lists of uint8, which cuDF has instead of bytes."""
    return is_list(type_) and type_.value_type == pa.uint8()


def bytes_of(lists: pa.Array) -> pa.Array:
    """Convert lists of uint8 to bytes, without a copy."""
    if pa.types.is_null(lists.type):
        # cuDF's type for a column of lists that are all null.
        return pa.nulls(len(lists), pa.binary())
    values = lists.values
    if values.null_count:
        raise pa.ArrowInvalid("an image has nulls among its bytes")
    validity, offsets = lists.buffers()[:2]
    data = values.buffers()[1] or pa.py_buffer(b"")
    kind = pa.large_binary() if pa.types.is_large_list(lists.type) else pa.binary()
    buffers = [validity, offsets, data.slice(values.offset)]
    return pa.Array.from_buffers(kind, len(lists), buffers, offset=lists.offset)


def type_name(type_: pa.DataType) -> str:
    """Name of a type, for `named_type`; Arrow's own name if that does not know the type."""
    if is_list(type_):
        kind = "list" if pa.types.is_list(type_) else "large_list"
        return f"{kind}<{type_name(type_.value_type)}>"
    if pa.types.is_struct(type_):
        fields = (f"{_field_name(field.name)}: {type_name(field.type)}" for field in type_)
        return f"struct<{', '.join(fields)}>"
    if tensor := tensor_type(type_):
        return f"{type_name(tensor.value_type)}[{', '.join(map(str, tensor.shape))}]"
    return _NAMES.get(str(type_), str(type_))


def named_type(name: str) -> pa.DataType:
    """Parse a name: ``list<float32>``, ``struct<box: int32[4], at: timestamp[s]>``.

    Arrays of one shape are nested lists of fixed size, which any type may contain.
    """
    type_, end = _read(name, 0)
    if end != len(name):
        raise ValueError(f"{name!r} is no type")
    return type_


def _read(name: str, start: int) -> tuple[pa.DataType, int]:
    """Parse the type at ``start``: the type, and the position after it."""
    if match := _LIST.match(name, start):
        item, end = _read(name, match.end())
        return (pa.large_list if match[1] else pa.list_)(item), _expect(">", name, end)
    if match := _STRUCT.match(name, start):
        fields, end = _read_fields(name, match.end())
        return pa.struct(fields), _expect(">", name, end)
    match = _LEAF.match(name, start)
    if match is None:
        raise ValueError(f"{name!r} is no type")
    return _leaf(match[0]), match.end()


def _read_fields(name: str, start: int) -> tuple[list[tuple[str, pa.DataType]], int]:
    fields = []
    while True:
        if name.startswith('"', start):
            field, end = json.JSONDecoder().raw_decode(name, start)
        elif match := _PLAIN_FIELD.match(name, start):
            field, end = match[0], match.end()
        else:
            raise ValueError(f"{name!r} is no type")
        type_, end = _read(name, _expect(": ", name, end))
        fields.append((field, type_))
        if not name.startswith(", ", end):
            return fields, end
        start = end + 2


def _expect(token: str, name: str, start: int) -> int:
    if not name.startswith(token, start):
        raise ValueError(f"{name!r} is no type")
    return start + len(token)


def _field_name(name: str) -> str:
    return name if _PLAIN_FIELD.fullmatch(name) else json.dumps(name)


def _leaf(name: str) -> pa.DataType:
    if name == "str":
        return pa.string()
    if match := _WITH_ZONE.fullmatch(name):
        return pa.timestamp(match[1], match[2])
    if match := _WITH_SHAPE.fullmatch(name):
        type_ = pa.type_for_alias(match[1])
        shape = [int(length) for length in match[2].split(",")]
        if math.prod(shape) not in range(1, 2**31):
            raise ValueError(f"{name!r} is no type")
        for length in reversed(shape):
            type_ = pa.list_(type_, length)
        if tensor_type(type_) is None:
            raise ValueError(f"{name!r} is no type")
        return type_
    if match := _DECIMAL.fullmatch(name):
        decimal = getattr(pa, f"decimal{match[1]}")
        return decimal(int(match[2]), int(match[3]))
    return pa.type_for_alias(name)


# --- values -------------------------------------------------------------------------------------


class NullsError(ValueError):
    """Raised for integers or booleans with nulls, which an array has no value for."""


def list_array(
    type_: pa.DataType, lengths: np.ndarray, items: pa.Array, mask: pa.Array | None = None
) -> pa.Array:
    """Lists of a list type, or lists like these of other items, one after the other in ``items``.

    ``mask`` marks null lists; those of fixed length have none.
    """
    item = type_.value_field.with_type(items.type)
    if pa.types.is_fixed_size_list(type_):
        return pa.FixedSizeListArray.from_arrays(items, type=pa.list_(item, type_.list_size))
    large = pa.types.is_large_list(type_)
    ends = np.cumsum(lengths, dtype=np.int64)
    offsets = pa.array(np.concatenate([[0], ends]), pa.int64() if large else pa.int32())
    kind, lists = (pa.LargeListArray, pa.large_list) if large else (pa.ListArray, pa.list_)
    return kind.from_arrays(offsets, items, type=lists(item), mask=mask)


def row_values(column: pa.Array) -> list[Any]:
    """Each row of an Arrow column; None for null.

    Lists of numbers are arrays (k,), with NaN for null floats; lists of such lists arrays (k, d),
    if they have one length, else lists of arrays. Structs are dicts of such values. Anything else
    is a Python value. An empty list is an array of shape (0,), or (0, 0) if it is one of lists;
    (0, d) if these have a fixed length by their type.
    """
    if is_any_list(column.type):
        return _list_rows(column)
    if pa.types.is_struct(column.type):
        fields = {
            field.name: row_values(values)
            for field, values in zip(column.type, column.flatten(), strict=True)
        }
        present = column.is_valid().to_pylist()
        return [
            {name: values[row] for name, values in fields.items()} if present[row] else None
            for row in range(len(column))
        ]
    return column.to_pylist()


def regular(values: object) -> Any:
    """Stack arrays of one shape; return anything else unchanged."""
    if not isinstance(values, list) or not values:
        return values
    shapes = {value.shape if isinstance(value, np.ndarray) else None for value in values}
    return np.stack(values) if len(shapes) == 1 and None not in shapes else values


def _list_rows(column: pa.Array) -> list[Any]:
    """The lists of a column."""
    items = _item_values(column.flatten())
    empty = _empty(column.type)
    lengths = pc.list_value_length(column).fill_null(0).to_numpy()
    ends = np.cumsum(lengths)
    present = column.is_valid().to_numpy(zero_copy_only=False)
    return [
        (regular(items[start:end]) if start < end else copy.copy(empty)) if is_present else None
        for start, end, is_present in zip(ends - lengths, ends, present, strict=True)
    ]


def _item_values(array: pa.Array) -> Any:
    """The values of an Arrow array, as an array if types and lengths allow it; else as a list."""
    if is_value(array.type):
        if array.null_count and not pa.types.is_floating(array.type):
            raise NullsError
        return array.to_numpy(zero_copy_only=False)
    if is_any_list(array.type) and len(array) and not array.null_count:
        lengths = pc.list_value_length(array).to_numpy()
        if lengths[0] and (lengths == lengths[0]).all():
            items = _item_values(array.flatten())
            if isinstance(items, np.ndarray):
                return items.reshape(len(array), lengths[0], *items.shape[1:])
    return regular(row_values(array))


def _empty(type_: pa.DataType) -> Any:
    """The value of a list without items: an array, or a list if the items are no numbers."""
    shape = [0]
    while is_any_list(type_ := type_.value_type):
        shape.append(type_.list_size if pa.types.is_fixed_size_list(type_) else 0)
    return np.empty(shape, type_.to_pandas_dtype()) if is_value(type_) else []
