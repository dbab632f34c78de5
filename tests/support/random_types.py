"""Random Arrow types that a column can have, and random values of them."""

from __future__ import annotations

import datetime
import string
from decimal import Decimal

import pyarrow as pa

_UNITS = {"s": 10**6, "ms": 10**3, "us": 1, "ns": 1}
_ZONES = ("UTC", "Europe/Zurich", "+01:00", "America/Argentina/Buenos_Aires")
_ODD_NAMES = ("", " ", "a b", "x: int8>", 'say "so"', "a, b", "ä", "数", "1st", "[pyarrow]", "\\")
_EPOCH = datetime.datetime(1970, 1, 1)


def random_type(rng, depth=3):
    """A type of numbers, text, bytes, times or decimals, or of lists and structs of such."""
    kind = rng.choice(["leaf", "list", "list", "large_list", "struct"]) if depth else "leaf"
    if kind == "list":
        return pa.list_(random_type(rng, depth - 1))
    if kind == "large_list":
        return pa.large_list(random_type(rng, depth - 1))
    if kind == "struct":
        names = [*string.ascii_letters, *_ODD_NAMES]
        fields = rng.sample(names, rng.randint(1, 3))
        return pa.struct([(name, random_type(rng, depth - 1)) for name in fields])
    return _random_leaf(rng)


def random_nested_type(rng, depth=3):
    """One of those that are lists or structs."""
    while not pa.types.is_nested(type_ := random_type(rng, depth)):
        pass
    return type_


def _random_leaf(rng):
    unit = rng.choice([*_UNITS])
    simple = (
        pa.bool_(), pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(),
        pa.int64(), pa.uint64(), pa.float32(), pa.float64(), pa.string(), pa.large_string(),
        pa.binary(), pa.large_binary(), pa.date32(), pa.date64(), pa.duration(unit),
        pa.timestamp(unit), pa.timestamp(unit, tz=rng.choice(_ZONES)),
        pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"),
    )  # fmt: skip
    digits = rng.randint(1, 38)
    decimals = (pa.decimal128(digits, rng.randint(0, digits)), pa.decimal256(70, rng.randint(0, 9)))
    return rng.choice([*simple, *decimals])


def random_value(type_, rng, nulls=0.15):
    """A value of the type as Python has it, or None."""
    if rng.random() < nulls:
        return None
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return [random_value(type_.value_type, rng) for _ in range(rng.randrange(4))]
    if pa.types.is_struct(type_):
        return {field.name: random_value(field.type, rng) for field in type_}
    if pa.types.is_boolean(type_):
        return rng.random() < 0.5
    if pa.types.is_integer(type_):
        bits = type_.bit_width
        low = 0 if pa.types.is_unsigned_integer(type_) else -(2 ** (bits - 1))
        return rng.choice([low, low + 2**bits - 1, rng.randrange(low, low + 2**bits)])
    if pa.types.is_floating(type_):
        return rng.choice([0.0, -0.5, float("inf"), rng.randrange(2**20) / 8])
    if pa.types.is_decimal(type_):
        return Decimal(rng.randrange(10**type_.precision)).scaleb(-type_.scale)
    if pa.types.is_temporal(type_):
        return _random_time(type_, rng)
    text = "".join(rng.choice("aä数 ,<>\0") for _ in range(rng.randrange(5)))
    is_text = pa.types.is_string(type_) or pa.types.is_large_string(type_)
    return text if is_text else text.encode("utf-16")


def _random_time(type_, rng):
    if pa.types.is_date(type_):
        return _EPOCH.date() + datetime.timedelta(days=rng.randrange(-9999, 9999))
    unit = {"32": "s", "64": "us"}.get(type_.bit_width, getattr(type_, "unit", "us"))
    if pa.types.is_time(type_):
        micros = rng.randrange(86_400 * 10**6)
        return (_EPOCH + datetime.timedelta(microseconds=_whole(micros, type_.unit))).time()
    micros = _whole(rng.randrange(-(10**15), 10**15), unit)
    since = datetime.timedelta(microseconds=micros)
    if pa.types.is_duration(type_):
        return since
    return _EPOCH + since if type_.tz is None else (_EPOCH + since).replace(tzinfo=datetime.UTC)


def _whole(micros, unit):
    return micros // _UNITS[unit] * _UNITS[unit]
