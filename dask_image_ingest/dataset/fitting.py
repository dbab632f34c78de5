"""Values of JSON and text made values of an Arrow type, exactly or not at all."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa

from dask_image_ingest.frames import is_text

__all__ = ["fitting"]


def fitting(type_: pa.DataType) -> Callable[[Any], Any]:
    """What makes a value of this type of one that was read, or raises; Arrow alone takes too much.

    To it, 1.5 is the integer 1 and "cat" a list of three texts, and 2**24 + 1 is no float.
    """
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return _null_or(_items(fitting(type_.value_type)))
    if pa.types.is_struct(type_):
        return _null_or(_record({field.name: fitting(field.type) for field in type_}))
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
