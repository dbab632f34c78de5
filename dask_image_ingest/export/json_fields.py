"""JSON of columns, and fields of an object, set in its text: all else stays byte for byte.

A field is a path of names, as in ``json_fields=`` of a read: ``user.name`` is ``name`` in the
object ``user``, or a field that is called so.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa

from dask_image_ingest.frames import is_bytes, is_list

# Numbers are not parsed: they may have any number of digits.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, strict=False)

_BLANKS = re.compile(r"[ \t\n\r]*")


def with_fields(own: bytes, made: bytes, fields: Sequence[tuple[str, ...]]) -> bytes:
    """A JSON object with some fields of another one, which are replaced or added.

    Raises
    ------
    ValueError
        If it is no JSON object in UTF-8.
    """
    try:
        text, other = own.decode(), made.decode()
        for path in fields:
            value = field_text(other, path)
            if value is not None:
                text = with_field(text, path, value)
        return text.encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def field_text(text: str, path: tuple[str, ...]) -> str | None:
    """The text of a field's value; None without it."""
    entries = _entries(text)
    for name, rest in ((".".join(path), ()), (path[0], path[1:])):
        if (entry := entries.get(name)) is not None:
            value = text[entry]
            if not rest or value.startswith("{"):
                return field_text(value, rest) if rest else value
    return None


def with_field(text: str, path: tuple[str, ...], value: str) -> str:
    """A JSON object with a field set to the text of a value."""
    entries = _entries(text)
    whole = ".".join(path)
    name, rest = (whole, ()) if whole in entries else (path[0], path[1:])
    entry = entries.get(name)
    if rest and entry is not None and text[entry.start] != "{":
        name, rest, entry = whole, (), None  # beside a value that is no object
    if entry is not None:
        if rest:
            value = with_field(text[entry], rest, value)
        return text[: entry.start] + value + text[entry.stop :]
    if rest:
        value = with_field("{}", rest, value)
    added = f"{json.dumps(name, ensure_ascii=False)}: {value}"
    begin = text.index("{") + 1
    if not entries:
        return text[:begin] + added + text[begin:]
    # Indented as the first field is.
    indent = text[begin : _after_blanks(text, begin)]
    end = max(entry.stop for entry in entries.values())
    return f"{text[:end]},{indent or ' '}{added}{text[end:]}"


def _entries(text: str) -> dict[str, slice]:
    """Span of each value by its field; of several of one name the last, which readers take.

    Raises
    ------
    ValueError
    """
    entries: dict[str, slice] = {}
    at = _expect(text, text.startswith("\ufeff"), "{")
    at = _after_blanks(text, at)
    if text[at : at + 1] != "}":
        while True:
            name, colon = _DECODER.raw_decode(text, at)
            if not isinstance(name, str) or text[at] != '"':
                raise ValueError("a name of a field is no string")
            start = _after_blanks(text, _expect(text, colon, ":"))
            _, end = _DECODER.raw_decode(text, start)
            entries[name] = slice(start, end)
            at = _after_blanks(text, end)
            if text[at : at + 1] != ",":
                break
            at = _after_blanks(text, at + 1)
    at = _after_blanks(text, _expect(text, at, "}"))
    if at != len(text):
        raise ValueError("more follows the object")
    return entries


def _after_blanks(text: str, at: int) -> int:
    blanks = _BLANKS.match(text, at)
    return at if blanks is None else blanks.end()


def _expect(text: str, at: int, mark: str) -> int:
    """The position after a mark, which may follow blanks."""
    at = _after_blanks(text, at)
    if text[at : at + 1] != mark:
        raise ValueError(f"{mark!r} is missing at character {at}")
    return at + 1


