"""Convert JSON, text and bytes to an Arrow type: exactly, or to null."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.arguments import shown
from dask_image_ingest.dataset.schema.array_members import arrays_to_lists, is_array_type
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import is_bytes, is_list, is_text, parse_type


def strict_coercion(type_: pa.DataType) -> Callable[[Any], Any]:
    """A function that coerces a JSON value to this type, or raises.

    Arrow alone is too lenient (1.5 becomes the integer 1, "cat" a list of three strings) and too
    strict (it rejects 2**24 + 1 as a float32).
    """
    if is_list(type_):
        return _null_or(_items(strict_coercion(type_.value_type)))
    if pa.types.is_struct(type_):
        return _null_or(_record({field.name: strict_coercion(field.type) for field in type_}))
    if pa.types.is_boolean(type_):
        return _null_or(_boolean)
    if pa.types.is_integer(type_):
        return _null_or(_integer)
    if pa.types.is_floating(type_):
        return _null_or(_float)
    if is_text(type_):
        return _null_or(_text)
    if pa.types.is_decimal(type_):
        return _null_or(lambda value: pa.scalar(_decimal(value), type_).as_py())
    if pa.types.is_temporal(type_):
        return _null_or(lambda value: _time(value, type_).as_py())
    return _null_or(lambda value: _text(value).encode())


def _null_or(coerce: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else coerce(value)


def _items(coerce: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    return lambda value: [coerce(item) for item in _exactly(list, value)]


def _record(fields: dict[str, Callable[[Any], Any]]) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {
        name: coerce(_exactly(dict, value).get(name)) for name, coerce in fields.items()
    }


def _boolean(value: Any) -> bool:
    return _exactly(bool, value)


def _text(value: Any) -> str:
    return _exactly(str, value)


def _integer(value: Any) -> int:
    return int(value) if isinstance(value, float) and value.is_integer() else _exactly(int, value)


def _float(value: Any) -> float:
    return value if isinstance(value, float) else float(_exactly(int, value))


def _decimal(value: Any) -> Decimal:
    return Decimal(str(value) if isinstance(value, float) else _exactly(int, value))


def _time(value: Any, type_: pa.DataType) -> pa.Scalar:
    # A string is ISO 8601, a number counts the type's unit since the epoch.
    if isinstance(value, str):
        return pa.scalar(value).cast(type_)
    return pa.scalar(_integer(value), type_)


def _exactly(kind: type, value: Any) -> Any:
    # Not isinstance: True is an int.
    if type(value) is not kind:
        raise TypeError
    return value


# What Python and Arrow raise for values that don't fit.
_MISFIT = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RecursionError,
    pa.ArrowException,
)

#: Largest JSON member that is parsed, in bytes.
LARGEST_JSON = 16 << 20


def arrow_type(argument: str, type_: Any) -> pa.DataType:
    """Parse a column type: an Arrow type or its name, or a Python or NumPy type.

    Raises
    ------
    ArgumentError
        If it is not a type that a column can have.
    """
    try:
        parsed = parse_type(type_)
        if is_supported(parsed):
            return pa.string() if is_text(parsed) else parsed  # large_string, for example
    except _MISFIT:
        pass
    raise ArgumentError(
        f"{argument}: {shown(type_)} is no type of a column; pass for example 'string', 'int64', "
        "'float32', 'bool', 'binary', 'list<float32>', str, int, np.float32 or a pyarrow type of "
        "numbers, text, bytes, times, or lists or structs of these"
    )


def convert(
    contents: Sequence[bytes | None], type_: pa.DataType, path: str | None = None
) -> tuple[pa.Array | pa.ChunkedArray, list[int]]:
    """Convert members to a column; returns it and the rows whose content doesn't fit the type.

    Parameters
    ----------
    contents
        The member of each sample; None if it has none.
    type_
        Bytes are taken unchanged, text as UTF-8, numbers are parsed, lists of numbers may be
        ``.npy`` files, all else is JSON.
    path
        A field of a JSON member; None for the whole member.
    """
    if path is None and is_array_type(type_):
        lists = arrays_to_lists(contents, type_)
        if lists is not None:
            return lists
    if path is None and pa.types.is_integer(type_):
        plain = _plain_integers(contents, type_)
        if plain is not None:
            return plain, []
    misfits: list[int] = []
    if path is None and is_bytes(type_):
        values: Sequence[Any] = contents
    elif path is None and is_text(type_):
        values, misfits = _texts(contents)
    else:
        values, misfits = _read(contents, _reader(type_, path), strict_coercion(type_))
    try:
        return pa.array(values, type_), misfits
    except _MISFIT:
        array, more = _one_by_one(values, type_)
        return array, sorted(misfits + more)


def _plain_integers(contents: Sequence[bytes | None], type_: pa.DataType) -> pa.Array | None:
    """Fast path: parse members of digits all at once; None if one is anything else."""
    try:
        texts = pa.array(contents, pa.string())
        others = pc.any(pc.match_substring_regex(texts, "[^0-9-]")).as_py()
        return None if others else texts.cast(type_)
    except pa.ArrowException:
        return None


def parse_json(content: bytes) -> Any:
    """Parse a JSON member."""
    # Parsed, it may take ten times the memory. Its depth is limited by Python's recursion limit.
    if len(content) > LARGEST_JSON:
        raise ValueError(f"JSON of {len(content)} bytes")
    return json.loads(content)


def parse_integer(content: bytes) -> int:
    """Parse a member that is an integer in decimal digits."""
    return int(_without_underscores(content))


def _parse_float(content: bytes) -> float:
    return float(_without_underscores(content))


def _without_underscores(content: bytes) -> bytes:
    # Python parses both 1_23 and 12_3 as 123, but in a dataset they are names.
    if b"_" in content:
        raise ValueError("no number")
    return content


def _texts(contents: Sequence[bytes | None]) -> tuple[list[str | None], list[int]]:
    values: list[str | None] = []
    misfits = []
    for row, content in enumerate(contents):
        value = None
        if content is not None:
            try:
                value = content.decode()
            except UnicodeDecodeError:
                misfits.append(row)
        values.append(value)
    return values, misfits


def _read(
    contents: Sequence[bytes | None], read: Callable[[bytes], Any], coerce: Callable[[Any], Any]
) -> tuple[list[Any], list[int]]:
    values = []
    misfits = []
    for row, content in enumerate(contents):
        value = None
        if content is not None:
            try:
                value = coerce(read(content))
            except _MISFIT:
                misfits.append(row)
        values.append(value)
    return values, misfits


def is_supported(type_: pa.DataType) -> bool:
    """True if a column can be of this type."""
    if is_list(type_):
        return is_supported(type_.value_type)
    if pa.types.is_struct(type_):
        names = {field.name for field in type_}
        distinct = 0 < len(names) == type_.num_fields
        return distinct and all(is_supported(field.type) for field in type_)
    if pa.types.is_temporal(type_) and not pa.types.is_interval(type_):
        pa.scalar(0, type_).as_py()  # raises for an invalid time zone
        return True
    numbers = pa.types.is_boolean(type_) or pa.types.is_integer(type_) or pa.types.is_decimal(type_)
    floats = pa.types.is_float32(type_) or pa.types.is_float64(type_)
    return numbers or floats or is_text(type_) or is_bytes(type_)


def _reader(type_: pa.DataType, path: str | None) -> Callable[[bytes], Any]:
    if path is not None:
        return _json_field(path)
    if pa.types.is_integer(type_):
        return parse_integer
    return _parse_float if pa.types.is_floating(type_) else parse_json


def _json_field(path: str) -> Callable[[bytes], Any]:
    steps = path.split(".")

    def field(content: bytes) -> Any:
        value = parse_json(content)
        if isinstance(value, dict) and path in value:
            return value[path]
        for step in steps:
            value = value.get(step) if isinstance(value, dict) else None
        return value

    return field


def _one_by_one(
    values: Sequence[Any], type_: pa.DataType
) -> tuple[pa.Array | pa.ChunkedArray, list[int]]:
    fitting = list(values)
    misfits = []
    for row, value in enumerate(values):
        try:
            pa.array([value], type_)
        except _MISFIT:
            fitting[row] = None
            misfits.append(row)
    return pa.array(fitting, type_), misfits
