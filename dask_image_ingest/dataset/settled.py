"""Which expressions the optimiser must leave alone."""

from __future__ import annotations

from typing import Any

from dask_image_ingest import dask_internals as dx

__all__ = ["is_settled"]


def is_settled(expr: dx.Expr, dependents: Any) -> bool:
    """Whether an expression must stay as it is, in a query that is optimised a second time.

    ``persist`` does that. Tasks that were fused the first time know the others by their names.
    """
    return any(isinstance(above(), dx.Fused) for above in dependents[expr._name])
