"""Filters in disjunctive normal form: check, weaken, combine and apply them.

The outer tuple is an «or», the inner ones are «and», as in ``dask.dataframe.read_parquet``. Some
operators are made only by the optimiser: ``is null``, ``not null``, and ``not <`` and the like.
Numbers are compared by value, whatever their types.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.arguments import is_utf8, shown
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import IMAGE, is_number

COMPARISONS: dict[str, Callable[..., Any]] = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}

# A constant that the column's type can't hold lies between two values that it can. The operator to
# use when the constant is replaced by the lower of them, or by the upper.
_WITH_LOWER = {"<": "<=", "<=": "<=", ">": ">", ">=": ">"}
_WITH_UPPER = {"<": "<", "<=": "<", ">": ">=", ">=": ">="}


def plain(value: Any) -> Any:
    """A NumPy scalar as a Python value; anything else unchanged."""
    return value.item() if isinstance(value, np.generic) else value


@functools.cache
def limits(type_: pa.DataType) -> tuple[int, int]:
    """The lowest and the highest value of an integer type."""
    info = np.iinfo(type_.to_pandas_dtype())
    return int(info.min), int(info.max)


def incomparable(type_: pa.DataType, op: str, value: Any) -> str | None:
    """The reason why a column of this type can't be compared with a constant; None if it can."""
    if value is None:
        return "None compares with nothing"
    if is_number(type_):
        if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
            return f"the column is of type {type_} and the value is not a number"
        return "NaN compares with nothing" if _is_nan(value) else None
    if type(value) is str and pa.types.is_string(type_):
        return None if is_utf8(value) else "the value is not valid Unicode"
    try:
        constant = pa.scalar(value, type_)
        COMPARISONS[op](pa.array([], type_), constant)
        # Arrow converts a str to bytes, and a datetime to a date, and drops what doesn't fit.
        exact = bool(constant.as_py() == value)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        exact = False
    return None if exact else f"the column is of type {type_}"


def compare(column: pa.ChunkedArray, op: str, value: Any) -> pa.ChunkedArray:
    """``column op value``, compared exactly, whatever the types; null where the column is null."""
    if not is_number(column.type):
        return COMPARISONS[op](column, pa.scalar(value, column.type))
    column = _doubles(column)
    near, side = _nearest(column.type, value)
    if side and op in ("==", "!="):
        # No value equals one that the type can't hold, and neither does NaN.
        return pc.if_else(pc.is_valid(column), op == "!=", pa.scalar(None, pa.bool_()))
    if side:
        op = (_WITH_LOWER if side < 0 else _WITH_UPPER)[op]
    return COMPARISONS[op](column, pa.scalar(near, column.type))


def is_in(column: pa.ChunkedArray, values: Sequence[Any]) -> pa.ChunkedArray:
    """Mark rows that equal one of ``values``; null rows do if None is among them."""
    constants = [value for value in values if value is not None]
    nulls = pc.is_null(column) if len(constants) < len(values) else None
    if is_number(column.type):
        column = _doubles(column)
        nearest = [_nearest(column.type, value) for value in constants]
        constants = [near for near, side in nearest if not side]
        if pa.types.is_floating(column.type):
            # Only here, Arrow distinguishes -0.0 from 0.0; adding 0.0 makes both 0.0.
            column, constants = pc.add(column, 0.0), [near + 0.0 for near in constants]
    equal = pc.is_in(column, pa.array(constants, column.type))
    return equal if nulls is None else pc.or_(equal, nulls)


def _is_nan(value: Any) -> bool:
    return value.is_nan() if isinstance(value, Decimal) else value != value


def _doubles(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Cast smaller floats to float64, which is exact."""
    floats = pa.types.is_floating(column.type) and column.type != pa.float64()
    return column.cast(pa.float64()) if floats else column


def _nearest(type_: pa.DataType, value: Any) -> tuple[Any, int]:
    """A value of the column's type next to ``value``, and its sign relative to it.

    The sign is 0 if they are equal, -1 if the neighbour is below ``value``, 1 if above. Python
    compares numbers of different types exactly.
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


Predicate = tuple[str, str, Any]
Filters = tuple[tuple[Predicate, ...], ...]

#: Operator → its negation, for values that are not null.
NEGATED = {
    "==": "!=",
    "!=": "==",
    "<": ">=",
    ">=": "<",
    ">": "<=",
    "<=": ">",
    "in": "not in",
    "not in": "in",
    "is null": "not null",
    "not null": "is null",
}

#: Operator → the one to use with sides swapped; those not listed are symmetric.
MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}

# Most alternatives of a filter. «and» of two filters multiplies them; above this many it is cheaper
# to leave one to the dataframe library.
_MOST_ALTERNATIVES = 64


