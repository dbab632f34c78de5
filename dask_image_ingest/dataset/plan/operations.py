"""Dask's operations: rows kept or moved, columns used, values changed; masks that may run earlier.

An operation that is not listed is a barrier to the optimiser rules of this package.

A mask becomes a `Predicate` of the scan only if Arrow is known to keep the same rows as pandas and
cuDF, whose comparison rules are their own, for every value of the column. The frame's library
evaluates the others after the scan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import is_utf8
from dask_image_ingest.dataset.plan.base_nodes import Condition, FilterRows
from dask_image_ingest.dataset.predicates import (
    MIRRORED,
    Predicate,
    Term,
    all_of,
    any_of,
    limits,
    negated,
    term,
)
from dask_image_ingest.frames import BackendName

#: Operations, of series for the most part, that compute each row from that row alone.
ELEMENTWISE = (
    Condition,
    dx.Abs,
    dx.Apply,
    dx.AsType,
    dx.Between,
    dx.Binop,
    dx.Clip,
    dx.Fillna,
    dx.FunctionMap,
    dx.IsNa,
    dx.Isin,
    dx.Map,
    dx.Mask,
    dx.NotNull,
    dx.PropertyMap,
    dx.Replace,
    dx.Round,
    dx.ToNumeric,
    dx.Unaryop,
    dx.Where,
)

#: Operations on a frame that keep all of its rows.
SAME_ROWS = (dx.Assign, dx.Projection, dx.RenameFrame)

#: Row-wise operations on a frame, which may run before a decode of columns that they don't use.
ROW_WISE = (*SAME_ROWS, dx.AsType, dx.Fillna, dx.Replace, dx.Round, dx.DropnaFrame)

#: Operations that raise for no value; ``astype("int64")``, for example, raises for a null.
RAISES_FOR_NO_ROW = (
    *(dx.EQ, dx.NE, dx.LT, dx.LE, dx.GT, dx.GE),
    *(dx.And, dx.Or, dx.XOr, dx.Invert),
    *(dx.IsNa, dx.NotNull, dx.Isin, dx.Projection),
)

#: Operations that select, reorder or repeat rows or columns, and change no values.
SELECTS_ROWS = (
    FilterRows,
    dx.Filter,
    dx.FilterAlign,
    dx.Head,
    dx.Tail,
    dx.Partitions,
    dx.Sample,
    dx.Split,
    dx.SplitTake,
    dx.Loc,
    dx.LocAlign,
    dx.LocElement,
    dx.LocList,
    dx.LocSlice,
    dx.LocUnknown,
    dx.NLargest,
    dx.Query,
    dx.DropnaFrame,
    dx.DropnaSeries,
    dx._DeepCopy,
    dx.ToBackend,
    dx.ResetIndex,
    dx.ClearDivisions,
    dx.SetDivisions,
    dx.RenameAxis,
    dx.Projection,
    dx.Drop,
    dx.DropDuplicates,
    dx.Repartition,
    dx.ShuffleBase,
    dx.BaseSetIndexSortValues,
)

#: Operations that rename columns, and change no values.
RENAMES = (dx.RenameFrame, dx.AddPrefix, dx.RenameSeries, dx.ToFrame)


def _as_names(columns: object) -> list[Any] | None:
    """Column names as a list; None if one is not a string (an expression, say)."""
    columns = columns if isinstance(columns, list) else [columns]
    return columns if all(isinstance(name, str) for name in columns) else None


_LOCS = (dx.LocElement, dx.LocList, dx.LocSlice, dx.LocUnknown)

#: Operations that select or move rows: see `columns_used`.
MOVES = (
    *_LOCS,
    dx.RearrangeByColumn,
    dx.SortValues,
    dx.SetIndex,
    dx.DropDuplicates,
    dx.NLargest,
    dx.NSmallest,
    dx.NFirst,
    dx.NLast,
    dx.DropnaFrame,
    dx.Repartition,
    dx.Sample,
    dx.Split,
    dx.SplitTake,
    dx.ResetIndex,
)


def columns_used(expr: dx.Expr) -> list[Any] | None:
    """The columns by which one of `MOVES` chooses rows; None if they can't be determined."""
    kind = type(expr)
    if kind is dx.RearrangeByColumn:
        return [] if expr.index_shuffle else _as_names(expr.operand("partitioning_index"))
    if kind is dx.SortValues:
        # A user's sort function may use any column.
        return None if expr.operand("sort_function") is not None else _as_names(expr.by)
    if kind is dx.SetIndex:
        return None if expr.operand("append") else _as_names(expr.operand("_other"))
    if kind in (dx.DropDuplicates, dx.DropnaFrame):
        return _as_names(expr.operand("subset"))
    if kind in (dx.NLargest, dx.NSmallest, dx.NFirst, dx.NLast):
        return _as_names(expr.operand("_columns"))
    if kind is dx.Repartition:
        return [] if expr.operand("partition_size") is None else None
    if kind is dx.Split:
        # Without an integer seed, each computation would draw other rows.
        return [] if isinstance(expr.random_state, int) else None
    if kind in _LOCS:
        labels = expr.iindexer
        plain = not isinstance(labels, dx.Expr) and not callable(labels)
        return [] if plain and expr.cindexer is None else None
    return []


