"""Convert predicates of a query to filters of its scan, if both keep the same rows.

pandas and cuDF have comparison rules of their own. A predicate is converted only if Arrow is known
to agree for every value of the column; the frame's library evaluates the rest after the scan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import is_utf8
from dask_image_ingest.dataset import filters as dnf
from dask_image_ingest.dataset.filters import MIRRORED, NEGATED, Filters, Predicate, limits
from dask_image_ingest.frames import BackendName

_OPERATORS: dict[type, str] = {
    dx.EQ: "==",
    dx.NE: "!=",
    dx.LT: "<",
    dx.LE: "<=",
    dx.GT: ">",
    dx.GE: ">=",
}

# Longest list of an ``isin`` to convert: each task carries its filters.
_MOST_VALUES = 10_000

# Largest magnitude up to which a float type represents every integer.
_EXACT_INTEGERS = {pa.float32(): 2**24, pa.float64(): 2**53}


def as_filters(
    predicate: dx.Expr,
    read: dx.Expr,
    types: Mapping[str, pa.DataType],
    backend: BackendName,
    negated: bool = False,
) -> Filters | None:
    """Convert a predicate over ``read`` to disjunctive normal form; None if it is not supported.

    Negation is pushed to the comparisons. That is valid with nulls: a comparison with null is null,
    so is its negation, and neither keeps the row.
    """
    if isinstance(predicate, dx.Invert):
        return as_filters(predicate.frame, read, types, backend, not negated)
    if isinstance(predicate, (dx.And, dx.Or)):
        left = as_filters(predicate.left, read, types, backend, negated)
        right = as_filters(predicate.right, read, types, backend, negated)
        if left is None or right is None:
            return None
        conjunction = isinstance(predicate, dx.And) is not negated
        return dnf.both(left, right) if conjunction else dnf.either(left, right)
    simple = _simple_predicate(predicate, read, types, backend)
    if simple is None:
        return None
    column, op, value = simple
    if negated and op[0] in "<>" and pa.types.is_floating(types[column]):
        # NaN is neither less than a number nor greater or equal.
        op = f"not {op}"
    elif negated:
        op = NEGATED[op]
    return (((column, op, value),),)


def _simple_predicate(
    predicate: dx.Expr, read: dx.Expr, types: Mapping[str, pa.DataType], backend: BackendName
) -> Predicate | None:
    op = _OPERATORS.get(type(predicate))
    if op is not None:
        column, value = _column(predicate.left, read, types), predicate.right
        if column is None:
            column, value = _column(predicate.right, read, types), predicate.left
            op = MIRRORED.get(op, op)
        constant = None if column is None else _constant(value, types[column], backend)
        return None if column is None or constant is None else (column, op, constant)
    if isinstance(predicate, dx.Isin):
        column = _column(predicate.frame, read, types)
        values = None if column is None else _constants(predicate.operand("values"), types[column])
        return None if column is None or values is None else (column, "in", values)
    if (mask := _column(predicate, read, types)) is not None:
        return (mask, "==", True) if pa.types.is_boolean(types[mask]) else None
    if isinstance(predicate, (dx.IsNa, dx.NotNull)):
        column = _column(predicate.frame, read, types)
        if column is None:
            return None
        # cuDF treats NaN as missing, too.
        nan_is_null = backend == "cudf" and pa.types.is_floating(types[column])
        return (column, "is null" if isinstance(predicate, dx.IsNa) else "not null", nan_is_null)
    return None


def _column(expr: Any, read: dx.Expr, types: Mapping[str, pa.DataType]) -> str | None:
    if not isinstance(expr, dx.Projection) or expr.frame._name != read._name or expr.ndim != 1:
        return None
    column = expr.operand("columns")
    column = column[0] if isinstance(column, list) else column
    return column if column in types else None


def _constant(value: Any, type_: pa.DataType, backend: BackendName) -> Any:
    """A constant as a Python value; None if comparing with it may differ between libraries."""
    if isinstance(value, (np.bool_, np.integer, np.float32, np.float64, np.str_)):
        value = value.item()
    if pa.types.is_integer(type_):
        # Of mixed types, pandas and cuDF may compare both sides as float64.
        same = type(value) is int and type_ != pa.uint64()
        agreed = -(2**63) <= value < 2**63 if same else _is_exact_double(value)
        return value if agreed else None
    if type_ in _EXACT_INTEGERS:
        if type(value) is int:
            return value if abs(value) <= _EXACT_INTEGERS[type_] else None
        if type(value) is not float or math.isnan(value):
            return None
        # cuDF compares in the column's type, pandas in the wider type of the two.
        return float(np.float32(value)) if backend == "cudf" and type_ == pa.float32() else value
    if pa.types.is_boolean(type_):
        return value if type(value) is bool else None
    if pa.types.is_string(type_):
        return value if _is_text(value) else None
    return None


def _is_exact_double(value: Any) -> bool:
    """True if comparing integers with this constant as float64 is exact."""
    return type(value) in (int, float) and (abs(value) < 2**53 or value in (math.inf, -math.inf))


def _is_text(value: Any) -> bool:
    return type(value) is str and is_utf8(value)


def _constants(values: Any, type_: pa.DataType) -> tuple[Any, ...] | None:
    """The list of an ``isin``; None if the frame's library may interpret it differently."""
    # Dask wraps the list in a graph, of one node if the list holds no other collection.
    if not isinstance(values, dx._DelayedExpr) or len(values.obj.dask) != 1:
        return None
    values = values.obj.compute(scheduler="synchronous")
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, (list, tuple, set, frozenset)) or not 0 < len(values) <= _MOST_VALUES:
        return None
    listed = list(values)
    if pa.types.is_integer(type_):
        lowest, highest = limits(type_)
        highest = min(highest, 2**63 - 1)  # the largest that pandas takes
        agreed = all(type(v) is int and lowest <= v <= highest for v in listed)
    else:
        agreed = pa.types.is_string(type_) and all(map(_is_text, listed))
    return tuple(sorted(listed)) if agreed else None
