"""Expressions that give one row for each row they get."""

from __future__ import annotations

from typing import Any

from dask_image_ingest import dask_internals as dx

__all__ = ["EveryRow"]


class EveryRow(dx.Blockwise):
    """One row for each of ``frame``, in their order: heads and tails go below it.

    It is no ``Elemwise``: dask puts a tail (or head) below each of those, even once the query is
    lowered, when there are no tasks for it any more. ``d.fillna(0).repartition(npartitions=n)
    .tail()`` raises ``NotImplementedError`` where ``d`` has ``n`` partitions (Dask 2026.8).
    """

    _is_length_preserving = True

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        if isinstance(parent, (dx.Head, dx.Tail)):
            fewer = type(parent)(self.frame, *parent.operands[1:])
            return type(self)(fewer, *self.operands[1:])
        return super()._simplify_up(parent, dependents)