def json_texts(column: pa.ChunkedArray, is_json: bool = True) -> list[str | None]:
    """The values of a column as JSON, each of which reads back as the same value; None for null.

    Decimals are numbers with all their digits, floats have the fewest that tell them apart; NaN and
    infinity are null. Bytes are base64, times ISO 8601, maps lists of pairs.

    Parameters
    ----------
    column
        Of any type; null is None.
    is_json
        False for text outside of JSON: times without quotes, NaN and infinity as Python's.
    """
    # Through text, so that float32 0.1 becomes 0.1 and not 0.10000000149011612.
    with_text, plain = (_replaced(column.type, by) for by in (pa.string(), pa.float64()))
    if with_text != column.type:
        column = column.cast(with_text).cast(plain)
    encode = _encoder(plain)
    if not is_json and pa.types.is_temporal(plain):
        encode = _iso
    elif not is_json and pa.types.is_floating(plain):
        encode = str if plain != pa.float16() else lambda value: str(np.float16(value))
    elif not is_json and pa.types.is_string(plain):  # of times of day
        encode = str
    return [None if value is None else encode(value) for value in column.to_pylist()]


def _replaced(type_: pa.DataType, float_: pa.DataType) -> pa.DataType:
    """A type with another one for float32, and with those of values for dictionaries."""
    if pa.types.is_float32(type_):
        return float_
    if type_ == pa.time64("ns"):  # Python's times have microseconds
        return pa.string()
    if pa.types.is_dictionary(type_):
        return _replaced(type_.value_type, float_)
    if isinstance(type_, pa.BaseExtensionType):
        return _replaced(type_.storage_type, float_)
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_replaced(field.type, float_)) for field in type_])
    if pa.types.is_map(type_):
        return pa.map_(_replaced(type_.key_type, float_), _replaced(type_.item_type, float_))
    if is_list(type_) or pa.types.is_fixed_size_list(type_):
        item = type_.value_field.with_type(_replaced(type_.value_type, float_))
        if pa.types.is_fixed_size_list(type_):
            return pa.list_(item, type_.list_size)
        return pa.list_(item) if pa.types.is_list(type_) else pa.large_list(item)
    return type_


_Encoder: TypeAlias = Callable[[Any], str]


def _encoder(type_: pa.DataType) -> _Encoder:
    """A function that makes JSON of a value of a type, as Arrow gives it."""
    if pa.types.is_boolean(type_):
        return lambda value: "true" if value else "false"
    if pa.types.is_float16(type_):
        return lambda value: str(np.float16(value)) if math.isfinite(value) else "null"
    if pa.types.is_floating(type_):
        return lambda value: repr(value) if math.isfinite(value) else "null"
    if pa.types.is_integer(type_):
        return str
    if pa.types.is_decimal(type_):
        return lambda value: f"{value:f}"
    if is_bytes(type_) or pa.types.is_fixed_size_binary(type_):
        return lambda value: f'"{b64encode(value).decode()}"'
    if pa.types.is_temporal(type_):
        return lambda value: f'"{_iso(value)}"'
    if pa.types.is_struct(type_):
        fields = [(field.name, _string(field.name), _null_or(field.type)) for field in type_]
        return lambda value: (
            f"{{{', '.join(f'{key}: {encode(value[name])}' for name, key, encode in fields)}}}"
        )
    if pa.types.is_map(type_):
        key, item = _null_or(type_.key_type), _null_or(type_.item_type)
        return lambda value: f"[{', '.join(f'[{key(k)}, {item(v)}]' for k, v in value)}]"
    if is_list(type_) or pa.types.is_fixed_size_list(type_):
        item = _null_or(type_.value_type)
        return lambda value: f"[{', '.join(map(item, value))}]"
    return lambda value: _string(str(value))


def _null_or(type_: pa.DataType) -> _Encoder:
    encode = _encoder(type_)
    return lambda value: "null" if value is None else encode(value)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _iso(value: date | time | timedelta) -> str:
    """A time in ISO 8601."""
    if isinstance(value, timedelta):
        return str(pd.Timedelta(value).isoformat())
    # Few readers take offsets with seconds, which zones had until about 1900.
    if isinstance(value, datetime) and (value.utcoffset() or timedelta()) % timedelta(minutes=1):
        value = value.astimezone(UTC)
    return value.isoformat()
