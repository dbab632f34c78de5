"""Where the images of a lazy frame come from: the expressions that make them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import (
    BaseSetIndexSortValues,
    Concat,
    DropDuplicates,
    Merge,
    Repartition,
    ShuffleBase,
)
from dask_image_ingest.dataset.adds_columns import AddsColumns

__all__ = ["image_sources"]

# Expressions that select or reorder rows or columns, and change no values.
_SELECTS_ROWS = (
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
    DropDuplicates,
    Repartition,
    ShuffleBase,
    BaseSetIndexSortValues,
)
_RENAMES = (dx.RenameFrame, dx.AddPrefix, dx.RenameSeries, dx.ToFrame)


def image_sources(expr: Any, column: Any) -> Iterator[tuple[Any, Any]]:
    """The expressions that make the values of a column, each with its name there.

    One that is not listed here, such as a user's function, may change the images: it makes them.
    """
    columns = list(expr.columns)
    below: list[tuple[Any, Any]] = []
    if columns.count(column) != 1:
        pass
    elif isinstance(expr, AddsColumns):
        below = [] if column in expr.added else [(expr.frame, column)]
    elif isinstance(expr, _SELECTS_ROWS):
        below = [(expr.frame, column)]
    elif isinstance(expr, _RENAMES):
        below = [(expr.frame, expr.frame.columns[columns.index(column)])]
    elif isinstance(expr, dx.Assign):
        below = _assigned(expr, column)
    elif isinstance(expr, Concat):
        # A frame without the column adds nulls, which are no images.
        below = [(frame, column) for frame in expr._frames if column in frame.columns]
    elif isinstance(expr, Merge):
        below = _merged(expr, column)
    if not below:
        yield expr, column
    for each in below:
        yield from image_sources(*each)


def _assigned(expr: dx.Assign, column: Any) -> list[tuple[Any, Any]]:
    values = dict(zip(expr.keys, expr.vals, strict=True))
    if column not in values:
        return [(expr.frame, column)]
    value = values[column]
    series = isinstance(value, dx.Expr) and value.ndim == 1 and len(value.columns) == 1
    return [(value, value.columns[0])] if series else []


def _merged(expr: Merge, column: Any) -> list[tuple[Any, Any]]:
    left, right = expr.left.columns, expr.right.columns
    if column in left and column not in right:
        return [(expr.left, column)]
    if column in right and column not in left:
        return [(expr.right, column)]
    for side, suffix in zip((expr.left, expr.right), expr.suffixes, strict=True):
        name = str(column).removesuffix(suffix or "")
        if suffix and name != column and name in left and name in right:
            return [(side, name)]
    return []
