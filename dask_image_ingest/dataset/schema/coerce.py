"""Values of JSON, text and bytes converted to an Arrow type, exactly or not at all."""

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
    """A function that coerces a value to this type, or raises; Arrow alone takes too much.

    To it, 1.5 is the integer 1 and "cat" a list of three texts, and 2**24 + 1 is no float.
    """
    if is_list(type_):
        return _null_or(_items(strict_coercion(type_.value_type)))
    if pa.types.is_struct(type_):
        return _null_or(_record({field.name: strict_coercion(field.type) for field in type_}))
    if pa.types.is_boolean(type_):
        return _null_or(_flag)
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


def _null_or(fit: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else fit(value)


def _items(fit: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    return lambda value: [fit(item) for item in _of(list, value)]


def _record(fits: dict[str, Callable[[Any], Any]]) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: fit(_of(dict, value).get(name)) for name, fit in fits.items()}


def _flag(value: Any) -> bool:
    return _of(bool, value)


def _text(value: Any) -> str:
    return _of(str, value)


def _integer(value: Any) -> int:
    return int(value) if isinstance(value, float) and value.is_integer() else _of(int, value)


def _float(value: Any) -> float:
    return value if isinstance(value, float) else float(_of(int, value))


def _decimal(value: Any) -> Decimal:
    return Decimal(str(value) if isinstance(value, float) else _of(int, value))


def _time(value: Any, type_: pa.DataType) -> pa.Scalar:
    # Days or seconds since an epoch, or ISO 8601.
    if isinstance(value, str):
        return pa.scalar(value).cast(type_)
    return pa.scalar(_integer(value), type_)


def _of(kind: type, value: Any) -> Any:
    # Of this very type: Python takes True for a number.
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

#: Larger members are not parsed, in bytes.
LARGEST_JSON = 16 << 20


def arrow_type(argument: str, type_: Any) -> pa.DataType:
    """An Arrow type from itself, its name, or the type of Python or NumPy that it stands for.

    Raises
    ------
    ArgumentError
        For what is no type, or one that no column can have.
    """
    try:
        found = parse_type(type_)
        if is_supported(found):
            return pa.string() if is_text(found) else found  # text is text, however it is stored
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
    """The contents of a member as a column, and the rows whose content is not of that type.

    Parameters
    ----------
    contents
        What each sample has; None where it has no such member.
    type_
        Bytes are taken as they are, text as UTF-8, numbers are read, lists of numbers may be files
        of NumPy, all else is JSON.
    path
        A field of JSON, rather than the whole member.
    """
    if path is None and is_array_type(type_):
        made = arrays_to_lists(contents, type_)
        if made is not None:
            return made
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
    """Members that are plain digits, as whole numbers at once; None if one is anything else."""
    try:
        texts = pa.array(contents, pa.string())
        odd = pc.any(pc.match_substring_regex(texts, "[^0-9-]")).as_py()
        return None if odd else texts.cast(type_)
    except pa.ArrowException:
        return None


def parse_json(content: bytes) -> Any:
    """Parse a JSON member."""
    # Parsed it may take ten times the memory; its depth is bounded by Python's own recursion.
    if len(content) > LARGEST_JSON:
        raise ValueError(f"JSON of {len(content)} bytes")
    return json.loads(content)


def parse_integer(content: bytes) -> int:
    """The whole number that a member holds."""
    return int(_without_underscores(content))


def _parse_float(content: bytes) -> float:
    return float(_without_underscores(content))


def _without_underscores(content: bytes) -> bytes:
    # Python reads 1_23 and 12_3 as 123; they are names.
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
    contents: Sequence[bytes | None], read: Callable[[bytes], Any], fit: Callable[[Any], Any]
) -> tuple[list[Any], list[int]]:
    values = []
    misfits = []
    for row, content in enumerate(contents):
        value = None
        if content is not None:
            try:
                value = fit(read(content))
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
        differ = 0 < len(names) == type_.num_fields
        return differ and all(is_supported(field.type) for field in type_)
    if pa.types.is_temporal(type_) and not pa.types.is_interval(type_):
        pa.scalar(0, type_).as_py()  # a time zone may be none
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
    found = list(values)
    misfits = []
    for row, value in enumerate(values):
        try:
            pa.array([value], type_)
        except _MISFIT:
            found[row] = None
            misfits.append(row)
    return pa.array(found, type_), misfits
