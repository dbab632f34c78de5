"""Lineage: the expressions that make the values of a column, and the datasets of a query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import (
    Concat,
    Merge,
)
from dask_image_ingest.dataset.plan.nodes import AppendsColumns
from dask_image_ingest.dataset.plan.operators import RENAMES, SELECTS_ROWS
from dask_image_ingest.dataset.plan.scan_node import Dataset, Scan

Columns = tuple[Any, ...]


def image_sources(expr: Any, column: Any) -> Iterator[tuple[Any, Any]]:
    """The expressions that make the values of a column, each with its name there.

    One that is not listed here, such as a user's function, may change the images: it makes them.
    """
    for source, (name,) in value_sources(expr, (column,)):
        yield source, name


def value_sources(expr: Any, columns: Columns) -> Iterator[tuple[Any, Columns]]:
    """The expressions that make the values of some columns, row by row, with their names there.

    An expression that brings together columns of different rows, as a merge may, makes them. Where
    it has no row of theirs they are null, but for two at most that are its keys.
    """
    below = _below(expr, columns)
    if not below:
        yield expr, columns
    for each in below:
        yield from value_sources(*each)


def _below(expr: Any, columns: Columns) -> list[tuple[Any, Columns]]:
    """The operands that all values of some columns come from, row by row; none if it makes them."""
    names = list(expr.columns)
    if any(names.count(column) != 1 for column in columns):
        return []
    if isinstance(expr, AppendsColumns):
        return [] if expr.added.intersection(columns) else [(expr.frame, columns)]
    if isinstance(expr, SELECTS_ROWS):
        return [(expr.frame, columns)]
    if isinstance(expr, RENAMES):
        return [(expr.frame, tuple(expr.frame.columns[names.index(name)] for name in columns))]
    if isinstance(expr, dx.Assign):
        return _assigned(expr, columns)
    if isinstance(expr, Concat):
        there = [(frame, set(columns).intersection(frame.columns)) for frame in expr._frames]
        # A frame without the columns adds nulls, which are no images.
        whole = all(not found or len(found) == len(columns) for _, found in there)
        return [(frame, columns) for frame, found in there if found] if whole else []
    if isinstance(expr, Merge):
        for side in ("left", "right"):
            before = tuple(_name_before(expr, side, column) for column in columns)
            if None not in before and _lacks_absent(expr, side, columns):
                return [(getattr(expr, side), before)]
    return []


def _assigned(expr: dx.Assign, columns: Columns) -> list[tuple[Any, Columns]]:
    values = dict(zip(expr.keys, expr.vals, strict=True))
    if not values.keys() & set(columns):
        return [(expr.frame, columns)]
    value = values.get(columns[0])
    # Several columns would be those of other rows, or partly so.
    if len(columns) > 1 or not isinstance(value, dx.Expr):
        return []
    series = value.ndim == 1 and len(value.columns) == 1
    return [(value, (value.columns[0],))] if series else []


def _name_before(merge: Merge, side: str, column: Any) -> Any | None:
    """The name of a merge's column on one side; None if its values are not of that side."""
    mine, other, suffix = merge.left.columns, merge.right.columns, merge.suffixes[0]
    if side == "right":
        mine, other, suffix = other, mine, merge.suffixes[1]
    keys = _shared_keys(merge)
    if column in mine and column not in other:
        return column
    if column in keys:
        return column
    name = str(column).removesuffix(suffix) if suffix else column
    found = name in mine and name in other and name not in keys
    return name if found and (name != column or not suffix) else None


def _lacks_absent(merge: Merge, side: str, columns: Columns) -> bool:
    """True if columns of one side of a merge lack values where that side has no row.

    Keys have those of the other side there. Of the three columns that say where an image is, one
    without a value is enough.
    """
    return merge.how in ("inner", side) or len(_shared_keys(merge).intersection(columns)) < 3


def _shared_keys(merge: Merge) -> set[Any]:
    """The columns of both sides of which a merge makes one."""
    sides = [on if isinstance(on, list) else [on] for on in (merge.left_on, merge.right_on)]
    pairs = zip(*sides, strict=False)
    return {one for one, other in pairs if isinstance(one, str) and one == other}


class KeepsResults(dx.Expr):
    """An expression that reads what a query has given before."""

    @property
    def made_of(self) -> Any:
        """The expression of that query."""
        raise NotImplementedError


def datasets_of(expr: Any) -> Iterator[Dataset]:
    """The datasets that an expression is made of; of one that was computed nothing is known."""
    for read in expr.find_operations((Scan, KeepsResults)):
        if isinstance(read, KeepsResults):
            yield from datasets_of(read.made_of)
        else:
            yield read.dataset


def shard_of_partition(expr: Any, number: int) -> str | None:
    """The shard that a partition is read from; None where it has no one shard of its own."""
    reads = list(expr.find_operations(Scan))
    if len(reads) != 1 or reads[0].npartitions != expr.npartitions:
        return None
    (url, *_), *others = reads[0].row_sources[number]
    return None if others else url
