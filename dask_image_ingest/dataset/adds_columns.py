"""Expressions that add columns to the rows they get."""

from __future__ import annotations

from typing import Any

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.settled import is_settled

__all__ = ["AddsColumns"]


class AddsColumns(dx.Blockwise):
    """Adds columns to ``frame``; filters and projections that need none of them go below it."""

    _filter_passthrough = True

    @property
    def added(self) -> frozenset[Any]:
        """The names of the columns."""
        raise NotImplementedError

    def _projected(self, parent: dx.Expr, wanted: set[Any]) -> dx.Expr | None:
        """``parent``, which needs the ``wanted`` columns alone, over less; None if it needs all."""
        raise NotImplementedError

    def _filter_passthrough_available(self, parent: dx.Expr, dependents: Any) -> bool:
        return super()._filter_passthrough_available(parent, dependents) and not looks_at(
            parent.predicate, self, self.added
        )

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        if is_settled(self, dependents):
            return None
        if isinstance(parent, dx.Filter) and self._filter_passthrough_available(parent, dependents):
            return self._filter_simplification(parent)
        if isinstance(parent, (dx.Projection, dx.Index)):
            wanted = dx.determine_column_projection(self, parent, dependents)
            return self._projected(parent, set(wanted) if isinstance(wanted, list) else {wanted})
        return super()._simplify_up(parent, dependents)


def looks_at(predicate: dx.Expr, frame: dx.Expr, columns: frozenset[Any]) -> bool:
    """Whether a predicate looks at some of these columns of ``frame``, or at all of it.

    Other expressions of its class count as well: the optimiser may have left out columns of
    ``frame`` in the predicate before it does so in the filtered frame.
    """
    if isinstance(predicate, type(frame)):
        return True
    if isinstance(predicate, dx.Projection) and predicate.frame._name == frame._name:
        return bool(columns.intersection(predicate.columns))
    return any(looks_at(part, frame, columns) for part in predicate.dependencies())
