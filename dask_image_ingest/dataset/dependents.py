"""The expressions that use another one, as dask's optimiser knows them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from dask_image_ingest import dask_internals as dx

__all__ = ["Dependents", "all_through", "is_dependent", "used_by"]

#: The expressions that use each one, by its name.
Dependents: TypeAlias = Mapping[str, Collection[Any]]


def all_through(expr: dx.Expr, target: dx.Expr, dependents: Dependents) -> bool:
    """Whether whatever uses ``expr`` uses it through ``target``."""
    seen = {target._name}
    left = [expr]
    while left:
        node = left.pop()
        if node._name not in seen:
            seen.add(node._name)
            above = used_by(node, dependents)
            if not above:
                return False
            left += above
    return True


def is_dependent(parent: dx.Expr, expr: dx.Expr, dependents: Dependents) -> bool:
    """Whether ``parent`` is among the known dependents of ``expr``.

    The optimiser looks for these before each of its rounds. What it makes within a round, such as
    the index of a filtered frame whose length is asked for, is among them from the next one on:
    only then is it known which columns others need of the same read.
    """
    return any(above._name == parent._name for above in used_by(expr, dependents))


def used_by(expr: dx.Expr, dependents: Dependents) -> list[dx.Expr]:
    """The known dependents of an expression."""
    above = (parent() for parent in dependents[expr._name])
    return [parent for parent in above if parent is not None]
