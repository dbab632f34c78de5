"""Parser of ``--where``: ``width >= 512 and json.similarity > 0.3`` → filters.

The syntax is Python's, but nothing is executed: only comparisons of a column with constants,
``and``, ``or``, ``not`` and parentheses are allowed.
"""

from __future__ import annotations

import ast
import io
import keyword
import operator
import tokenize
from collections.abc import Callable, Container
from functools import reduce
from typing import Any

from dask_image_ingest.arguments import shown
from dask_image_ingest.dataset import MIRRORED, NEGATED, Filters, Predicate, both, either
from dask_image_ingest.errors import ArgumentError

_OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.In: "in",
    ast.NotIn: "not in",
}

# Python keywords that keep their meaning; all others are names of columns.
_WORDS = {"and", "or", "not", "in", "is", "True", "False", "None", "lambda", "if", "else", "for"}

# Added to column names that are Python keywords, so that they parse.
_PREFIX = "_name_of_a_column_"

_KINDS: dict[type, str] = {bool: "bool", str: "string"}

# float64 represents every integer below this.
_FIRST_INEXACT = 2**53

_INTEGERS = (("int64", -(2**63), 2**63 - 1), ("uint64", 0, 2**64 - 1))

_EXAMPLE = "for example \"width >= 512 and json.similarity > 0.3 and format in ['jpeg', 'png']\""


def parse_where(text: str) -> Filters:
    """Parse a condition to filters; a comparison with null is false.

    Raises
    ------
    ArgumentError
        For anything but comparisons of a column with a constant, and their combinations.
    """
    try:
        tree = ast.parse(_without_keywords(text.strip()), mode="eval")
        return _filters(tree.body, text, negated=False)
    except (SyntaxError, tokenize.TokenError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"--where {text!r} is no condition; {_EXAMPLE}") from error


def json_fields_of(filters: Filters, typed: Container[str] = ()) -> dict[str, str]:
    """Infer the types of the JSON fields in filters from the values they are compared with.

    Fields in ``typed`` are left out: they have a type.

    Raises
    ------
    ArgumentError
        If the values do not determine a type.
    """
    compared: dict[str, list[tuple[str, Any]]] = {}
    for column, op, value in (predicate for conjunction in filters for predicate in conjunction):
        field = column.removeprefix("json.")
        if field != column and field not in typed:
            values = value if isinstance(value, tuple) else (value,)
            compared.setdefault(field, []).extend((op, v) for v in values)
    return {field: _type_of(field, pairs) for field, pairs in compared.items()}


def split_by_signals(filters: Filters) -> tuple[Filters, Filters]:
    """Split filters: those for the read, and those for afterwards, on signals of quality."""
    if len(filters) == 1:
        (conjunction,) = filters
        early = tuple(p for p in conjunction if not _is_signal(p))
        late = tuple(p for p in conjunction if _is_signal(p))
        return ((early,) if early else ()), ((late,) if late else ())
    if any(_is_signal(p) for conjunction in filters for p in conjunction):
        return (), filters  # a disjunction cannot be split
    return filters, ()


def _is_signal(predicate: Predicate) -> bool:
    return predicate[0].startswith("quality.")


_COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda column, values: column.isin(list(values)),
    "not in": lambda column, values: ~column.isin(list(values)) & column.notnull(),
}


def holds(frame: Any, filters: Filters) -> Any:
    """Mask of the rows of a lazy frame that meet filters; a comparison with null is false.

    Raises
    ------
    ArgumentError
        If the frame lacks a column.
    """
    for name, _, _ in (predicate for conjunction in filters for predicate in conjunction):
        if name not in frame.columns:
            raise ArgumentError(
                f"--where names {name!r}, which there is not: the columns are "
                f"{', '.join(map(repr, frame.columns))}"
            )
    return reduce(
        operator.or_,
        (
            reduce(operator.and_, (_COMPARED[op](frame[n], v) for n, op, v in conjunction))
            for conjunction in filters
        ),
    )


