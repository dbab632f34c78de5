"""Which predicates of a query look at metadata alone, and row by row: these go into the read.

Predicates that are simple enough become filters in normal form (``predicates.py``), which needs no
frame to be judged. The others are evaluated by the frame's library, in the same task.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.computed import POSITION, ComputedFilter, Metadata
from dask_image_ingest.frames import BackendName, get_backend

# Columns that are there only after a decode.
_DECODED = frozenset({"image", "error"})

#: What looks at each row by itself, and changes no labels.
ROW_BY_ROW = (
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

# Functions that the text of a query may call: a mean of a column is that of the rows at hand.
_CALLED = re.compile(r"([\w.]*)\s*\(")
_MAY_BE_CALLED = re.compile(
    r"(|and|or|not|in|.*\.(isin|isna|isnull|notna|notnull|between)"
    r"|.*\.str\.(contains|startswith|endswith|match|fullmatch|len|lower|upper|strip))"
)


def computed_filter(
    above: dx.Filter | dx.Query,
    read: dx.Expr,
    types: Mapping[str, pa.DataType],
    backend: BackendName,
) -> ComputedFilter | None:
    """A filter as a task of ``read`` can evaluate it before the decode; None where it can't.

    Columns that were renamed or made of others since the read are made again of what was read.
    """
    there = {name: type_ for name, type_ in types.items() if name not in _DECODED}
    rows = Metadata(get_backend(backend).meta(there | {POSITION: pa.int64()}))
    sources = _Sources(read, rows, set())
    try:
        if isinstance(above, dx.Query):
            return _computed_query(above, sources)
        return _computed_predicate(above.predicate, sources)
    except _NotMovable:
        return None


def _computed_predicate(predicate: dx.Expr, sources: _Sources) -> ComputedFilter:
    if predicate.ndim != 1 or "bool" not in str(predicate._meta.dtype):
        raise _NotMovable
    moved = _moved(predicate, sources)
    kept = dx.Filter(dx.Projection(sources.rows, POSITION), moved)
    return ComputedFilter(kept, tuple(sorted(sources.columns)), str(moved))


def _computed_query(query: dx.Query, sources: _Sources) -> ComputedFilter:
    text = query.operand("_expr")
    if not is_row_by_row(text):
        raise _NotMovable
    rows = sources.rows
    # No name of a column is in the text where it is not written, though more may seem to be.
    for name in query.frame.columns:
        if str(name) in text:
            values = _moved_column(query.frame, name, sources)
            if not (isinstance(values, dx.Projection) and values.columns == [name]):
                rows = dx.Assign(rows, name, values.optimize(fuse=False))
    kept = dx.Projection(dx.Query(rows, text, query.operand("expr_kwargs")), POSITION)
    return ComputedFilter(kept, tuple(sorted(sources.columns)), text)


def is_row_by_row(text: object) -> bool:
    """Whether the text of a ``query`` asks each row by itself, of nothing but its columns."""
    if not isinstance(text, str) or "@" in text or "index" in text:
        return False
    return all(_MAY_BE_CALLED.fullmatch(name) for name in _CALLED.findall(text))


class _NotMovable(Exception):
    """A part of a predicate that can't be evaluated in the task of a read."""


class _Sources(NamedTuple):
    read: dx.Expr
    rows: Metadata
    columns: set[str]


def _moved(expr: dx.Expr, sources: _Sources) -> dx.Expr:
    """A part of a predicate, over metadata in place of the read."""
    if isinstance(expr, dx.Projection):
        if expr.ndim != 1:
            raise _NotMovable
        return _moved_column(expr.frame, expr.columns[0], sources)
    if not isinstance(expr, ROW_BY_ROW):
        raise _NotMovable
    operands = [
        _moved(operand, sources) if isinstance(operand, dx.Expr) else operand
        for operand in expr.operands
    ]
    return type(expr)(*operands)


def _moved_column(frame: dx.Expr, column: Any, sources: _Sources) -> dx.Expr:
    """A column of a frame between the read and its filter."""
    if frame._name == sources.read._name:
        if column in _DECODED or column not in sources.rows.columns:
            raise _NotMovable
        sources.columns.add(column)
        return dx.Projection(sources.rows, column)
    if isinstance(frame, dx.Assign) and column in frame.keys:
        value = dict(zip(frame.keys, frame.vals, strict=True))[column]
        if not isinstance(value, dx.Expr):
            raise _NotMovable
        return _moved(value, sources)
    if isinstance(frame, dx.RenameFrame):
        return _moved_column(frame.frame, _old_name(frame, column), sources)
    if isinstance(frame, (dx.Assign, dx.Filter, dx.Projection, dx.Query)):
        return _moved_column(frame.frame, column, sources)
    raise _NotMovable


def _old_name(frame: dx.RenameFrame, column: Any) -> Any:
    renamed = frame.operand("columns")
    if not isinstance(renamed, Mapping):
        raise _NotMovable
    names = [name for name in frame.frame.columns if renamed.get(name, name) == column]
    if len(names) != 1:
        raise _NotMovable
    return names[0]


__all__ = ["ROW_BY_ROW", "computed_filter", "is_row_by_row"]
