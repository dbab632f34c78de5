"""Predicates on columns: one type, which ``filters=``, ``--where`` and Dask's masks become.

A predicate is a `Term`, or an `And` or `Or` of predicates. «not» stands at terms only (negation
normal form), so a predicate gets weaker wherever a term is left out. None stands for a predicate
that every row passes.

`fold` visits a predicate. The visitors: `holds` evaluates it on an Arrow table, `columns_of` gives
its columns, `only` what some columns can rule out, `negated` its opposite, and `parse_filters`
checks it against a schema. Its text is its `repr`. As in SQL, a comparison with null is null, and
only rows count for which the whole predicate is true. Numbers are compared by value, whatever their
types.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pandas.api.types import is_list_like

from dask_image_ingest.arguments import shown
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import IMAGE, is_number


@dataclass(frozen=True, repr=False)
class Term:
    """A comparison of a column with a constant.

    Attributes
    ----------
    op, value
        ``== < <= > >=`` and a constant; ``in`` and a tuple, in which None stands for null;
        ``is null`` and whether NaN counts as null.
    negated
        True for the opposite. Null stays null for ``== < <= > >=``: neither holds for it. NaN is
        equal to nothing, less than nothing and greater than nothing, so the opposite holds for it.
    """

    column: str
    op: str
    value: Any
    negated: bool = False

    def __repr__(self) -> str:
        if self.op == "is null":
            null = "null or NaN" if self.value else "null"
            return f"{self.column} is {'not ' if self.negated else ''}{null}"
        op = _WRITTEN_NEGATED.get(self.op, self.op) if self.negated else self.op
        text = f"{self.column} {op} {self.value!r}"
        return f"not {text}" if self.negated and op == self.op else text


@dataclass(frozen=True, repr=False)
class _Junction:
    operands: tuple[Predicate, ...]
    word: ClassVar[str]

    def __repr__(self) -> str:
        return f"({f' {self.word} '.join(map(repr, self.operands))})"


class And(_Junction):
    """All of several predicates."""

    word = "and"


class Or(_Junction):
    """At least one of several predicates."""

    word = "or"


Predicate: TypeAlias = Term | And | Or

#: What users write: (column, operator, value) that must all hold, or lists of such, one of which
#: must hold.
Filters: TypeAlias = Sequence[tuple[str, str, Any]] | Sequence[Sequence[tuple[str, str, Any]]]

_WRITTEN_NEGATED = {"==": "!=", "in": "not in"}
_OPPOSITES = {text: op for op, text in _WRITTEN_NEGATED.items()}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "==": pc.equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_OPERATORS = (*_COMPARISONS, *_WRITTEN_NEGATED, *_OPPOSITES)

#: Operator → the one to use with sides swapped; those not listed are symmetric.
MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}

_Combine: TypeAlias = Callable[[list[Any]], Any]


def term(column: str, op: str, value: Any) -> Term:
    """A term of an operator as users write it, ``!=`` and ``not in`` among them."""
    return Term(column, _OPPOSITES.get(op, op), value, op in _OPPOSITES)


def all_of(predicates: Iterable[Predicate | None]) -> Any:
    """The conjunction of predicates; None if all of them are."""
    return _joined(And, [predicate for predicate in predicates if predicate is not None])


def any_of(predicates: Iterable[Any]) -> Any:
    """The disjunction of predicates; None if one of them is."""
    listed = list(predicates)
    return None if None in listed else _joined(Or, listed)


def _joined(kind: type[And | Or], predicates: Sequence[Predicate]) -> Predicate | None:
    if len(predicates) < 2:
        return predicates[0] if predicates else None
    operands: list[Predicate] = []
    for predicate in predicates:
        operands += predicate.operands if isinstance(predicate, kind) else (predicate,)
    return kind(tuple(operands))


def fold(
    predicate: Predicate, of_term: Callable[[Term], Any], of_all: _Combine, of_any: _Combine
) -> Any:
    """Visit a predicate: ``of_term`` of each term, ``of_all`` of what that gave below an `And`."""
    if isinstance(predicate, Term):
        return of_term(predicate)
    results = [fold(operand, of_term, of_all, of_any) for operand in predicate.operands]
    return (of_all if isinstance(predicate, And) else of_any)(results)


def terms_of(predicate: Predicate | None) -> Iterator[Term]:
    """The terms of a predicate, from left to right."""
    if isinstance(predicate, Term):
        yield predicate
    elif predicate is not None:
        for operand in predicate.operands:
            yield from terms_of(operand)


def columns_of(predicate: Predicate | None) -> set[str]:
    """The columns that a predicate uses."""
    return {leaf.column for leaf in terms_of(predicate)}


def negated(predicate: Predicate) -> Predicate:
    """The opposite, which also doesn't hold where the predicate is null."""
    opposite: Predicate = fold(
        predicate, lambda leaf: replace(leaf, negated=not leaf.negated), any_of, all_of
    )
    return opposite


