"""Convert JSON, text, bytes and ``.npy`` members to an Arrow type: exactly, or to null."""

from __future__ import annotations

import functools
import io
import json
import math
import operator
import re
import tokenize
from base64 import b64decode
from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from fractions import Fraction
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib import format as npy

from dask_image_ingest.arguments import shown
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import (
    as_lists,
    as_tensors,
    has_type,
    is_any_list,
    is_bytes,
    is_list,
    is_number,
    is_text,
    list_array,
    list_sizes,
    nesting,
    parse_type,
    tensor_array,
    tensor_type,
)
from dask_image_ingest.typedefs import TypeLike

# NumPy parses a header as a literal of Python. Those of plain arrays are shorter, and it takes a
# second for some of 10,000 characters.
_LONGEST_HEADER = 1024

# What NumPy and Python's parser raise for invalid headers; the last one if they nest too deeply.
_INVALID = (
    ValueError,
    LookupError,
    TypeError,
    SyntaxError,
    ArithmeticError,
    RecursionError,
    tokenize.TokenError,
    MemoryError,
)

_T = TypeVar("_T")

_MAGIC, _ZIP = b"\x93NUMPY", b"PK\x03\x04"


def is_array_type(type_: pa.DataType) -> bool:
    """True for lists, also nested ones, of numbers or booleans."""
    _, value = nesting(type_)
    return (is_number(value) or pa.types.is_boolean(value)) and value is not type_


def arrays_to_lists(
    contents: Sequence[bytes | None], type_: pa.DataType
) -> tuple[pa.Array, list[int]] | None:
    """Convert ``.npy`` files to lists; returns the column and the rows that don't fit its type.

    An array fits if it has as many dimensions as the type has nested lists, and its dtype casts to
    the type's safely (NumPy's casting rule ``safe``). It has at most as many empty lists as bytes.

    Parameters
    ----------
    contents
        The member of each sample; None if it has none.
    type_
        Lists, also nested ones, of numbers or booleans.

    Returns
    -------
    tuple or None
        None if no member is an ``.npy`` file.
    """
    if not any(content is not None and content.startswith(_MAGIC) for content in contents):
        return None
    loaded, fits = [_load(content) for content in contents], _fits(type_)
    arrays = [
        # Empty lists take no bytes in the file, but some in the column.
        array
        if array is not None
        and fits(array)
        and max(accumulate(array.shape[:-1], operator.mul), default=0) <= len(content or b"")
        else None
        for array, content in zip(loaded, contents, strict=True)
    ]
    misfits = [
        row
        for row, (array, content) in enumerate(zip(arrays, contents, strict=True))
        if array is None and content is not None
    ]
    if (tensors := tensor_type(type_)) is not None:
        return tensor_array(arrays, tensors), misfits
    return _lists(arrays, type_), misfits


def type_advice(content: bytes, type_: pa.DataType) -> str | None:
    """Advice which type to ask for instead of ``type_``; None if no other would help."""
    if content.startswith(_ZIP):
        return "an .npz file may hold several arrays: ask for 'binary', and np.load each value"
    array = _load(content)
    if array is None or not array.ndim or array.dtype.kind not in "biuf":
        return None
    if _fits(type_)(array) or array.dtype.itemsize > 8:
        return None
    # Not every backend has float16.
    name = "float32" if array.dtype.name == "float16" else array.dtype.name
    asked = f"{'list<' * array.ndim}{name}{'>' * array.ndim}"
    return f"it is {array.dtype.name} of shape {array.shape}: ask for {asked!r}"


def _load(content: bytes | None) -> np.ndarray | None:
    """The array of an ``.npy`` file; None if it is invalid, truncated, or holds objects."""
    if content is None or not content.startswith(_MAGIC):
        return None
    file = io.BytesIO(content)
    with suppress(*_INVALID):
        # The third version has names of fields, which no column takes.
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        read = readers[npy.read_magic(file)]
        shape, is_fortran, dtype = read(file, max_header_size=_LONGEST_HEADER)
        if min(shape, default=0) >= 0:
            # Unlike `numpy.lib.format.read_array`, this takes no memory for what is not there.
            values = np.frombuffer(content, dtype, offset=file.tell())
            return values.reshape(shape, order="F" if is_fortran else "C")
    return None


