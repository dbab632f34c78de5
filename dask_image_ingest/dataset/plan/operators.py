"""The table of Dask's operations: rows kept or moved, columns looked at, values changed.

All rules of this package ask here, and an operation that is not listed is a barrier to them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

from dask_image_ingest import dask_internals as dx

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

#: What a decode may always come after: it looks at each row by itself.
ROW_WISE = (*SAME_ROWS, dx.Query, dx.DropnaFrame)

#: What raises for no row, whatever is in it, as astype("int64") does of a null.
RAISES_FOR_NO_ROW = (
    *(dx.EQ, dx.NE, dx.LT, dx.LE, dx.GT, dx.GE),
    *(dx.And, dx.Or, dx.XOr, dx.Invert),
    *(dx.IsNa, dx.NotNull, dx.Isin, dx.Projection),
)

#: What selects or reorders rows or columns, and changes no values.
SELECTS_ROWS = (
    dx.Filter,
    dx.FilterAlign,
    dx.Head,
    dx.Tail,
    dx.Partitions,
    dx.Sample,
    dx.Query,
    dx.DropnaFrame,
    dx.DropnaSeries,
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

#: What gives columns other names, and changes no values.
RENAMES = (dx.RenameFrame, dx.AddPrefix, dx.RenameSeries, dx.ToFrame)

#: What keeps labels, and moves rows to other partitions.
MOVES_ROWS: Final = (
    dx.Concat,
    dx.DropDuplicates,
    dx.RearrangeByColumn,
    dx.Repartition,
    dx.ShuffleBase,
    dx.SortValues,
)

# What the text of a query may be made of, and ask of a column: a mean is that of the rows at hand.
_SYNTAX = (
    *(ast.Expression, ast.Load, ast.Name, ast.Constant, ast.List, ast.Tuple, ast.Compare),
    *(ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.boolop, ast.operator, ast.unaryop, ast.cmpop),
)
_METHODS = {"isin", "isna", "isnull", "notna", "notnull", "between"}
_OF_TEXT = {"contains", "startswith", "endswith", "match", "fullmatch"}
_OF_TEXT |= {"len", "lower", "upper", "strip"}

_QUOTED_NAME = re.compile(r"`[^`]*`")


def is_row_by_row(text: object) -> bool:
    """True if the text of a ``query`` asks each row by itself, of nothing but its columns."""
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


_Columns: TypeAlias = Iterable[Any] | None


def _listed(columns: Any) -> list[Any] | None:
    """Names of columns, None where there is something else."""
    columns = columns if isinstance(columns, list) else [columns]
    return columns if all(isinstance(name, str) for name in columns) else None


def _by_shuffle(expr: dx.Expr) -> _Columns:
    return [] if expr.index_shuffle else _listed(expr.operand("partitioning_index"))


def _by_sort(expr: dx.Expr) -> _Columns:
    # A function of the user's own may look at all that is there.
    return None if expr.operand("sort_function") is not None else _listed(expr.by)


def _by_index(expr: dx.Expr) -> _Columns:
    return None if expr.operand("append") else _listed(expr.operand("_other"))


def _by_size(expr: dx.Expr) -> _Columns:
    return [] if expr.operand("partition_size") is None else None


def _by_label(expr: dx.Expr) -> _Columns:
    labels = expr.iindexer
    plain = not isinstance(labels, dx.Expr) and not callable(labels)
    return [] if plain and expr.cindexer is None else None


def _by_seed(expr: dx.Expr) -> _Columns:
    # With no number as the seed, each split of a frame would be another one.
    return [] if isinstance(expr.random_state, int) else None


def _by_words(expr: dx.Expr) -> _Columns:
    text = expr.operand("_expr")
    # No name of a column is in the text where it is not written, though more may seem to be.
    return [n for n in expr.frame.columns if n in text] if isinstance(text, str) else None


def _nothing(_: dx.Expr) -> _Columns:
    return []


#: The columns that an operation looks at to choose or move rows; None where nobody can tell.
COLUMNS_LOOKED_AT: dict[type, Callable[[Any], _Columns]] = {
    dx.RearrangeByColumn: _by_shuffle,
    dx.SortValues: _by_sort,
    dx.SetIndex: _by_index,
    dx.DropDuplicates: lambda expr: _listed(expr.operand("subset")),
    dx.NLargest: lambda expr: _listed(expr.operand("_columns")),
    dx.NSmallest: lambda expr: _listed(expr.operand("_columns")),
    dx.NFirst: lambda expr: _listed(expr.operand("_columns")),
    dx.NLast: lambda expr: _listed(expr.operand("_columns")),
    dx.DropnaFrame: lambda expr: _listed(expr.operand("subset")),
    dx.Query: _by_words,
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
