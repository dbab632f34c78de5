"""Filters further up in a query, of which a read can take the rows that they keep.

Dask moves a filter down to a read below it, and stops at what it does not know: columns in another
order, renamed ones, new ones. Whatever is decoded for such a filter would be thrown away by it. So
the read looks up, and leaves out the rows; the filter stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.movable import ROW_BY_ROW, SAME_ROWS, is_row_by_row

__all__ = ["all_through", "filters_above", "is_dependent", "once_a_round"]

_T = TypeVar("_T")

# The expressions that use each one, by its name, as dask's optimiser has them.
_Dependents: TypeAlias = Mapping[str, Collection[Any]]

# What makes of each row another, or a part of it.
_OF_ROWS = (*SAME_ROWS, *ROW_BY_ROW)


def filters_above(read: dx.Expr, dependents: _Dependents) -> Iterator[dx.Filter | dx.Query]:
    """The filters through which whatever uses the read uses it, the lowest first.

    Between them and the read, no row depends on others, or on other frames. There are none where a
    filter is at the read itself: the optimiser tries to move that one down first.
    """
    seen: dict[str, dx.Expr] = {}
    left = _above(read, dependents)
    if not all(isinstance(node, _OF_ROWS) for node in left):
        return
    while left:
        node = left.pop()
        if node._name not in seen and (isinstance(node, _OF_ROWS) or _is_filter(node)):
            seen[node._name] = node
            left += _above(node, dependents)
    of_rows = {read._name, *seen}
    found = []
    for node in filter(_is_filter, seen.values()):
        below = {part._name for part in node.walk()}
        # A frame that is filtered by a mask of another one keeps rows that this one has not.
        if below <= of_rows and all_through(read, node, dependents, among=of_rows):
            found.append((len(below), node))
    yield from (node for _, node in sorted(found, key=itemgetter(0)))


def once_a_round(read: dx.Expr, dependents: Any, decide: Callable[[Any], _T]) -> _T:
    """What is decided of a read, the same for all that uses it in one round of the optimiser.

    A round adds to the dependents what it makes. Were each asked for by itself, one operand of a
    filter would have other rows than the other.
    """
    key = (read._name, decide.__name__)
    if key not in dependents:
        dependents[key] = decide(dependents)
    return dependents[key]


def _is_filter(expr: dx.Expr) -> bool:
    if isinstance(expr, dx.Query):
        return is_row_by_row(expr.operand("_expr"))
    return isinstance(expr, dx.Filter) and not _asks_a_function(expr.predicate)


def _asks_a_function(predicate: dx.Expr) -> bool:
    """Whether a function would be asked twice for a row, by the read and by the filter.

    Of half the rows that it draws, it would leave a quarter.
    """
    if isinstance(predicate, dx.Projection):
        return False
    if isinstance(predicate, dx.Apply) or (
        isinstance(predicate, dx.Map) and callable(predicate.operand("arg"))
    ):
        return True
    return any(map(_asks_a_function, predicate.dependencies()))


def all_through(
    expr: dx.Expr, target: dx.Expr, dependents: _Dependents, among: Collection[str] | None = None
) -> bool:
    """Whether whatever uses ``expr`` uses it through ``target``, and by none but those ``among``.

    By any, where none are named.
    """
    seen = {target._name}
    left = [expr]
    while left:
        node = left.pop()
        if node._name not in seen:
            seen.add(node._name)
            above = _above(node, dependents)
            if not above or (among is not None and node._name not in among):
                return False
            left += above
    return True


def is_dependent(parent: dx.Expr, expr: dx.Expr, dependents: _Dependents) -> bool:
    """Whether ``parent`` is among the known dependents of ``expr``.

    The optimiser looks for these before each of its rounds. What it makes within a round, such as
    the index of a filtered frame whose length is asked for, is among them from the next one on:
    only then is it known which columns others need of the same read.
    """
    return any(above._name == parent._name for above in _above(expr, dependents))


def _above(expr: dx.Expr, dependents: _Dependents) -> list[dx.Expr]:
    above = (parent() for parent in dependents[expr._name])
    return [parent for parent in above if parent is not None]
