"""Moves over references: the expressions that only move rows, made over references instead.

Over references each of them gives what it gives over pixels, with references in their place. An
expression that is not listed here is not rewritten.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pyarrow as pa
from dask.utils import get_default_shuffle_method

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.late.decode import field_of, references_of
from dask_image_ingest.dataset.plan.nodes import AppendsColumns, Dependents
from dask_image_ingest.dataset.plan.operators import COLUMNS_LOOKED_AT
from dask_image_ingest.dataset.scan.decode_rows import ImageDecode


def _in_order(frame: Any, names: tuple[Any, ...]) -> Any:
    """Sort rows by the shard and the number of the samples that they refer to."""
    keys = [_places(references_of(frame, name)) for name in names]
    order = sorted(range(len(frame)), key=lambda row: [key[row] for key in keys])
    return frame if order == list(range(len(frame))) else frame.take(np.array(order))


def _places(references: pa.ChunkedArray) -> list[tuple[str, int]]:
    # A merge may have rows of no image: these come first, and their own order is any.
    urls, numbers, offsets = (
        field_of(references, name).to_pylist() for name in ("url", "number", "offset")
    )
    return [
        (url or "", (offset or 0) if number is None else number)
        for url, number, offset in zip(urls, numbers, offsets, strict=True)
    ]


class InOrder(AppendsColumns):
    """The rows of each partition, sorted by the samples that they refer to; adds no column.

    Attributes
    ----------
    names
        The columns of references. Without them the order of rows is Dask's.
    """

    _parameters: ClassVar = ["frame", "names"]
    _preserves_partitioning_information = True
    _is_length_preserving = True
    names: tuple[Any, ...]

    operation = staticmethod(_in_order)

    @functools.cached_property
    def _meta(self) -> Any:
        return self.frame._meta

    @property
    def added(self) -> frozenset[Any]:
        """No columns."""
        return frozenset()

    def _projected(self, parent: dx.Expr, wanted: set[Any]) -> dx.Expr | None:
        names = tuple(name for name in self.names if name in wanted)
        if not names:
            return type(parent)(self.frame, *parent.operands[1:])
        needed = [name for name in self.frame.columns if name in wanted]
        if needed == self.frame.columns:
            return None
        return type(parent)(type(self)(self.frame[needed], names), *parent.operands[1:])


#: An expression over pointers, and the columns of it that are to be decoded.
Moved: TypeAlias = tuple[dx.Expr, tuple[ImageDecode, ...]]


def move_rows(
    parent: dx.Expr, child: dx.Expr, pointers: dx.Expr, images: tuple[ImageDecode, ...]
) -> Moved | None:
    """``parent`` over ``pointers`` in place of ``child``; None where it looks at the pixels."""
    made = {name for each in images for name in each.columns}
    if parent.operands[0]._name != child._name or len(set(child.columns)) < len(child.columns):
        return None
    if type(parent) in COLUMNS_LOOKED_AT:
        columns = COLUMNS_LOOKED_AT[type(parent)](parent)
        if columns is None or not made.isdisjoint(columns):
            return None
        moved = type(parent)(pointers, *parent.operands[1:])
        if isinstance(parent, dx.BaseSetIndexSortValues):
            _copy_divisions(parent, moved)
        if isinstance(parent, dx.RearrangeByColumn) and _in_any_order(parent):
            moved = InOrder(moved, tuple(each.image for each in images))
        return moved, images
    rewrite = _REWRITES.get(type(parent))
    return None if rewrite is None else rewrite(parent, child, pointers, images)


def leads_to_a_move(expr: dx.Expr, dependents: Dependents) -> bool:
    """True if an expression moves rows, or passes references on to one that does.

    Only then are pixels better decoded after it.
    """
    if _is_move(expr):
        return True
    if type(expr) not in _PASS:
        return False
    above = (parent() for parent in dependents[expr._name])
    return any(leads_to_a_move(parent, dependents) for parent in above if parent is not None)


def _is_move(expr: dx.Expr) -> bool:
    if type(expr) is dx.Repartition:
        # Of fewer partitions each would be decoded by one task. Dask optimises the query to know
        # how many partitions of a size there will be.
        if expr.operand("partition_size") is not None:
            return False
        divisions = expr.operand("new_divisions")
        count = expr.new_partitions if divisions is None else len(divisions) - 1
        return bool(count > expr.frame.npartitions)
    return type(expr) in _OTHERS or (type(expr) in COLUMNS_LOOKED_AT and type(expr) not in _PASS)


def _in_any_order(shuffle: dx.Expr) -> bool:
    # One of tasks keeps the order of rows.
    return (shuffle.method or get_default_shuffle_method()) != "tasks"


def _rename(expr: dx.Expr, _: Any, pointers: dx.Expr, images: Any) -> Moved | None:
    names = expr.operand("columns")
    if not isinstance(names, Mapping):
        return None
    hidden = {each.image for each in images if not each.pixels}
    if hidden.intersection(names) or hidden.intersection(names.values()):
        return None
    renamed = tuple(each.renamed(lambda name: names.get(name, name)) for each in images)
    return dx.RenameFrame(pointers, names), renamed


def _project(expr: dx.Expr, _: Any, pointers: dx.Expr, images: Any) -> Moved | None:
    columns = expr.operand("columns")
    if not isinstance(columns, list):
        return None
    kept = tuple(
        replace(
            each,
            error=each.error if each.error in columns else None,
            pixels=each.pixels and each.image in columns,
        )
        for each in images
        if each.error in columns or (each.pixels and each.image in columns)
    )
    if not kept:
        return None
    # Errors are told by the decode of their images.
    columns = [*columns, *(each.image for each in kept if not each.pixels)]
    if not set(columns) <= set(pointers.columns):
        return None  # errors that the decode adds, behind the other columns
    return dx.Projection(pointers, columns), kept


def _assign(expr: dx.Expr, child: dx.Expr, pointers: dx.Expr, images: Any) -> Moved | None:
    made = {name for each in images for name in each.columns}
    if not made.isdisjoint(expr.keys):
        return None
    try:
        return dx.Assign(pointers, *_over(expr.operands[1:], child, pointers, made)), images
    except _LooksAtPixels:
        return None


def _filter(expr: dx.Expr, child: dx.Expr, pointers: dx.Expr, images: Any) -> Moved | None:
    made = {name for each in images for name in each.columns}
    try:
        return dx.Filter(pointers, *_over(expr.operands[1:], child, pointers, made)), images
    except _LooksAtPixels:
        return None


class _LooksAtPixels(Exception):
    """An expression needs what is decoded."""


def _over(operands: Any, child: dx.Expr, pointers: dx.Expr, made: set[Any]) -> list[Any]:
    """Operands over ``pointers`` in place of ``child``."""
    return [
        _one_over(each, child, pointers, made) if isinstance(each, dx.Expr) else each
        for each in operands
    ]


def _one_over(expr: dx.Expr, child: dx.Expr, pointers: dx.Expr, made: set[Any]) -> dx.Expr:
    if expr._name == child._name:
        raise _LooksAtPixels
    if isinstance(expr, dx.Projection) and expr.frame._name == child._name:
        if not made.isdisjoint(expr.columns):
            raise _LooksAtPixels
        return type(expr)(pointers, *expr.operands[1:])
    if isinstance(expr, dx.Index) and expr.frame._name == child._name:
        return dx.Index(pointers)
    operands = _over(expr.operands, child, pointers, made)
    same = all(new is old for new, old in zip(operands, expr.operands, strict=True))
    return expr if same else type(expr)(*operands)


_REWRITES: dict[type, Callable[[Any, Any, Any, Any], Moved | None]] = {
    dx.RenameFrame: _rename,
    dx.Assign: _assign,
    dx.Filter: _filter,
    dx.Projection: _project,
}

# What is rewritten only below a move: there is nothing to win by it otherwise.
_PASS = (*_REWRITES, dx.ResetIndex, dx.Repartition, dx.Split, dx.DropnaFrame, dx.Query)

# Moves with rules of their own, in ``nodes.py`` and ``groups.py``.
_OTHERS = (dx.Merge, dx.GroupByApply)


def _copy_divisions(expr: dx.BaseSetIndexSortValues, other: dx.BaseSetIndexSortValues) -> None:
    """Have ``other``, which sorts the same rows, fall into the partitions of ``expr``.

    Dask draws divisions from a sample of the rows, whose seed is the name of the sorted frame.
    """
    if not _draws_divisions(expr):
        return
    if isinstance(expr, dx.SortValues):
        column, its = expr.frame[expr.by[0]], other.frame[other.by[0]]
        ascending = expr._divisions_ascending
    else:
        column, its, ascending = expr.other, other.other, expr.ascending
    partitions, upsample = expr._npartitions_input, expr.upsample
    found = dx._get_divisions(expr.frame, column, partitions, ascending, upsample=upsample)
    dx.divisions_lru[(its._name, partitions, ascending, 128e6, upsample)] = found


def _draws_divisions(expr: dx.BaseSetIndexSortValues) -> bool:
    """True if a sort's divisions are drawn from a sample of its rows."""
    if isinstance(expr, dx.SetIndex) and expr.operand("user_divisions") is not None:
        return False
    return bool(expr._npartitions_input > 1 and expr.frame.npartitions > 1)
