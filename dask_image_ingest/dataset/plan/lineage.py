"""Lineage of a query: the shards behind each partition, and the operations behind each column.

Two walks, which start at any expression: `partition_sources` and `backtrack`. What an operation
does to rows and values is told in `operators`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import (
    Concat,
    Merge,
)
from dask_image_ingest.dataset.plan.base_nodes import KeepsResults, Read
from dask_image_ingest.dataset.plan.computed_columns import AppendsColumns
from dask_image_ingest.dataset.plan.operators import (
    COLUMNS_CHANGED,
    MOVES_ROWS,
    RENAMES,
    SELECTS_ROWS,
)
from dask_image_ingest.dataset.plan.scan_node import READS, Dataset, Scan
from dask_image_ingest.dataset.scan.partitioning import Partition

Columns: TypeAlias = tuple[Any, ...]

#: An expression that made or changed the values of some columns, and their names there.
Change: TypeAlias = tuple[Any, Columns]

#: Sources of each partition; "moved" if rows with repeating labels were moved to other partitions;
#: None if unknown.
Sources: TypeAlias = tuple[Partition, ...] | Literal["moved"] | None

_OF_READ = re.compile(rf"({'|'.join(READS)})-(\d+x\d+x\d+-)?[0-9a-f]+")


def partition_sources(expr: dx.Expr, labels: bool = False) -> Sources:
    """The splits that each partition is computed from.

    Parameters
    ----------
    expr
        A query.
    labels
        Only follow frames whose index labels the result keeps, to the splits of any version that
        the labels come from.
    """
    return _sources(expr, labels, {})


def _sources(expr: dx.Expr, labels: bool, cache: dict[str, Sources]) -> Sources:
    if expr._name not in cache:
        cache[expr._name] = _find_sources(expr, labels, cache)
    return cache[expr._name]


def _find_sources(expr: dx.Expr, labels: bool, cache: dict[str, Sources]) -> Sources:
    if isinstance(expr, Read):
        return expr.label_sources if labels else expr.sources
    if isinstance(expr, dx.FromGraph):
        name, *_ = expr.operand("keys")[0]
        persisted = _OF_READ.fullmatch(str(name)) and expr.npartitions > 1
        return "moved" if persisted else None
    if isinstance(expr, dx.Partitions):
        sources = _sources(expr.frame, labels, cache)
        if sources is None or sources == "moved":
            return sources
        return tuple(sources[number] for number in expr.partitions)
    # A scalar, such as the values of ``isin``, comes from no partition.
    frames = [frame for frame in expr.dependencies() if frame.ndim]
    frames = [frame for frame in frames if not labels or _same_index(frame, expr)]
    below = [_sources(frame, labels, cache) for frame in frames]
    if isinstance(expr, (dx.Blockwise, dx.MaybeAlignPartitions)):
        if below and all(each == below[0] for each in below):
            return below[0]
    elif not isinstance(expr, MOVES_ROWS):
        return None
    return "moved" if any(map(may_repeat, below)) else None


def _same_index(frame: Any, expr: dx.Expr) -> bool:
    """True if the index may be that of ``frame``: name and dtype are equal."""
    before, after = (getattr(each._meta, "index", each._meta) for each in (frame, expr))
    return all(
        getattr(before, name, None) == getattr(after, name, None) for name in ("dtype", "name")
    )


def may_repeat(sources: Sources) -> bool:
    """True if a label may occur twice."""
    return sources == "moved" or len({source[0].url for source in sources or ()}) > 1


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


def shard_of_partition(expr: Any, number: int) -> str | None:
    """The shard that a partition is read from; None if unknown, or if there are several."""
    sources = partition_sources(expr, labels=True)
    if sources is None or sources == "moved" or len(sources[number]) > 1:
        return None
    return sources[number][0].url