def normalize_filters(filters: Any, types: Mapping[str, pa.DataType]) -> Filters | None:
    """Check a user's ``filters`` and put them in normal form.

    Parameters
    ----------
    filters
        None, a list of ``(column, operator, value)`` that must all hold, or a list of such lists of
        which one must hold. Operators: ``== = != < <= > >= in``, ``not in``.
    types
        The collection's columns and their types.

    Raises
    ------
    ArgumentError
        For another form, an unknown column or operator, a filter on ``image``, or a value that
        can't be compared with the column.
    """
    if filters is None:
        return None
    if not _is_list(filters):
        raise ArgumentError(_form(filters))
    if all(isinstance(f, tuple) for f in filters):
        filters = [filters]
    if not all(map(_is_list, filters)):
        raise ArgumentError(_form(filters))
    return tuple(tuple(_predicate(p, types) for p in conjunction) for conjunction in filters)


def matching(table: pa.Table, filters: Filters) -> np.ndarray:
    """Positions of the rows for which ``filters`` hold.

    A comparison with null holds for no row, whatever the operator; ``in`` holds for null where None
    is in the list, and ``not in`` where it isn't. NaN is equal to nothing, less than nothing and
    greater than nothing, so ``!=`` and ``not in`` hold for it.
    """
    alternatives = (
        functools.reduce(pc.and_, (_holds(table.column(c), op, value) for c, op, value in conj))
        for conj in filters
    )
    return np.flatnonzero(functools.reduce(pc.or_, alternatives).to_numpy())


def columns_of(filters: Filters | None) -> set[str]:
    """The columns that filters use."""
    return {column for conjunction in filters or () for column, _, _ in conjunction}


def without(filters: Filters | None, columns: Collection[str]) -> Filters | None:
    """A weaker filter that does not use these columns; None if it would keep all rows.

    Every row that passes ``filters`` passes it, too.
    """
    weaker = tuple(tuple(p for p in conj if p[0] not in columns) for conj in filters or ())
    return weaker if weaker and all(weaker) else None


def only(filters: Filters | None, columns: Collection[str]) -> Filters | None:
    """A weaker filter that uses only these columns; None if it would keep all rows."""
    weaker = tuple(tuple(p for p in conj if p[0] in columns) for conj in filters or ())
    return weaker if weaker and all(weaker) else None


def both(one: Filters | None, other: Filters | None) -> Filters | None:
    """The conjunction of two filters; None if it would have too many alternatives."""
    if not one or not other:
        return one or other
    if len(one) * len(other) > _MOST_ALTERNATIVES:
        return None
    return tuple(tuple(dict.fromkeys(a + b)) for a in one for b in other)


def either(one: Filters, other: Filters) -> Filters | None:
    """The disjunction of two filters; None if it would have too many alternatives."""
    return one + other if len(one) + len(other) <= _MOST_ALTERNATIVES else None


def _holds(column: pa.ChunkedArray, op: str, value: Any) -> pa.ChunkedArray:
    """Evaluate a predicate, row by row; never null."""
    if op.endswith("null"):
        null = pc.is_null(column, nan_is_null=bool(value))
        return null if op == "is null" else pc.invert(null)
    if op.endswith("in"):
        listed = is_in(column, value)
        return listed if op == "in" else pc.invert(listed)
    holds = compare(column, op.removeprefix("not "), value)
    return pc.fill_null(pc.invert(holds) if op.startswith("not ") else holds, False)


def _predicate(predicate: Any, types: Mapping[str, pa.DataType]) -> Predicate:
    if not isinstance(predicate, (tuple, list)) or len(predicate) != 3:
        raise ArgumentError(_form(predicate))
    column, op, value = predicate
    prefix = f"filters= has ({shown(column)}, {shown(op)}, {shown(value)})"
    if not isinstance(column, str) or column not in types:
        raise ArgumentError(f"{prefix}: there is no such column; there are {', '.join(types)}")
    if types[column] == IMAGE:
        raise ArgumentError(
            f"{prefix}, and filters are evaluated before any pixel is decoded; filter the frame "
            "afterwards, or use a metadata column"
        )
    if not isinstance(op, str) or op not in (*COMPARISONS, "=", "in", "not in"):
        raise ArgumentError(f"{prefix}: the operator must be one of == != < <= > >= in, 'not in'")
    op = "==" if op == "=" else op
    if op in COMPARISONS:
        value = plain(value)
        problem = incomparable(types[column], op, value)
    else:
        value, problem = _list_of_values(types[column], value)
    if problem:
        raise ArgumentError(f"{prefix}: {problem}")
    return (column, op, value)


def _list_of_values(type_: pa.DataType, values: Any) -> tuple[tuple[Any, ...], str | None]:
    try:
        listed = None if isinstance(values, (str, bytes, Mapping)) else list(values)
    except TypeError:
        listed = None
    if listed is None:
        return (), "the value must be a list"
    listed = [plain(value) for value in listed]
    problems = (incomparable(type_, "==", value) for value in listed if value is not None)
    problem = next(filter(None, problems), None)
    # Sorted, so that equal sets give equal tokens.
    return () if problem else tuple(dict.fromkeys(sorted(listed, key=repr))), problem


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) > 0


def _form(filters: Any) -> str:
    return (
        f"filters={shown(filters)}: pass a list of (column, operator, value) tuples, or a list of "
        "such lists of which one must hold, for example [('width', '>=', 512)]"
    )