def only(predicate: Predicate | None, columns: Collection[str]) -> Predicate | None:
    """A weaker predicate that uses only these columns; None if it would hold for every row.

    It rules out rows by what is known already, such as the columns of a sidecar: every row that
    passes ``predicate`` passes it, too.
    """
    if predicate is None:
        return None
    weaker: Predicate | None = fold(
        predicate, lambda leaf: leaf if leaf.column in columns else None, all_of, any_of
    )
    return weaker


def holds(predicate: Predicate, table: pa.Table) -> np.ndarray:
    """Mark the rows of a table for which a predicate holds; shape (n,), bool."""
    marks = fold(
        predicate,
        lambda leaf: _holds(table.column(leaf.column), leaf),
        functools.partial(functools.reduce, pc.and_kleene),
        functools.partial(functools.reduce, pc.or_kleene),
    )
    values: np.ndarray = pc.fill_null(marks, False).to_numpy()
    return values


def _holds(column: pa.ChunkedArray, leaf: Term) -> pa.ChunkedArray:
    if pa.types.is_floating(column.type):
        column = column.cast(pa.float64())
    if leaf.op == "is null":
        marks = pc.is_null(column, nan_is_null=leaf.value)
    elif leaf.op == "in":
        marks = _is_in(column, leaf.value)
    else:
        marks = _compare(column, leaf.value, leaf.op)
    return pc.invert(marks) if leaf.negated else marks


def _compare(column: pa.ChunkedArray, value: Any, op: str) -> pa.ChunkedArray:
    """``column op value``, compared exactly, whatever the types; null where the column is null."""
    if is_number(column.type):
        value, side = _nearest(column.type, value)
        if side and op == "==":
            return pc.if_else(pc.is_valid(column), False, pa.scalar(None, pa.bool_()))
        if side:  # the constant lies between two values of the type, and this is one of them
            op = op[0] if (side < 0) is (op[0] == ">") else f"{op[0]}="
    return _COMPARISONS[op](column, pa.scalar(value, column.type))


def _is_in(column: pa.ChunkedArray, values: Sequence[Any]) -> pa.ChunkedArray:
    """Mark rows that equal one of ``values``; null rows do if None is among them."""
    constants = [value for value in values if value is not None]
    nulls = pc.is_null(column) if len(constants) < len(values) else None
    if is_number(column.type):
        nearest = [_nearest(column.type, value) for value in constants]
        constants = [near for near, side in nearest if not side]
    if pa.types.is_floating(column.type):
        # Only here, Arrow distinguishes -0.0 from 0.0; adding 0.0 makes both 0.0.
        column, constants = pc.add(column, 0.0), [near + 0.0 for near in constants]
    equal = pc.is_in(column, pa.array(constants, column.type))
    return equal if nulls is None else pc.or_(equal, nulls)


@functools.cache
def limits(type_: pa.DataType) -> tuple[int, int]:
    """The lowest and the highest value of an integer type."""
    info = np.iinfo(type_.to_pandas_dtype())
    return int(info.min), int(info.max)


