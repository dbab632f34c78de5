"""Moves of undecoded rows on the host, of queries whose partitions are cuDF frames.

A row without pixels has some 200 bytes, in two dozen columns and the fifteen fields of its
reference. cuDF cuts and joins them one by one, in kernels that the host waits for. So pandas moves
these rows, and only the decode makes cuDF frames.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.plan.operations import MOVES, columns_used
from dask_image_ingest.dataset.plan.scan_node import Scan
from dask_image_ingest.dataset.references.moves import InOrder, copy_divisions
from dask_image_ingest.frames import backend_of, converted, get_backend
from dask_image_ingest.typedefs import DataFrame

# Operations that move rows, and give each partition the rows that cuDF gives it.
_MOVES = (dx.RearrangeByColumn, dx.SortValues)

# Operations that may stand above, below and between them.
_BESIDE = (InOrder, dx.Head, dx.Partitions, dx.Projection, dx.RenameFrame, dx.Repartition, dx.Tail)


def moved_on_host(rows: dx.Expr) -> dx.Expr | None:
    """Rows that are shuffled or sorted, as pandas frames; None for others.

    Each partition has the rows that it has in cuDF. Equal rows may be in another order.
    """
    steps, below = [], rows
    while type(below) in (*_MOVES, *_BESIDE):
        by_names = not isinstance(below, MOVES) or columns_used(below) is not None
        by_index = isinstance(below, dx.RearrangeByColumn) and below.index_shuffle
        if len(below.dependencies()) != 1 or not by_names or by_index:
            return None
        steps.append(below)
        below = below.frame
    is_moved = any(type(step) in _MOVES for step in steps)
    index = below._meta.index
    if not is_moved or _is_pandas(below) or index.name is not None or index.dtype != np.int64:
        return None
    moved = rows_on_host(below)
    if not _is_pandas(moved):
        return None
    for step in reversed(steps):
        kind = _ShuffleOnHost if type(step) is dx.RearrangeByColumn else type(step)
        moved = kind(moved, *step.operands[1:])
        if isinstance(step, dx.SortValues):
            copy_divisions(step, moved)
    return moved


def rows_on_host(rows: dx.Expr) -> dx.Expr:
    """Undecoded rows as pandas frames; themselves if cuDF's columns would come back as others."""
    if all(isinstance(node, (Scan, dx.Projection)) for node in rows.walk()):
        for scan in rows.find_operations(Scan):
            rows = rows.substitute(scan, scan.on_host)
        return rows
    return Converted(rows, "pandas") if _stays_the_same(rows._meta) else rows


def _is_pandas(rows: dx.Expr) -> bool:
    return backend_of(rows._meta).name == "pandas"


def _stays_the_same(meta: DataFrame) -> bool:
    """True if the columns of a frame have their types again when they come back from the host."""
    here, host = backend_of(meta), get_backend("pandas")
    types = host.to_arrow(converted(meta, "pandas")).schema.types
    again = here.meta(dict(zip(meta.columns, types, strict=True)))
    return all(
        here.is_references(dtype) or dtype == meta[name].dtype
        for name, dtype in again.dtypes.items()
    )


class Converted(dx.Blockwise):
    """Rows without pixels as frames of another backend."""

    _parameters: ClassVar = ["frame", "backend"]
    _projection_passthrough = True
    _preserves_partitioning_information = True
    _is_length_preserving = True
    operation = staticmethod(converted)


class _ShuffleOnHost(dx.RearrangeByColumn):
    """A shuffle of pandas frames, to the partitions where cuDF's hashes put their rows.

    Others pair partitions of frames that were shuffled by the same column.
    """

    def _lower(self) -> dx.Expr:
        lowered = super()._lower()
        places = next(lowered.find_operations(dx.AssignPartitioningIndex))
        return lowered.substitute(places, _Places(*places.operands))


class _Places(dx.AssignPartitioningIndex):
    @staticmethod
    def operation(frame: DataFrame, by: list[Any], name: str, *arguments: Any) -> DataFrame:
        """``frame`` with a column of the number of each row's partition."""
        places = dx.AssignPartitioningIndex.operation
        if not len(frame):
            return places(frame, by, name, *arguments)  # needs no GPU
        count, _, *others = arguments
        keys = converted(frame[by], "cudf")
        numbers = places(keys, by, name, count, keys, *others)[name]
        return frame.assign(**{name: numbers.to_cupy().get()})