#: Row-wise operations on a frame that may change some columns alone: see `columns_changed`.
CHANGES = (dx.AsType, dx.Fillna, dx.Replace, dx.Round, dx.ExplodeFrame)


def columns_changed(expr: dx.Expr) -> list[Any] | None:
    """The columns whose values one of `CHANGES` may change; None for all."""
    if isinstance(expr, dx.ExplodeFrame):
        return _as_names(expr.operand("column"))
    given = expr.operands[1]
    if not isinstance(given, Mapping):
        return None
    # ``replace({1: 2})`` is about all columns, ``replace({"cls": {1: 2}})`` about one.
    of_values = isinstance(expr, dx.Replace) and not all(
        isinstance(values, Mapping) for values in given.values()
    )
    return None if of_values else list(given)


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


def conjuncts(mask: dx.Expr) -> Iterator[dx.Expr]:
    """The operands of nested ``&``."""
    if isinstance(mask, dx.And):
        yield from conjuncts(mask.left)
        yield from conjuncts(mask.right)
    else:
        yield mask


def is_total(mask: dx.Expr, rows: Sequence[str]) -> bool:
    """True if a mask may run before other conjuncts, on rows that these would drop.

    It is row-wise, cannot raise, and uses no other frame: such a mask may lack these rows. ``rows``
    are the names of the expressions that count as the frame.
    """
    return _consists_of(mask, rows, RAISES_FOR_NO_ROW)


def is_row_wise(mask: dx.Expr, rows: Sequence[str]) -> bool:
    """True if the mask's value for a row depends on that row alone."""
    return _consists_of(mask, rows, (*ELEMENTWISE, dx.Projection))


def _consists_of(mask: dx.Expr, rows: Sequence[str], kinds: tuple[type, ...]) -> bool:
    """True if only operations of these kinds lie between the mask and its frame or scalars."""
    if mask._name in rows:
        return True
    if mask.ndim == 0 and all(node._name not in rows for node in mask.walk()):
        return True
    operands = mask.dependencies()
    return isinstance(mask, kinds) and all(_consists_of(o, rows, kinds) for o in operands)


def over_rows(expr: dx.Expr, rows: Sequence[str], new: dx.Expr) -> dx.Expr:
    """A row-wise expression over ``new`` in place of the expressions named ``rows``.

    Aggregates stay those of all rows.
    """
    if expr._name in rows:
        return new
    if not expr.ndim:
        return expr
    operands = (over_rows(o, rows, new) if isinstance(o, dx.Expr) else o for o in expr.operands)
    return type(expr)(*operands)


def as_predicate(
    mask: dx.Expr, scan: dx.Expr, types: Mapping[str, pa.DataType], backend: BackendName
) -> Predicate | None:
    """Convert a mask over ``scan``; None if Arrow might keep other rows than the library."""
    if isinstance(mask, dx.Invert):
        predicate = as_predicate(mask.frame, scan, types, backend)
        return None if predicate is None else negated(predicate)
    if isinstance(mask, (dx.And, dx.Or)):
        left = as_predicate(mask.left, scan, types, backend)
        right = as_predicate(mask.right, scan, types, backend)
        if left is None or right is None:
            return None
        return (all_of if isinstance(mask, dx.And) else any_of)([left, right])
    if (op := _OPERATORS.get(type(mask))) is not None:
        column, value = _column(mask.left, scan, types), mask.right
        if column is None:
            column, value = _column(mask.right, scan, types), mask.left
            op = MIRRORED.get(op, op)
        constant = None if column is None else _constant(value, types[column], backend)
        return None if column is None or constant is None else term(column, op, constant)
    tests = isinstance(mask, (dx.Isin, dx.IsNa, dx.NotNull))
    column = _column(mask.frame if tests else mask, scan, types)
    if column is None:
        return None
    type_ = types[column]
    if not tests:
        return Term(column, "==", True) if pa.types.is_boolean(type_) else None
    if isinstance(mask, dx.Isin):
        values = _constants(mask.operand("values"), type_)
        return None if values is None else Term(column, "in", values)
    # cuDF treats NaN as missing, too.
    nan_is_null = backend == "cudf" and pa.types.is_floating(type_)
    return Term(column, "is null", nan_is_null, negated=isinstance(mask, dx.NotNull))


def _column(expr: dx.Expr, scan: dx.Expr, types: Mapping[str, pa.DataType]) -> str | None:
    if not isinstance(expr, dx.Projection) or expr.frame._name != scan._name or expr.ndim != 1:
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


def _is_text(value: object) -> bool:
    return type(value) is str and is_utf8(value)


def _constants(values: object, type_: pa.DataType) -> tuple[Any, ...] | None:
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
