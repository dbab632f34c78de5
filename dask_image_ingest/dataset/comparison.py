"""A column compared with constants: exact for every pair of numeric types, null where it is null.

Arrow's own comparison first brings both sides to one type, which fails or rounds where that type
can't hold a value of one of them: float32 for an int64 column and the constant 1e6.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.arguments import is_utf8

__all__ = ["COMPARISONS", "compare", "incomparable", "is_in", "limits", "plain"]

COMPARISONS: dict[str, Callable[..., Any]] = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}

# The comparison with a constant between two values of a column's type, as one with the lower of
# these, and with the upper.
_WITH_LOWER = {"<": "<=", "<=": "<=", ">": ">", ">=": ">"}
_WITH_UPPER = {"<": "<", "<=": "<", ">": ">=", ">=": ">="}


def plain(value: Any) -> Any:
    """A constant as Python has it, without NumPy's wrapping."""
    return value.item() if isinstance(value, np.generic) else value


@functools.cache
def limits(type_: pa.DataType) -> tuple[int, int]:
    """The lowest and the highest value of an integer type."""
    info = np.iinfo(type_.to_pandas_dtype())
    return int(info.min), int(info.max)


def incomparable(type_: pa.DataType, op: str, value: Any) -> str | None:
    """Why a column of this type can't be compared with a constant; None where it can be."""
    if value is None:
        return "None compares with nothing"
    if _is_number(type_):
        if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
            return f"the column is of type {type_} and the value is not a number"
        return "NaN compares with nothing" if _is_nan(value) else None
    if type(value) is str and pa.types.is_string(type_):
        return None if is_utf8(value) else "the value is not valid Unicode"
    try:
        constant = pa.scalar(value, type_)
        COMPARISONS[op](pa.array([], type_), constant)
        # Arrow takes a str for bytes, a datetime for a date, and cuts off what doesn't fit.
        exact = bool(constant.as_py() == value)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        exact = False
    return None if exact else f"the column is of type {type_}"


def compare(column: pa.ChunkedArray, op: str, value: Any) -> pa.ChunkedArray:
    """``column op value``, by value and not by type: null where the column is null."""
    if not _is_number(column.type):
        return COMPARISONS[op](column, pa.scalar(value, column.type))
    column = _doubles(column)
    near, side = _nearest(column.type, value)
    if side and op in ("==", "!="):
        # Nothing is equal to what the column's type can't hold. NaN is not either.
        return pc.if_else(pc.is_valid(column), op == "!=", pa.scalar(None, pa.bool_()))
    if side:
        op = (_WITH_LOWER if side < 0 else _WITH_UPPER)[op]
    return COMPARISONS[op](column, pa.scalar(near, column.type))


def is_in(column: pa.ChunkedArray, values: Sequence[Any]) -> pa.ChunkedArray:
    """Where ``column`` equals one of ``values``; a null does where None is among them."""
    constants = [value for value in values if value is not None]
    found = pc.is_null(column) if len(constants) < len(values) else None
    if _is_number(column.type):
        column = _doubles(column)
        nearest = [_nearest(column.type, value) for value in constants]
        constants = [near for near, side in nearest if not side]
        if pa.types.is_floating(column.type):
            # Arrow tells 0.0 from -0.0 here, unlike everywhere else; adding 0.0 makes them one.
            column, constants = pc.add(column, 0.0), [near + 0.0 for near in constants]
    equal = pc.is_in(column, pa.array(constants, column.type))
    return equal if found is None else pc.or_(equal, found)


def _is_number(type_: pa.DataType) -> bool:
    return pa.types.is_integer(type_) or pa.types.is_floating(type_)


def _is_nan(value: Any) -> bool:
    return value.is_nan() if isinstance(value, Decimal) else value != value


def _doubles(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Floats as float64, which holds every value of the smaller ones."""
    floats = pa.types.is_floating(column.type) and column.type != pa.float64()
    return column.cast(pa.float64()) if floats else column


def _nearest(type_: pa.DataType, value: Any) -> tuple[Any, int]:
    """A value of the column's type with none between it and ``value``, and where it lies.

    The second is 0 where they are equal, -1 where it lies below ``value``, 1 where above. Python
    compares numbers of all types exactly.
    """
    if pa.types.is_integer(type_):
        lowest, highest = limits(type_)
        near = lowest if value < lowest else highest if value > highest else math.floor(value)
    else:
        try:
            near = float(value)
        except OverflowError:
            near = math.inf if value > 0 else -math.inf
    return near, (near > value) - (near < value)
