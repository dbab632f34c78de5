"""Expressions that look at each row by itself, and texts of queries that do."""

from __future__ import annotations

import ast
import re

from dask_image_ingest import dask_internals as dx

__all__ = ["FEWER_ROWS", "ROW_BY_ROW", "SAME_ROWS", "is_row_by_row"]

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
