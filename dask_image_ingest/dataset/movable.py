"""Which predicates of a query look at metadata alone, and row by row: these go into the read.

Predicates that are simple enough become filters in normal form (``predicates.py``), which needs no
frame to be judged. The others are evaluated by the frame's library, in the same task.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.computed import POSITION, ComputedFilter, Metadata
from dask_image_ingest.frames import BackendName, get_backend

# The expressions that use each one, by its name, as dask's optimiser has them.
_Dependents: TypeAlias = Mapping[str, Collection[Any]]

# Columns that are there only after a decode.
_DECODED = frozenset({"image", "error"})

# What looks at each row by itself, and changes no labels.
_ROW_BY_ROW = (
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
    predicate: dx.Expr,
    read: dx.Expr,
    types: Mapping[str, pa.DataType],
    backend: BackendName,
    assigned: dx.Expr | None = None,
) -> ComputedFilter | None:
    """A predicate over ``read`` as a task can evaluate it before the decode; None where it can't.

    ``assigned`` is a ``dx.Assign`` over ``read``, where the predicate is one over that.
    """
    if predicate.ndim != 1 or "bool" not in str(predicate._meta.dtype):
        return None
    metadata = _metadata(types, backend)
    columns: set[str] = set()
    try:
        moved = _moved(predicate, _Sources(read, assigned, metadata, columns))
    except _NotMovable:
        return None
    kept = dx.Filter(dx.Projection(metadata, POSITION), moved)
    return ComputedFilter(kept, tuple(sorted(columns)), str(moved))


def computed_query(
    query: dx.Query, types: Mapping[str, pa.DataType], backend: BackendName
) -> ComputedFilter | None:
    """The same of the text of a ``query``."""
    text = query.operand("_expr")
    if not isinstance(text, str) or "@" in text or "index" in text:
        return None
    if not all(_MAY_BE_CALLED.fullmatch(name) for name in _CALLED.findall(text)):
        return None
    # No name of a column is in the text where it is not written, though more may seem to be.
    columns = [name for name in types if name in text]
    if _DECODED.intersection(columns):
        return None
    metadata = _metadata(types, backend)
    kept = dx.Query(metadata, text, query.operand("expr_kwargs"))
    kept = dx.Projection(kept, POSITION)
    return ComputedFilter(kept, tuple(columns), text)


def computed_above(
    read: dx.Expr,
    dependents: _Dependents,
    types: Mapping[str, pa.DataType],
    backend: BackendName,
) -> ComputedFilter | None:
    """A filter by new columns over ``read``, where whatever uses the read uses it through that."""
    parents = _above(read, dependents)
    frames = [read, *(each for each in parents if isinstance(each, dx.Projection))]
    for frame in frames:
        for assign in _above(frame, dependents):
            if not isinstance(assign, dx.Assign) or assign.frame._name != frame._name:
                continue
            for above in _above(assign, dependents):
                if not isinstance(above, dx.Filter) or above.frame._name != assign._name:
                    continue
                if all_through(read, above, dependents) and all(
                    _is_row_by_row(value, read) for value in assign.vals
                ):
                    return computed_filter(above.predicate, read, types, backend, assign)
    return None


def _is_row_by_row(value: Any, read: dx.Expr) -> bool:
    """Whether a new column is the same for a row, whichever others are there."""
    if not isinstance(value, dx.Expr):
        return True
    if isinstance(value, dx.Projection):
        return value.frame._name == read._name
    return isinstance(value, _ROW_BY_ROW) and all(
        _is_row_by_row(operand, read) for operand in value.operands
    )


def all_through(expr: dx.Expr, target: dx.Expr, dependents: _Dependents) -> bool:
    """Whether whatever uses ``expr`` uses it through ``target``."""
    seen = {target._name}
    left = [expr]
    while left:
        node = left.pop()
        if node._name not in seen:
            seen.add(node._name)
            above = _above(node, dependents)
            if not above:
                return False
            left += above
    return True


def is_dependent(parent: dx.Expr, expr: dx.Expr, dependents: _Dependents) -> bool:
    """Whether ``parent`` is among the known dependents of ``expr``.

    The optimiser looks for these before each of its rounds. What it makes within a round, such as
    the index of a filtered frame whose length is asked for, is among them from the next one on:
    only then is it known which columns others need of the same read.
    """
    return any(above._name == parent._name for above in _above(expr, dependents))


def _above(expr: dx.Expr, dependents: _Dependents) -> list[dx.Expr]:
    above = (parent() for parent in dependents[expr._name])
    return [parent for parent in above if parent is not None]


class _NotMovable(Exception):
    """A part of a predicate that can't be evaluated in the task of a read."""


@dataclass(frozen=True)
class _Sources:
    read: dx.Expr
    assigned: dx.Expr | None
    metadata: Metadata
    columns: set[str]


def _metadata(types: Mapping[str, pa.DataType], backend: BackendName) -> Metadata:
    there = {name: type_ for name, type_ in types.items() if name not in _DECODED}
    return Metadata(get_backend(backend).meta(there | {POSITION: pa.int64()}))


def _moved(expr: dx.Expr, sources: _Sources) -> dx.Expr:
    """A part of a predicate, over metadata in place of the read."""
    if isinstance(expr, dx.Projection):
        return _moved_column(expr, sources)
    if not isinstance(expr, _ROW_BY_ROW):
        raise _NotMovable
    operands = [
        _moved(operand, sources) if isinstance(operand, dx.Expr) else operand
        for operand in expr.operands
    ]
    return type(expr)(*operands)


def _moved_column(expr: dx.Projection, sources: _Sources) -> dx.Expr:
    frame, column = expr.frame, expr.operand("columns")
    if expr.ndim != 1:
        raise _NotMovable
    column = column[0] if isinstance(column, list) else column
    assigned = sources.assigned
    if assigned is not None and frame._name == assigned._name:
        values = dict(zip(assigned.keys, assigned.vals, strict=True))
        if column in values:
            if not isinstance(values[column], dx.Expr):
                raise _NotMovable
            return _moved(values[column], sources)
    elif frame._name != sources.read._name:
        raise _NotMovable
    if column in _DECODED or column not in sources.metadata.columns:
        raise _NotMovable
    sources.columns.add(column)
    return dx.Projection(sources.metadata, column)


__all__ = ["all_through", "computed_above", "computed_filter", "computed_query", "is_dependent"]
