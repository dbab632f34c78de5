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
            return self._of(self._last_rows(parent))
        return super()._simplify_up(parent, dependents)

    def _last_rows(self, tail: dx.Expr) -> dx.Expr:
        if isinstance(tail, dx.Blockwise):  # the query is lowered
            return LastRows(self.frame, tail.n)
        if next(self.frame.find_operations(dx.BaseSetIndexSortValues), None) is not None:
            return TailOfSorted(self.frame, tail.n)
        return _last_of_all(self.frame, tail.n)

    def _of(self, frame: dx.Expr) -> dx.Expr:
        return type(self)(frame, *self.operands[1:])


class TailOfSorted(dx.Tail):
    """A tail of which dask makes the last rows of all where it comes to a sort."""

    def _simplify_down(self) -> dx.Expr | None:
        if isinstance(self.frame, dx.Elemwise):
            below = [
                type(self)(each, self.n) if isinstance(each, dx.Expr) else each
                for each in self.frame.operands
            ]
            return type(self.frame)(*below)
        return None

    def _lower(self) -> dx.Expr:
        return _last_of_all(self.frame, self.n)


def _last_of_all(frame: dx.Expr, n: int) -> dx.Expr:
    return LastRows(dx.Partitions(frame, [frame.npartitions - 1]), n)


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
