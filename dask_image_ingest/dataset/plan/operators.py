"""Table of Dask's operations: rows kept or moved, columns used, values changed.

All optimiser rules of this package use it; an operation that is not listed is a barrier to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.plan.base_nodes import Condition, FilterRows

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

#: Row-wise operations on a frame that may change some columns alone: see `COLUMNS_CHANGED`.
CHANGES = (dx.AsType, dx.Fillna, dx.Replace, dx.Round)

#: Row-wise operations on a frame, which may run before a decode of columns that they don't use.
ROW_WISE = (*SAME_ROWS, *CHANGES, dx.Query, dx.DropnaFrame)

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

# What a ``query`` may ask other rows by: attributes such as ``width.max()``, labels, and objects of
# the caller.
_ASKS_MORE_ROWS = re.compile(r"\.\s*[^\W\d]|@|index")
_QUOTED_NAME = re.compile("`[^`]*`")


def is_row_wise_query(text: object) -> bool:
    """True if the text of a ``query`` is surely about each row alone."""
    return isinstance(text, str) and not _ASKS_MORE_ROWS.search(_QUOTED_NAME.sub("", text))


_Columns: TypeAlias = Iterable[Any] | None


def _as_names(columns: Any) -> list[Any] | None:
    """Column names as a list; None if one is not a string (an expression, say)."""
    columns = columns if isinstance(columns, list) else [columns]
    return columns if all(isinstance(name, str) for name in columns) else None


def _by_shuffle(expr: dx.Expr) -> _Columns:
    return [] if expr.index_shuffle else _as_names(expr.operand("partitioning_index"))


def _by_sort(expr: dx.Expr) -> _Columns:
    # A user's sort function may use any column.
    return None if expr.operand("sort_function") is not None else _as_names(expr.by)


def _by_index(expr: dx.Expr) -> _Columns:
    return None if expr.operand("append") else _as_names(expr.operand("_other"))


def _by_size(expr: dx.Expr) -> _Columns:
    return [] if expr.operand("partition_size") is None else None


def _by_label(expr: dx.Expr) -> _Columns:
    labels = expr.iindexer
    plain = not isinstance(labels, dx.Expr) and not callable(labels)
    return [] if plain and expr.cindexer is None else None


def _by_seed(expr: dx.Expr) -> _Columns:
    # Without an integer seed, each computation would draw other rows.
    return [] if isinstance(expr.random_state, int) else None


def _by_text(expr: dx.Expr) -> _Columns:
    text = expr.operand("_expr")
    # A superset: a name that occurs in the text may also be part of a longer one.
    return [n for n in expr.frame.columns if n in text] if isinstance(text, str) else None


def _nothing(_: dx.Expr) -> _Columns:
    return []


#: The columns by which an operation selects or moves rows; None if they can't be determined.
COLUMNS_USED: dict[type, Callable[[Any], _Columns]] = {
    dx.RearrangeByColumn: _by_shuffle,
    dx.SortValues: _by_sort,
    dx.SetIndex: _by_index,
    dx.DropDuplicates: lambda expr: _as_names(expr.operand("subset")),
    dx.NLargest: lambda expr: _as_names(expr.operand("_columns")),
    dx.NSmallest: lambda expr: _as_names(expr.operand("_columns")),
    dx.NFirst: lambda expr: _as_names(expr.operand("_columns")),
    dx.NLast: lambda expr: _as_names(expr.operand("_columns")),
    dx.DropnaFrame: lambda expr: _as_names(expr.operand("subset")),
    dx.Query: _by_text,
    dx.Repartition: _by_size,
    dx.Sample: _nothing,
    dx.Split: _by_seed,
    dx.SplitTake: _nothing,
    dx.LocElement: _by_label,
    dx.LocList: _by_label,
    dx.LocSlice: _by_label,
    dx.LocUnknown: _by_label,
    dx.ResetIndex: _nothing,
}


def _keys(mapping: Any) -> _Columns:
    return list(mapping) if isinstance(mapping, Mapping) else None


def _keys_of_nested(mapping: Any) -> _Columns:
    # ``replace({1: 2})`` is about all columns, ``replace({"cls": {1: 2}})`` about one.
    nested = _keys(mapping) is not None and all(isinstance(v, Mapping) for v in mapping.values())
    return _keys(mapping) if nested else None


#: The columns whose values an operation on a frame may change; None for all.
COLUMNS_CHANGED: dict[type, Callable[[Any], _Columns]] = {
    dx.AsType: lambda expr: _keys(expr.operand("dtypes")),
    dx.Fillna: lambda expr: _keys(expr.operand("value")),
    dx.Round: lambda expr: _keys(expr.operand("decimals")),
    dx.Replace: lambda expr: _keys_of_nested(expr.operand("to_replace")),
    dx.ExplodeFrame: lambda expr: _as_names(expr.operand("column")),
}
