"""Lineage: the expressions that created a column's values, and the datasets of a query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import (
    Concat,
    Merge,
)
from dask_image_ingest.dataset.plan.nodes import AppendsColumns
from dask_image_ingest.dataset.plan.operators import COLUMNS_CHANGED, RENAMES, SELECTS_ROWS
from dask_image_ingest.dataset.plan.scan_node import Dataset, Scan

Columns = tuple[Any, ...]


def image_sources(expr: Any, column: Any) -> Iterator[tuple[Any, Any]]:
    """The expressions that created the values of a column, each with the column's name there.

    An operation that is not known, such as a user's function, may change images: it counts as
    their source.
    """
    for source, (name,) in value_sources(expr, (column,)):
        yield source, name


def value_sources(expr: Any, columns: Columns) -> Iterator[tuple[Any, Columns]]:
    """The expressions that created the values of some columns together, with their names there.

    A merge that combines the columns from different rows counts as their source. Where one side of
    a merge has no row, the columns are null, except two keys at most.
    """
    operands = _operand_sources(expr, columns)
    if not operands:
        yield expr, columns
    for operand in operands:
        yield from value_sources(*operand)


def _operand_sources(expr: Any, columns: Columns) -> list[tuple[Any, Columns]]:
    """Operands from which each row's values of the columns come; empty if ``expr`` created them."""
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


def _assigned(expr: dx.Assign, columns: Columns) -> list[tuple[Any, Columns]]:
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


class KeepsResults(dx.Expr):
    """Base of expressions that read the stored results of a query."""

    @property
    def made_of(self) -> Any:
        """The query whose results they are."""
        raise NotImplementedError


def datasets_of(expr: Any) -> Iterator[Dataset]:
    """The datasets that a query reads; none for persisted frames, whose query is gone."""
    for read in expr.find_operations((Scan, KeepsResults)):
        if isinstance(read, KeepsResults):
            yield from datasets_of(read.made_of)
        else:
            yield read.dataset


def shard_of_partition(expr: Any, number: int) -> str | None:
    """The shard that a partition is read from; None if unknown, or if there are several."""
    reads = list(expr.find_operations(Scan))
    if len(reads) != 1 or reads[0].npartitions != expr.npartitions:
        return None
    splits = reads[0].dataset.partitions[reads[0]._partitions[number]]
    return None if len(splits) > 1 else splits[0].url
