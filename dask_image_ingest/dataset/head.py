"""The first rows of a read, which stops there."""

from __future__ import annotations

from typing import Any

from dask_image_ingest import dask_internals as dx

__all__ = ["HeadOfRead"]


class HeadOfRead(dx.Head):
    """The head of a read that stops there.

    dask moves a head below projections, where these are of no use to the read: this one lets them
    pass below it.
    """

    def _simplify_down(self) -> None:
        return None

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        if isinstance(parent, dx.Projection):
            return dx.plain_column_projection(self, parent, dependents)
        return super()._simplify_up(parent, dependents)