def _type_of(field: str, compared: list[tuple[str, Any]]) -> str:
    """Infer the type of a field from its comparisons: operators and values."""
    kinds = {_KINDS.get(type(value), "float64") for _, value in compared}
    if len(kinds) > 1:
        raise ArgumentError(
            f"--where compares json.{field} with {shown(compared[0][1])} and with values of other "
            f"types: say which it has, --json-field {field}=string"
        )
    whole = [value for _, value in compared if isinstance(value, int)]
    large = [value for value in whole if abs(value) >= _FIRST_INEXACT]
    if not large:
        return kinds.pop()
    types = [name for name, least, most in _INTEGERS if least <= min(whole) and max(whole) <= most]
    # An integer type is safe if the field must equal integers: values that it turns to null would
    # not have been equal.
    if types and len(whole) == len(compared) and all(op in ("==", "in") for op, _ in compared):
        return types[0]
    advice = f"say --json-field {field}={types[0]}" if types else "compare with a float"
    raise ArgumentError(
        f"--where compares json.{field} with {shown(large[0])}, and numbers are read as float64, "
        f"which does not tell that one from its neighbours: {advice}"
    )


def _without_keywords(text: str) -> str:
    """Prefix column names that are Python keywords, such as ``json.class``."""
    words, before = [], ""
    for kind, word, *_ in tokenize.generate_tokens(io.StringIO(text).readline):
        is_name = keyword.iskeyword(word) and (before == "." or word not in _WORDS)
        words.append((kind, f"{_PREFIX}{word}" if is_name else word))
        before = word
    return tokenize.untokenize(words)


def _source_of(node: ast.expr) -> str:
    """The text of a node, without prefixes."""
    return ast.unparse(node).replace(_PREFIX, "")


def _filters(node: ast.expr, text: str, negated: bool) -> Filters:
    if isinstance(node, ast.BoolOp):
        parts = [_filters(value, text, negated) for value in node.values]
        join = both if isinstance(node.op, ast.And) is not negated else either
        return reduce(lambda one, other: _check_size(join(one, other), text), parts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _filters(node.operand, text, not negated)
    if isinstance(node, ast.Compare):
        return _comparisons(node, text, negated)
    raise ArgumentError(
        f"--where {text!r}: {_source_of(node)!r} is no comparison of a column; {_EXAMPLE}"
    )


def _comparisons(node: ast.Compare, text: str, negated: bool) -> Filters:
    """Filters of a comparison, or of a chain of them: ``256 <= width < 1024``."""
    operands = [node.left, *node.comparators]
    chain = [
        _predicate(left, op, right, text)
        for left, op, right in zip(operands[:-1], node.ops, operands[1:], strict=True)
    ]
    if negated:
        return tuple(((column, NEGATED[op], value),) for column, op, value in chain)
    return (tuple(chain),)


def _predicate(left: ast.expr, op: ast.cmpop, right: ast.expr, text: str) -> Predicate:
    name = _OPERATORS.get(type(op))
    mirrored = None if name in ("in", "not in") else MIRRORED.get(name or "", name)
    for column, value, operator_ in ((left, right, name), (right, left, mirrored)):
        if _is_column(column) and operator_ is not None:
            return _source_of(column), operator_, _constant(value, text, operator_)
    raise ArgumentError(
        f"--where {text!r}: on one side of a comparison stands a column, on the other a constant; "
        f"the comparisons are {', '.join(_OPERATORS.values())}"
    )


def _is_column(node: ast.expr) -> bool:
    """True for a name such as ``width``, ``json.similarity``, ``__key__``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _constant(node: ast.expr, text: str, op: str) -> Any:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        value = None
    values = list(value) if isinstance(value, (list, tuple, set)) and value else [value]
    is_list = isinstance(value, (list, tuple, set))
    if is_list is not op.endswith("in") or not all(
        isinstance(v, (bool, int, float, str)) and operator.eq(v, v) for v in values
    ):
        raise ArgumentError(
            f"--where {text!r}: {_source_of(node)!r} is no constant for {op!r}: give a number, a "
            "text in quotes, True or False, or after 'in' a list of them"
        )
    return tuple(values) if is_list else value


def _check_size(filters: Filters | None, text: str) -> Filters:
    if filters is None:
        raise ArgumentError(f"--where {text!r} has too many alternatives")
    return filters