def _fits(type_: pa.DataType) -> Callable[[np.ndarray], bool]:
    """A test whether an array fits a type."""
    depth, value = nesting(type_)
    dtype, sizes = value.to_pandas_dtype(), list_sizes(type_)
    return lambda array: (
        array.ndim == depth
        and np.can_cast(array.dtype, dtype, "safe")
        and all(size in (None, edge) for size, edge in zip(sizes, array.shape, strict=True))
    )


def _lists(arrays: Sequence[np.ndarray | None], type_: pa.DataType) -> pa.Array:
    """A column of nested lists, null for None: flat values first, then lists from inside out."""
    dtype = np.dtype(nesting(type_)[1].to_pandas_dtype())
    present = [array for array in arrays if array is not None]
    values = pa.array(
        np.concatenate([np.empty(0, dtype), *(a.ravel() for a in present)], dtype=dtype)
    )
    types = [type_]
    while is_any_list(types[-1].value_type):
        types.append(types[-1].value_type)
    for level in reversed(range(1, len(types))):
        lengths = [np.full(math.prod(a.shape[:level]), a.shape[level]) for a in present]
        values = list_array(types[level], np.concatenate([np.empty(0, np.int64), *lengths]), values)
    rows = np.array([0 if array is None else array.shape[0] for array in arrays], np.int64)
    mask = pa.array([array is None for array in arrays], pa.bool_())
    return list_array(type_, rows, values, mask)


_Coercion: TypeAlias = Callable[[object], object]


def strict_coercion(type_: pa.DataType) -> _Coercion:
    """A function that coerces a JSON value to this type, or raises.

    Arrow alone is too lenient (1.5 becomes the integer 1, "cat" a list of three strings) and too
    strict (it rejects 2**24 + 1 as a float32).
    """
    type_ = as_lists(type_)
    if is_any_list(type_):
        (size, *_) = list_sizes(type_)
        return _null_or(_items(strict_coercion(type_.value_type), size))
    if pa.types.is_struct(type_):
        return _null_or(_record({field.name: strict_coercion(field.type) for field in type_}))
    if pa.types.is_boolean(type_):
        return _null_or(functools.partial(_exactly, bool))
    if pa.types.is_integer(type_):
        return _null_or(_integer)
    if pa.types.is_floating(type_):
        return _null_or(_float)
    if is_text(type_):
        return _null_or(functools.partial(_exactly, str))
    if pa.types.is_decimal(type_):
        return _null_or(lambda value: _decimal(value, type_))
    if pa.types.is_temporal(type_):
        return _null_or(lambda value: _time(value, type_))
    return _null_or(lambda value: b64decode(_exactly(str, value), validate=True))


def _null_or(coerce: _Coercion) -> _Coercion:
    return lambda value: None if value is None else coerce(value)


def _items(coerce: _Coercion, size: int | None) -> _Coercion:
    def items(value: object) -> list[object]:
        if size not in (None, len(_exactly(list, value))):
            raise ValueError
        return [coerce(item) for item in _exactly(list, value)]

    return items


def _record(fields: dict[str, _Coercion]) -> _Coercion:
    return lambda value: {
        name: coerce(_exactly(dict, value).get(name)) for name, coerce in fields.items()
    }


def _integer(value: object) -> int:
    if isinstance(value, (float, Decimal)) and float(value).is_integer():
        return int(float(value))
    return _exactly(int, value)


def _float(value: object) -> float:
    return float(value if isinstance(value, (float, Decimal)) else _exactly(int, value))


_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)


def _decimal(value: object, type_: pa.DataType) -> Decimal:
    number = value if isinstance(value, Decimal) else Decimal(_exactly(int, value))
    number = number.normalize(_EXACT)
    # pyarrow 26 makes zero of some numbers with more digits, and crashes for 1e-999999999.
    exponent = int(number.as_tuple().exponent)
    if number and (number.adjusted() >= type_.precision - type_.scale or exponent < -type_.scale):
        raise ValueError
    return number


def _number_of_text(text: str) -> Decimal | float:
    with suppress(ArithmeticError):
        return Decimal(text)
    return float(text)  # its exponent is larger than those of decimals


