"""Arrow types: their kinds, and what users call them."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pyarrow as pa

_PYTHON_TYPES = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
}

# Numbers of which Arrow has other names than users do.
_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}

# Lists, of which Arrow also says how it calls their items.
_LIST = re.compile(r"(large_)?list<(?:\w+: )?")
_STRUCT = re.compile(r"struct<")
_PLAIN_FIELD = re.compile(r"\w+", re.ASCII)
_LEAF = re.compile(r"\w+(\[[^\]]*\]|\([^)]*\))?")
_WITH_ZONE = re.compile(r"timestamp\[(\w+), tz=(.+)\]")
_DECIMAL = re.compile(r"decimal(32|64|128|256)\((\d+), ?(-?\d+)\)")


def parse_type(given: Any) -> pa.DataType:
    """An Arrow type from itself, its name, or the type of Python or NumPy that it stands for.

    Raises
    ------
    TypeError, ValueError, LookupError, pyarrow.ArrowException
        For what is no type.
    """
    if isinstance(given, pa.DataType):
        return given
    if isinstance(given, str):
        return named_type(given)
    if given in _PYTHON_TYPES:
        return _PYTHON_TYPES[given]
    if isinstance(given, np.dtype) or (isinstance(given, type) and issubclass(given, np.generic)):
        return pa.from_numpy_dtype(given)
    raise TypeError(f"{given!r} is no type")


def is_text(type_: pa.DataType) -> bool:
    """True for types of strings."""
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def is_bytes(type_: pa.DataType) -> bool:
    """True for types of bytes."""
    return bool(pa.types.is_binary(type_) or pa.types.is_large_binary(type_))


def is_number(type_: pa.DataType) -> bool:
    """True for integers and floats."""
    return bool(pa.types.is_integer(type_) or pa.types.is_floating(type_))


def is_list(type_: pa.DataType) -> bool:
    """True for types of lists, of whatever lengths."""
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_))


def is_byte_list(type_: pa.DataType) -> bool:
    """True for lists of uint8, which cuDF has in the place of bytes."""
    return is_list(type_) and type_.value_type == pa.uint8()


def bytes_of(lists: pa.Array) -> pa.Array:
    """Lists of uint8 as the bytes that they are, without a copy."""
    if pa.types.is_null(lists.type):
        # What cuDF makes of a column of lists that are all null.
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
    """The name by which `named_type` finds a type; of types that it does not know, Arrow's own."""
    if is_list(type_):
        kind = "list" if pa.types.is_list(type_) else "large_list"
        return f"{kind}<{type_name(type_.value_type)}>"
    if pa.types.is_struct(type_):
        fields = (f"{_field_name(field.name)}: {type_name(field.type)}" for field in type_)
        return f"struct<{', '.join(fields)}>"
    return _NAMES.get(str(type_), str(type_))


def named_type(name: str) -> pa.DataType:
    """The type of a name: ``list<float32>``, ``struct<box: list<int32>, at: timestamp[s]>``."""
    type_, end = _read(name, 0)
    if end != len(name):
        raise ValueError(f"{name!r} is no type")
    return type_


def _read(name: str, start: int) -> tuple[pa.DataType, int]:
    """The type whose name begins here, and where it ends."""
    if found := _LIST.match(name, start):
        item, end = _read(name, found.end())
        return (pa.large_list if found[1] else pa.list_)(item), _after(">", name, end)
    if found := _STRUCT.match(name, start):
        fields, end = _read_fields(name, found.end())
        return pa.struct(fields), _after(">", name, end)
    found = _LEAF.match(name, start)
    if found is None:
        raise ValueError(f"{name!r} is no type")
    return _leaf(found[0]), found.end()


def _read_fields(name: str, start: int) -> tuple[list[tuple[str, pa.DataType]], int]:
    fields = []
    while True:
        if name.startswith('"', start):
            field, end = json.JSONDecoder().raw_decode(name, start)
        elif found := _PLAIN_FIELD.match(name, start):
            field, end = found[0], found.end()
        else:
            raise ValueError(f"{name!r} is no type")
        type_, end = _read(name, _after(": ", name, end))
        fields.append((field, type_))
        if not name.startswith(", ", end):
            return fields, end
        start = end + 2


def _after(sign: str, name: str, start: int) -> int:
    if not name.startswith(sign, start):
        raise ValueError(f"{name!r} is no type")
    return start + len(sign)


def _field_name(name: str) -> str:
    return name if _PLAIN_FIELD.fullmatch(name) else json.dumps(name)


def _leaf(name: str) -> pa.DataType:
    if name == "str":
        return pa.string()
    if found := _WITH_ZONE.fullmatch(name):
        return pa.timestamp(found[1], found[2])
    if found := _DECIMAL.fullmatch(name):
        make = getattr(pa, f"decimal{found[1]}")
        return make(int(found[2]), int(found[3]))
    return pa.type_for_alias(name)