def _nearest(type_: pa.DataType, value: Any) -> tuple[Any, int]:
    """A value of the column's type next to ``value``, and its sign relative to it.

    The sign is 0 if they are equal, -1 if the neighbour is below ``value``, 1 if above. Python
    compares numbers of different types exactly.
    """
    if pa.types.is_integer(type_):
        lowest, highest = limits(type_)
        near = lowest if value < lowest else highest if value > highest else math.floor(value)
    else:
        try:
            near = float(value)
        except OverflowError:
            near = math.inf if value > 0 else -math.inf
    return near, (near > value) - (near < value)


def parse_filters(filters: Any, types: Mapping[str, pa.DataType]) -> Predicate | None:
    """Parse a user's ``filters``, and check them against a collection's columns.

    Parameters
    ----------
    filters
        None, a list of ``(column, operator, value)`` that must all hold, or a list of such lists of
        which one must hold, as for ``dask.dataframe.read_parquet``. Or a predicate.
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
    if isinstance(filters, Predicate):
        predicate: Predicate = fold(filters, lambda leaf: _checked(leaf, types), all_of, any_of)
        return predicate
    try:
        alternatives = [filters] if all(isinstance(f, tuple) for f in filters) else filters
        triples = [[(column, op, value) for column, op, value in every] for every in alternatives]
        if not all(triples):
            raise ValueError("an empty list")
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"filters={shown(filters)}: pass a list of (column, operator, value) tuples, or a list "
            "of such lists of which one must hold, for example [('width', '>=', 512)]"
        ) from error
    return any_of(all_of(_checked(_parsed(*one), types) for one in every) for every in triples)


def _parsed(column: str, op: str, value: Any) -> Term:
    op = "==" if op == "=" else op
    if op not in _OPERATORS:
        raise ArgumentError(
            f"filters= has {shown((column, op, value))}: the operator must be one of "
            "== != < <= > >= in, 'not in'"
        )
    return term(column, op, value)


def _checked(leaf: Term, types: Mapping[str, pa.DataType]) -> Term:
    prefix = f"filters= has {shown(leaf)}"
    if not isinstance(leaf.column, str) or leaf.column not in types:
        raise ArgumentError(
            f"{prefix}: there is no column {shown(leaf.column)}; there are {', '.join(types)}"
        )
    type_ = types[leaf.column]
    if type_ == IMAGE:
        raise ArgumentError(
            f"{prefix}, and filters are evaluated before any pixel is decoded; filter the frame "
            "afterwards, or use a metadata column"
        )
    is_in = leaf.op == "in"
    if is_in and (not is_list_like(leaf.value) or isinstance(leaf.value, Mapping)):
        raise ArgumentError(f"{prefix}: the value must be a list")
    values = [
        value.item() if isinstance(value, np.generic) else value
        for value in (leaf.value if is_in else (leaf.value,))
    ]
    problem = next(filter(None, (_incomparable(type_, leaf.op, value) for value in values)), None)
    if problem:
        raise ArgumentError(f"{prefix}: {problem}")
    # Sorted, so that equal sets give equal tokens.
    ordered = tuple(dict.fromkeys(sorted(values, key=repr)))
    return replace(leaf, value=ordered if is_in else values[0])


def _incomparable(type_: pa.DataType, op: str, value: Any) -> str | None:
    """The reason why a column of this type can't be compared with a constant; None if it can."""
    if value is None:
        return None if op == "in" else "None compares with nothing"
    if is_number(type_):
        if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
            return f"the column is of type {type_} and the value is not a number"
        return "NaN compares with nothing" if value != value else None
    try:
        constant = pa.scalar(value, type_)
        _COMPARISONS.get(op, pc.equal)(pa.array([], type_), constant)
        # Arrow converts a str to bytes, and a datetime to a date, and drops what doesn't fit.
        exact = bool(constant.as_py() == value)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        exact = False
    return None if exact else f"the column is of type {type_}"
