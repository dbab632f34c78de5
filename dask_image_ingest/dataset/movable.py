"""Which predicates of a query look at metadata alone, and row by row: these go into the read.

Predicates that are simple enough become filters in normal form (``predicates.py``), which needs no
frame to be judged. The others are evaluated by the frame's library, in the same task.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

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

#: What makes a frame of all rows of another, and what makes one of those that it keeps.
SAME_ROWS = (dx.Assign, dx.Projection, dx.RenameFrame)
FEWER_ROWS = (dx.Filter, dx.Query)

# What the text of a query may be made of, and ask of a column: a mean is that of the rows at hand.
_SYNTAX = (
    *(ast.Expression, ast.Load, ast.Name, ast.Constant, ast.List, ast.Tuple, ast.Compare),
    *(ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.boolop, ast.operator, ast.unaryop, ast.cmpop),
)
_METHODS = {"isin", "isna", "isnull", "notna", "notnull", "between"}
_OF_TEXT = {"contains", "startswith", "endswith", "match", "fullmatch"}
_OF_TEXT |= {"len", "lower", "upper", "strip"}

_QUOTED_NAME = re.compile(r"`[^`]*`")


def computed_filter(
    above: dx.Filter | dx.Query,
    read: dx.Expr,
    types: Mapping[str, pa.DataType],
    backend: BackendName,
) -> ComputedFilter | None:
    """A filter as a task of ``read`` can evaluate it before the decode; None where it can't.

    Columns that were renamed or made of others since the read are made again of what was read.
    """
    if POSITION in types:
        return None
    there = {name: type_ for name, type_ in types.items() if name not in _DECODED}
    rows = Metadata(get_backend(backend).meta(there | {POSITION: pa.int64()}))
    try:
        return _computed(above, _Sources(read, rows, {}))
    except _NotMovable:
        return None


def _computed(above: dx.Filter | dx.Query, sources: _Sources) -> ComputedFilter:
    kept = _kept_by(above.frame, sources)
    if isinstance(above, dx.Query):
        return _computed_query(above, kept, sources)
    predicate = above.predicate
    if predicate.ndim != 1 or "bool" not in str(predicate._meta.dtype):
        raise _NotMovable
    moved = _moved(predicate, kept, sources)
    position = dx.Projection(sources.rows, POSITION)
    return ComputedFilter(dx.Filter(position, moved), _columns(moved), str(moved))


def _computed_query(query: dx.Query, kept: _Filters, sources: _Sources) -> ComputedFilter:
    text = query.operand("_expr")
    if not is_row_by_row(text):
        raise _NotMovable
    rows: dx.Expr = sources.rows
    columns: set[str] = set()
    # No name of a column is in the text where it is not written, though more may seem to be.
    for name in query.frame.columns:
        if str(name) in text:
            if name == POSITION:
                raise _NotMovable
            values = _moved_column(query.frame, name, kept, sources)
            columns.update(_columns(values))
            if not (isinstance(values, dx.Projection) and values.columns == [name]):
                rows = dx.Assign(rows, name, values.optimize(fuse=False))
    asked = dx.Query(rows, text, query.operand("expr_kwargs"))
    return ComputedFilter(dx.Projection(asked, POSITION), tuple(sorted(columns)), text)


def _columns(moved: dx.Expr) -> tuple[str, ...]:
    """The columns of the metadata that an expression looks at."""
    projections = moved.find_operations(dx.Projection)
    return tuple(sorted({name for each in projections for name in each.columns}))


def is_row_by_row(text: object) -> bool:
    """Whether the text of a ``query`` asks each row by itself, of nothing but its columns."""
    if not isinstance(text, str) or "@" in text or "index" in text:
        return False
    try:
        tree = ast.parse(_QUOTED_NAME.sub("name", text).strip(), mode="eval")
    except (SyntaxError, ValueError):
        return False
    return _asks_rows(tree)


def _asks_rows(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        asked, arguments = node.func, [*node.args, *(each.value for each in node.keywords)]
        if not isinstance(asked, ast.Attribute) or not all(map(_asks_rows, arguments)):
            return False
        owner = asked.value
        if isinstance(owner, ast.Attribute) and owner.attr == "str":
            return asked.attr in _OF_TEXT and _asks_rows(owner.value)
        return asked.attr in _METHODS and _asks_rows(owner)
    if isinstance(node, ast.Attribute):  # ``taken.dt.year``
        owner = node.value
        return isinstance(owner, ast.Attribute) and owner.attr == "dt" and _asks_rows(owner.value)
    return isinstance(node, _SYNTAX) and all(map(_asks_rows, ast.iter_child_nodes(node)))


class _NotMovable(Exception):
    """A part of a predicate that can't be evaluated in the task of a read."""


# The filters that some rows have passed.
_Filters: TypeAlias = frozenset[ComputedFilter]


class _Sources(NamedTuple):
    read: dx.Expr
    rows: Metadata
    kept: dict[str, _Filters]


def _kept_by(frame: dx.Expr, sources: _Sources) -> _Filters:
    """The filters between the read and a frame."""
    if frame._name == sources.read._name:
        return frozenset()
    if frame._name not in sources.kept:
        if not isinstance(frame, (*SAME_ROWS, *FEWER_ROWS)):
            raise _NotMovable
        kept = _kept_by(frame.frame, sources)
        if isinstance(frame, FEWER_ROWS):
            kept |= {_computed(frame, sources)}
        sources.kept[frame._name] = kept
    return sources.kept[frame._name]


def _moved(expr: dx.Expr, kept: _Filters, sources: _Sources) -> dx.Expr:
    """A part of a predicate, over metadata in place of the read.

    ``kept`` are the filters that the rows have passed for which it is made.
    """
    if isinstance(expr, dx.Projection):
        if expr.ndim != 1:
            raise _NotMovable
        return _moved_column(expr.frame, expr.columns[0], kept, sources)
    if not isinstance(expr, ROW_BY_ROW):
        raise _NotMovable
    operands = [
        _moved(operand, kept, sources) if isinstance(operand, dx.Expr) else operand
        for operand in expr.operands
    ]
    return type(expr)(*operands)


def _moved_column(frame: dx.Expr, column: Any, kept: _Filters, sources: _Sources) -> dx.Expr:
    """A column of a frame between the read and its filter."""
    if frame._name == sources.read._name:
        if column in _DECODED or column not in sources.rows.columns:
            raise _NotMovable
        return dx.Projection(sources.rows, column)
    # Rows that it lacks are null, or not kept, where it is put beside others.
    if not _kept_by(frame, sources) <= kept:
        raise _NotMovable
    if isinstance(frame, dx.Assign) and column in frame.keys:
        value = dict(zip(frame.keys, frame.vals, strict=True))[column]
        if not isinstance(value, dx.Expr):
            raise _NotMovable
        return _moved(value, _kept_by(frame.frame, sources), sources)
    if isinstance(frame, dx.RenameFrame):
        column = _old_name(frame, column)
    return _moved_column(frame.frame, column, kept, sources)


def _old_name(frame: dx.RenameFrame, column: Any) -> Any:
    renamed = frame.operand("columns")
    if not isinstance(renamed, Mapping):
        raise _NotMovable
    names = [name for name in frame.frame.columns if renamed.get(name, name) == column]
    if len(names) != 1:
        raise _NotMovable
    return names[0]


__all__ = ["FEWER_ROWS", "ROW_BY_ROW", "SAME_ROWS", "computed_filter", "is_row_by_row"]
