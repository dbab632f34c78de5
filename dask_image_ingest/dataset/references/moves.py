"""Late materialization: rewrites of operations that pass images along, so that they run undecoded.

A *move* selects, reorders or redistributes rows (sample, sort, shuffle, merge); over references it
gives the same rows. Operations that are not listed are not rewritten.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, ClassVar, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from dask.utils import get_default_shuffle_method

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.plan.base_nodes import Dependents, Filter, filtered
from dask_image_ingest.dataset.plan.columns import AppendsColumns, AssignColumns
from dask_image_ingest.dataset.plan.operations import (
    CHANGES,
    MOVES,
    columns_changed,
    columns_used,
    is_row_wise,
)
from dask_image_ingest.dataset.references.fetch import field_of, references_of
from dask_image_ingest.dataset.scan.rows import ColumnDecode
from dask_image_ingest.typedefs import DataFrame


def _sort_by_sample(frame: DataFrame, names: tuple[Hashable, ...]) -> DataFrame:
    """Sort rows by shard URL and sample number of their references."""
    # The offset tells rows of references without a number, and the part those of one image; null
    # references sort last.
    fields = [
        field_of(references_of(frame, name), field)
        for name in names
        for field in ("url", "number", "offset", "page", "top", "left", "height", "width")
    ]
    table = pa.table(fields, names=list(map(str, range(len(fields)))))
    order = pc.sort_indices(table, [(name, "ascending") for name in table.column_names])
    return frame.take(order.to_numpy())


class InOrder(AppendsColumns):
    """Restores a deterministic row order after an unordered shuffle: sorts each partition.

    Attributes
    ----------
    names
        The columns of references to sort by.
    """

    _parameters: ClassVar = ["frame", "names"]
    _preserves_partitioning_information = True
    _is_length_preserving = True
    names: tuple[Any, ...]

    operation = staticmethod(_sort_by_sample)

    @functools.cached_property
    def _meta(self) -> Any:
        return self.frame._meta

    @property
    def added(self) -> frozenset[Any]:
        """Empty: no column is appended; the base class is for its pushdown rules."""
        return frozenset()

    def _place(self, mask: dx.Expr) -> tuple[list[dx.Expr], list[dx.Expr]]:
        # Others, such as ``cumsum``, depend on the order of the rows.
        row_wise = is_row_wise(mask, (self._name, self.frame._name))
        return ([mask], []) if row_wise else ([], [])

    def _projected(self, parent: dx.Expr, wanted: set[Hashable]) -> dx.Expr | None:
        names = tuple(name for name in self.names if name in wanted)
        if not names:
            return type(parent)(self.frame, *parent.operands[1:])
        needed = [name for name in self.frame.columns if name in wanted]
        if needed == self.frame.columns:
            return None
        return type(parent)(type(self)(self.frame[needed], names), *parent.operands[1:])


#: An expression with references in place of images, and the decodes that its columns need.
Undecoded: TypeAlias = tuple[dx.Expr, tuple[ColumnDecode, ...]]


def over_references(
    parent: dx.Expr, child: dx.Expr, references: dx.Expr, images: tuple[ColumnDecode, ...]
) -> Undecoded | None:
    """``parent`` with its operand ``child`` replaced by the undecoded ``references``.

    None if ``parent`` uses decoded columns (images or their errors), or has no rule.
    """
    if parent.operands[0]._name != child._name or len(set(child.columns)) < len(child.columns):
        return None
    if type(parent) in MOVES:
        columns = columns_used(parent)
        if columns is None or any(column.columns.intersection(columns) for column in images):
            return None
        moved = type(parent)(references, *parent.operands[1:])
        if isinstance(parent, dx.BaseSetIndexSortValues):
            copy_divisions(parent, moved)
        if isinstance(parent, dx.RearrangeByColumn) and _is_unordered(parent):
            moved = InOrder(moved, tuple(column.image for column in images))
        return moved, images
    rewrite = _REWRITES.get(type(parent))
    return None if rewrite is None else rewrite(parent, child, references, images)


def leads_to_a_move(expr: dx.Expr, dependents: Dependents) -> bool:
    """True if an expression is a move, or some move is reached through rewritable dependents.

    Otherwise nothing is gained by decoding after it.
    """
    if _is_move(expr):
        return True
    if type(expr) not in _PASSES_ON:
        return False
    above = (parent() for parent in dependents[expr._name])
    return any(leads_to_a_move(parent, dependents) for parent in above if parent is not None)


def _is_move(expr: dx.Expr) -> bool:
    if type(expr) is dx.Repartition:
        # Not to fewer partitions: each would be decoded by one task. Nor by size: to count the
        # partitions, Dask would optimise the query.
        if expr.operand("partition_size") is not None:
            return False
        divisions = expr.operand("new_divisions")
        count = expr.new_partitions if divisions is None else len(divisions) - 1
        return bool(count > expr.frame.npartitions)
    kind = type(expr)
    return kind in _OTHER_MOVES or (kind in MOVES and kind not in _PASSES_ON)


def _is_unordered(shuffle: dx.Expr) -> bool:
    # Shuffles through the disk or between workers append rows as they arrive.
    return (shuffle.method or get_default_shuffle_method()) != "tasks"


def _rename(
    expr: dx.Expr, _: dx.Expr, references: dx.Expr, images: tuple[ColumnDecode, ...]
) -> Undecoded | None:
    names = expr.operand("columns")
    if not isinstance(names, Mapping):
        return None
    # Only in ``references``: columns whose images are not selected, but whose errors are.
    hidden = {column.image for column in images if not column.pixels}
    if hidden.intersection(names) or hidden.intersection(names.values()):
        return None
    renamed = tuple(column.renamed(lambda name: names.get(name, name)) for column in images)
    return dx.RenameFrame(references, names), renamed


def _project(
    expr: dx.Expr, _: dx.Expr, references: dx.Expr, images: tuple[ColumnDecode, ...]
) -> Undecoded | None:
    columns = expr.operand("columns")
    if not isinstance(columns, list):
        return None
    needed = tuple(
        column.selected(columns) for column in images if not column.results.isdisjoint(columns)
    )
    if not needed:
        return None
    # The error of an image needs its reference, too.
    columns = [*columns, *(column.image for column in needed if not column.pixels)]
    if not set(columns) <= set(references.columns):
        return None  # an error column that the decode appends: the order would differ
    if not all({*annotated.columns} <= {*columns} for c in needed if (annotated := c.annotations)):
        return None  # labels that are not selected, and decide which boxes are
    return dx.Projection(references, columns), needed


def _assign(
    expr: dx.Expr, child: dx.Expr, references: dx.Expr, images: tuple[ColumnDecode, ...]
) -> Undecoded | None:
    decoded = {name for column in images for name in column.columns}
    keys = expr.names if isinstance(expr, AssignColumns) else expr.keys
    if not decoded.isdisjoint(keys):
        return None
    try:
        values = _replace_in_all(expr.operands[1:], child, references, decoded)
    except _NeedsPixelsError:
        return None
    return type(expr)(references, *values), images


# ``ddf[mask]`` and ``ddf.loc[mask]``.
def _filter(
    expr: dx.Expr, child: dx.Expr, references: dx.Expr, images: tuple[ColumnDecode, ...]
) -> Undecoded | None:
    decoded = {name for column in images for name in column.columns}
    try:
        mask = _replace(expr.operands[1], child, references, decoded)
    except _NeedsPixelsError:
        return None
    return filtered(references, mask), images


def _change_others(
    expr: dx.Expr, _: dx.Expr, references: dx.Expr, images: tuple[ColumnDecode, ...]
) -> Undecoded | None:
    """An operation that changes columns of metadata alone, such as ``fillna({"cls": 0})``."""
    changed = columns_changed(expr)
    if changed is None or any(column.columns.intersection(changed) for column in images):
        return None
    return type(expr)(references, *expr.operands[1:]), images


class _NeedsPixelsError(Exception):
    """An expression uses a decoded column."""


def _replace_in_all(
    operands: Iterable[Any], child: dx.Expr, references: dx.Expr, decoded: set[Hashable]
) -> list[Any]:
    return [
        _replace(operand, child, references, decoded) if isinstance(operand, dx.Expr) else operand
        for operand in operands
    ]


def _replace(expr: dx.Expr, child: dx.Expr, references: dx.Expr, decoded: set[Hashable]) -> dx.Expr:
    """Substitute ``references`` for ``child``; raise if a ``decoded`` column is used."""
    if expr._name == child._name:
        raise _NeedsPixelsError
    if isinstance(expr, dx.Projection) and expr.frame._name == child._name:
        if not decoded.isdisjoint(expr.columns):
            raise _NeedsPixelsError
        return type(expr)(references, *expr.operands[1:])
    if isinstance(expr, dx.Index) and expr.frame._name == child._name:
        return dx.Index(references)
    operands = _replace_in_all(expr.operands, child, references, decoded)
    unchanged = all(new is old for new, old in zip(operands, expr.operands, strict=True))
    return expr if unchanged else type(expr)(*operands)


_REWRITES: dict[type, Callable[[Any, Any, Any, Any], Undecoded | None]] = {
    dx.RenameFrame: _rename,
    dx.Assign: _assign,
    AssignColumns: _assign,
    dx.Filter: _filter,
    Filter: _filter,
    dx.Loc: _filter,
    dx.Projection: _project,
    **dict.fromkeys(CHANGES, _change_others),
}

# Rewritten only if a move follows: nothing is gained otherwise.
_PASSES_ON = (*_REWRITES, dx.ResetIndex, dx.Repartition, dx.Split, dx.DropnaFrame)

# Moves that are not in `MOVES`; the last two have rules of their own.
_OTHER_MOVES = (dx.Loc, dx.Merge, dx.GroupByApply)


def copy_divisions(expr: dx.BaseSetIndexSortValues, other: dx.BaseSetIndexSortValues) -> None:
    """Give ``other``, a sort of the same rows, the divisions of ``expr``.

    Dask samples divisions with the sorted frame's name as the seed, so those of ``other`` would
    differ. They are written to Dask's cache under the name of its sort column.
    """
    if not _samples_divisions(expr):
        return
    if isinstance(expr, dx.SortValues):
        column, other_column = expr.frame[expr.by[0]], other.frame[other.by[0]]
        ascending = expr._divisions_ascending
    else:
        column, other_column, ascending = expr.other, other.other, expr.ascending
    partitions, upsample = expr._npartitions_input, expr.upsample
    divisions = dx._get_divisions(expr.frame, column, partitions, ascending, upsample=upsample)
    # 128e6: Dask's default ``partition_size``, a part of the cache's key.
    dx.divisions_lru[(other_column._name, partitions, ascending, 128e6, upsample)] = divisions


def _samples_divisions(expr: dx.BaseSetIndexSortValues) -> bool:
    """True if Dask samples rows to choose the divisions of a sort."""
    if isinstance(expr, dx.SetIndex) and expr.operand("user_divisions") is not None:
        return False
    return bool(expr._npartitions_input > 1 and expr.frame.npartitions > 1)


def groups_together(apply: dx.Expr, child: dx.Expr, undecoded: Undecoded) -> Undecoded | None:
    """The rows of a ``groupby().apply`` of ``child``, each group in one partition, undecoded.

    None if they lie so already, or if it groups by decoded columns or by anything but names.
    """
    references, images = undecoded
    names = {*child.columns, child._meta.index.name}
    if (
        apply.frame._name != child._name
        or apply._slice is not None
        or not apply.need_to_shuffle
        or not all(isinstance(name, str) and name in names for name in apply.by)
        or any(image.columns.intersection(apply.by) for image in images)
    ):
        return None
    # By the first column alone, as Dask does.
    method = apply.operand("shuffle_method")
    moved = dx.RearrangeByColumn(references, [apply.by[0]], references.npartitions, method=method)
    return moved, images
