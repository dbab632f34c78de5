"""Filters in disjunctive normal form: checked, weakened, turned into Arrow expressions.

The outer tuple is an «or», the inner ones are «and», as in ``dask.dataframe.read_parquet``. Two
operators come from the optimiser alone: ``is null`` and ``not null``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.errors import ArgumentError

Predicate = tuple[str, str, Any]
Filters = tuple[tuple[Predicate, ...], ...]

_OPERATORS = {
    "==": operator.eq,
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda field, values: field.isin(list(values)),
    "not in": lambda field, values: ~field.isin(list(values)),
    "is null": lambda field, _: field.is_null(),
    "not null": lambda field, _: field.is_valid(),
}

# Combining two filters multiplies their alternatives; past this many, filtering later is cheaper.
_MOST_ALTERNATIVES = 64


def normalize_filters(filters: Any, types: Mapping[str, pa.DataType]) -> Filters | None:
    """Check a user's ``filters`` and put them in normal form.

    Parameters
    ----------
    filters
        None, a list of ``(column, operator, value)`` that must all hold, or a list of such lists of
        which one must hold. Operators: ``== = != < <= > >= in``, ``not in``.
    types
        The collection's columns and their types.

    Raises
    ------
    ArgumentError
        For another form, an unknown column or operator, a filter on ``image``, or a value that
        can't be compared with the column.
    """
    if filters is None:
        return None
    if not isinstance(filters, Sequence) or isinstance(filters, str) or not filters:
        raise ArgumentError(_form(filters))
    if all(isinstance(f, tuple) for f in filters):
        filters = [filters]
    if not all(isinstance(f, Sequence) and f and not isinstance(f, str) for f in filters):
        raise ArgumentError(_form(filters))
    normal = tuple(tuple(_predicate(p, types) for p in conjunction) for conjunction in filters)
    problem = mismatch(normal, types)
    if problem:
        raise ArgumentError(problem)
    return normal


def mismatch(filters: Filters, types: Mapping[str, pa.DataType]) -> str | None:
    """Why a filter can't be evaluated on columns of these types, None when it can."""
    for conjunction in filters:
        for predicate in conjunction:
            column, op, value = predicate
            empty = pa.table({column: pa.array([], types[column])})
            try:
                empty.filter(to_expression(((predicate,),)))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, TypeError):
                return f"({column!r}, {op!r}, {value!r}): the column is of type {types[column]}"
    return None


def to_expression(filters: Filters) -> pc.Expression:
    """The Arrow expression that is true for the rows to keep; a null counts as false."""
    alternatives = (
        functools.reduce(
            operator.and_,
            (_OPERATORS[op](pc.field(column), value) for column, op, value in conjunction),
        )
        for conjunction in filters
    )
    return functools.reduce(operator.or_, alternatives)


def columns_of(filters: Filters | None) -> set[str]:
    """The columns that a filter looks at."""
    return {column for conjunction in filters or () for column, _, _ in conjunction}


def without(filters: Filters | None, column: str) -> Filters | None:
    """A weaker filter that doesn't look at ``column``; None when nothing is left of it.

    Every row that passes ``filters`` passes this one too.
    """
    weaker = tuple(tuple(p for p in conj if p[0] != column) for conj in filters or ())
    return weaker if weaker and all(weaker) else None


def both(one: Filters | None, other: Filters | None) -> Filters | None:
    """The filter that holds where ``one`` and ``other`` hold; None when it would grow too large."""
    if not one or not other:
        return one or other
    if len(one) * len(other) > _MOST_ALTERNATIVES:
        return None
    return tuple(tuple(dict.fromkeys(a + b)) for a in one for b in other)


def either(one: Filters, other: Filters) -> Filters | None:
    """The filter that holds where ``one`` or ``other`` holds; None when it would grow too large."""
    return one + other if len(one) + len(other) <= _MOST_ALTERNATIVES else None


def _predicate(predicate: Any, types: Mapping[str, pa.DataType]) -> Predicate:
    if not isinstance(predicate, (tuple, list)) or len(predicate) != 3:
        raise ArgumentError(_form(predicate))
    column, op, value = predicate
    if column == "image":
        raise ArgumentError(
            "filters= can't look at 'image': filters are evaluated before any pixel is decoded; "
            "filter the frame afterwards, or use a metadata column"
        )
    if column not in types:
        raise ArgumentError(f"filters= names {column!r}; the columns are {', '.join(types)}")
    if op not in _OPERATORS or op.endswith("null"):
        raise ArgumentError(f"filters= has the operator {op!r}; use == != < <= > >= in, 'not in'")
    if op in ("in", "not in"):
        if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
            raise ArgumentError(f"({column!r}, {op!r}, {value!r}): the value must be a list")
        # Sorted, so that equal sets in another order give the same token.
        value = tuple(sorted({_plain(v) for v in value}, key=repr))
    return (column, op, _plain(value))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _form(filters: Any) -> str:
    return (
        f"filters={filters!r}: pass a list of (column, operator, value) tuples, or a list of such "
        "lists of which one must hold, for example [('width', '>=', 512)]"
    )
