"""Lineage of a query: the operations behind each column, and the datasets behind all.

What an operation does to rows and values is told in `operators`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import (
    Concat,
    Merge,
)
from dask_image_ingest.dataset.plan.base_nodes import KeepsResults
from dask_image_ingest.dataset.plan.computed_columns import AppendsColumns
from dask_image_ingest.dataset.plan.operators import (
    COLUMNS_CHANGED,
    RENAMES,
    SELECTS_ROWS,
)
from dask_image_ingest.dataset.plan.scan_node import Dataset, Scan

Columns: TypeAlias = tuple[Any, ...]

#: An expression that made or changed the values of some columns, and their names there.
Change: TypeAlias = tuple[Any, Columns]


def backtrack(expr: Any, columns: Columns) -> Iterator[list[Change]]:
    """Trace the values of some columns back to their origins.

    An operation that is not known, such as a user's function, may change values. A merge that
    combines the columns from different rows changes them, too; where one side of a merge has no
    row, the columns are null, except two keys at most.

    Yields
    ------
    list of (expression, columns)
        For each origin, the expressions that made or changed the values, the last one first; those
        of a checkpoint's query after the checkpoint.
    """
    operands = _unchanged(expr, columns)
    for operand in operands:
        yield from backtrack(*operand)
    if operands:
        return
    below = expr.made_of if isinstance(expr, KeepsResults) else getattr(expr, "frame", None)
    known = isinstance(below, dx.Expr) and {*columns} <= {*below.columns}
    for changes in backtrack(below, columns) if known else [[]]:
        yield [(expr, columns), *changes]


def value_sources(expr: Any, columns: Columns) -> Iterator[Change]:
    """The last expressions that made or changed values, also where their results were stored."""
    for changes in backtrack(expr, columns):
        yield next(change for change in changes if not isinstance(change[0], KeepsResults))


def _unchanged(expr: Any, columns: Columns) -> list[Change]:
    """Operands from which each row's values of the columns come; empty if ``expr`` changes them."""
    names = list(expr.columns)
    if any(names.count(column) != 1 for column in columns):
        return []
    if isinstance(expr, AppendsColumns):
        return [] if expr.added.intersection(columns) else [(expr.frame, columns)]
    if isinstance(expr, SELECTS_ROWS) and expr.dependencies():
        return [(expr.frame, columns)]
    if type(expr) in COLUMNS_CHANGED:
        changed = COLUMNS_CHANGED[type(expr)](expr)
        kept = changed is not None and not {*changed}.intersection(columns)
        return [(expr.frame, columns)] if kept else []
    if isinstance(expr, RENAMES):
        return [(expr.frame, tuple(expr.frame.columns[names.index(name)] for name in columns))]
    if isinstance(expr, dx.Assign):
        return _assigned(expr, columns)
    if isinstance(expr, Concat):
        present = [(frame, set(columns).intersection(frame.columns)) for frame in expr._frames]
        # A frame without the columns contributes nulls, which are no images.
        all_or_none = all(not names or len(names) == len(columns) for _, names in present)
        return [(frame, columns) for frame, names in present if names] if all_or_none else []
    if isinstance(expr, Merge):
        for side in ("left", "right"):
            names_before = tuple(_name_before(expr, side, column) for column in columns)
            if None not in names_before and _is_null_without_row(expr, side, columns):
                return [(getattr(expr, side), names_before)]
    return []


def _assigned(expr: dx.Assign, columns: Columns) -> list[Change]:
    values = dict(zip(expr.keys, expr.vals, strict=True))
    if not values.keys() & set(columns):
        return [(expr.frame, columns)]
    value = values.get(columns[0])
    # Of several columns, the others come from other rows.
    if len(columns) > 1 or not isinstance(value, dx.Expr):
        return []
    series = value.ndim == 1 and len(value.columns) == 1
    return [(value, (value.columns[0],))] if series else []


def _name_before(merge: Merge, side: str, column: Any) -> Any | None:
    """The name that a merge's column has on one side; None if it comes from the other side."""
    own, other, suffix = merge.left.columns, merge.right.columns, merge.suffixes[0]
    if side == "right":
        own, other, suffix = other, own, merge.suffixes[1]
    keys = _shared_keys(merge)
    if column in own and column not in other:
        return column
    if column in keys:
        return column
    name = str(column).removesuffix(suffix) if suffix else column
    in_both = name in own and name in other and name not in keys
    return name if in_both and (name != column or not suffix) else None


def _is_null_without_row(merge: Merge, side: str, columns: Columns) -> bool:
    """True if one of the columns is null wherever that side of a merge has no row.

    Keys then have the values of the other side. One null among the three columns that locate an
    image is enough.
    """
    return merge.how in ("inner", side) or len(_shared_keys(merge).intersection(columns)) < 3


def _shared_keys(merge: Merge) -> set[Any]:
    """Keys with the same name on both sides, which become one column."""
    sides = [on if isinstance(on, list) else [on] for on in (merge.left_on, merge.right_on)]
    pairs = zip(*sides, strict=False)
    return {one for one, other in pairs if isinstance(one, str) and one == other}


def datasets_of(expr: Any) -> Iterator[Dataset]:
    """The datasets that a query reads; none for persisted frames, whose query is gone."""
    for read in expr.find_operations((Scan, KeepsResults)):
        if isinstance(read, KeepsResults):
            yield from datasets_of(read.made_of)
        else:
            yield read.dataset