_DURATION = re.compile(
    r"P(?=.*\d)(?:(-?\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?", re.ASCII
)
_TIME_OF_DAY = re.compile(r"()([01]\d|2[0-3]):([0-5]\d)(?::([0-5]\d(?:\.\d+)?))?", re.ASCII)
_ZEROS = re.compile(r"(?:\.|(\.\d*[1-9]))0+(?!\d)", re.ASCII)  # at the end of a fraction
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def _time(value: object, type_: pa.DataType) -> int:
    """A time in the type's unit: a string is ISO 8601, a number counts the unit."""
    if not isinstance(value, str):
        time = pa.scalar(_integer(value), type_)
    elif pa.types.is_time(type_):
        time = pa.scalar(_units(_TIME_OF_DAY, value, type_), type_)
    elif pa.types.is_duration(type_):
        time = pa.scalar(_units(_DURATION, value, type_), type_)
    else:
        # Arrow takes no more digits than the type has.
        time = pa.scalar(_ZEROS.sub(r"\1", value)).cast(type_)
    time.as_py()  # raises for times that Python does not have; but it has no nanoseconds of a day
    return int(time.value)


def _units(form: re.Pattern[str], text: str, type_: pa.DataType) -> int:
    """Days, hours, minutes and seconds as a whole number of a type's units."""
    match = form.fullmatch(text)
    if match is None:
        raise ValueError
    days, hours, minutes, seconds = (Fraction(part or 0) for part in match.groups())
    count = (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * _UNITS[type_.unit]
    if count.denominator != 1:
        raise ValueError
    return count.numerator


def _exactly(kind: type[_T], value: object) -> _T:
    # The very type: True is an int.
    if isinstance(value, kind) and type(value) is kind:
        return value
    raise TypeError


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


def arrow_type(argument: str, type_: TypeLike) -> pa.DataType:
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
    values: Sequence[object] = contents
    # Arrow takes bytes as text if they are valid UTF-8.
    if path is not None or not (is_bytes(type_) or is_text(type_)):
        values, misfits = _read(contents, _reader(type_, path), strict_coercion(type_))
    try:
        return _column(values, type_), misfits
    except _MISFIT:
        if values is contents and is_text(type_):  # some are not UTF-8
            values, misfits = _read(contents, bytes.decode, lambda text: text)
            return _column(values, type_), misfits
        array, more = _one_by_one(values, type_)
        return array, sorted(misfits + more)


def _column(values: Sequence[object], type_: pa.DataType) -> pa.Array | pa.ChunkedArray:
    array = pa.array(values, as_lists(type_))
    return as_tensors(array, type_) if isinstance(type_, pa.FixedShapeTensorType) else array


def _plain_integers(contents: Sequence[bytes | None], type_: pa.DataType) -> pa.Array | None:
    """Fast path: parse members of digits all at once; None if one is anything else."""
    try:
        texts = pa.array(contents, pa.string())
        others = pc.any(pc.match_substring_regex(texts, "[^0-9-]")).as_py()
        return None if others else texts.cast(type_)
    except pa.ArrowException:
        return None


def parse_json(content: bytes, parse_float: Callable[[str], Any] | None = None) -> Any:
    """Parse a JSON member."""
    # Parsed, it may take ten times the memory. Its depth is limited by Python's recursion limit.
    if len(content) > LARGEST_JSON:
        raise ValueError(f"JSON of {len(content)} bytes")
    return json.loads(content, parse_float=parse_float)


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


def _read(
    contents: Sequence[bytes | None], read: Callable[[bytes], object], coerce: _Coercion
) -> tuple[list[object], list[int]]:
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
    if (tensors := tensor_type(type_)) is not None:
        return pa.types.is_float16(tensors.value_type) or is_supported(tensors.value_type)
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
    # Decimals have digits that a float does not.
    parse_float = _number_of_text if has_type(type_, pa.types.is_decimal) else None
    parse = functools.partial(parse_json, parse_float=parse_float)
    if path is not None:
        return _json_field(path, parse)
    if pa.types.is_integer(type_):
        return parse_integer
    return _parse_float if pa.types.is_floating(type_) else parse


def _json_field(path: str, parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    steps = path.split(".")

    def field(content: bytes) -> object:
        value = parse(content)
        if isinstance(value, dict) and path in value:
            return value[path]
        for step in steps:
            value = value.get(step) if isinstance(value, dict) else None
        return value

    return field


def _one_by_one(
    values: Sequence[object], type_: pa.DataType
) -> tuple[pa.Array | pa.ChunkedArray, list[int]]:
    fitting = list(values)
    misfits = []
    for row, value in enumerate(values):
        try:
            _column([value], type_)
        except _MISFIT:
            fitting[row] = None
            misfits.append(row)
    return _column(fitting, type_), misfits
