"""Expressions that give one row for each row they get."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from dask_image_ingest import dask_internals as dx

__all__ = ["EveryRow"]


class EveryRow(dx.Blockwise):
    """One row for each of ``frame``, in their order: heads and tails go below it.

    It is no ``Elemwise``: dask puts the tail of a lowered query below each of those as one that is
    not lowered, of which there are no tasks. ``d.fillna(0).repartition(npartitions=n).tail()``
    raises ``NotImplementedError`` where ``d`` has ``n`` partitions (Dask 2026.8).
    """

    _is_length_preserving = True

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        if isinstance(parent, dx.Head):
            return self._of(type(parent)(self.frame, *parent.operands[1:]))
        if isinstance(parent, dx.Tail):
            lowered = isinstance(parent, dx.Blockwise)
            last = [self.frame.npartitions - 1]
            partition = self.frame if lowered else dx.Partitions(self.frame, last)
            return self._of(LastRows(partition, parent.n))
        return super()._simplify_up(parent, dependents)

    def _of(self, frame: dx.Expr) -> dx.Expr:
        return type(self)(frame, *self.operands[1:])


def _last_rows(frame: Any, n: int) -> Any:
    return frame.tail(n)


class LastRows(dx.Blockwise):
    """The last rows of each partition, which stay where they are when the query is lowered."""

    _parameters: ClassVar = ["frame", "n"]
    _projection_passthrough = True
    _preserves_partitioning_information = True
    operation = staticmethod(_last_rows)

    @functools.cached_property
    def _meta(self) -> Any:
        return self.frame._meta
