"""Parser of ``--where``: ``width >= 512 and json.similarity > 0.3`` → a predicate.

The syntax is Python's, but nothing is executed: only comparisons of a column with constants,
``and``, ``or``, ``not`` and parentheses are allowed.
"""

from __future__ import annotations

import ast
import io
import keyword
import operator
import tokenize
from collections.abc import Container
from typing import Any

from dask_image_ingest.arguments import shown
from dask_image_ingest.dataset import predicates
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

_EXAMPLE = "for example \"width >= 512 and json.similarity > 0.3 and format in ['jpeg', 'png']\""


def parse_where(text: str) -> predicates.Predicate:
    """Parse a condition."""
    try:
        tree = ast.parse(_without_keywords(text.strip()), mode="eval")
        return _predicate(tree.body, text)
    except (SyntaxError, tokenize.TokenError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"--where {text!r} is no condition; {_EXAMPLE}") from error


def json_fields_of(
    predicate: predicates.Predicate | None, typed: Container[str] = ()
) -> dict[str, str]:
    """Infer the types of the JSON fields in a predicate from the values they are compared with.

    Fields in ``typed`` are left out: they have a type.
    """
    compared: dict[str, list[Any]] = {}
    for term in predicates.terms_of(predicate):
        field = term.column.removeprefix("json.")
        if field != term.column and field not in typed:
            compared.setdefault(field, []).extend(term.value if term.op == "in" else [term.value])
    return {field: _type_of(field, values) for field, values in compared.items()}


def _type_of(field: str, values: list[Any]) -> str:
    """Infer the type of a field from the values that it is compared with."""
    kinds = {_KINDS.get(type(value), "float64") for value in values}
    if len(kinds) > 1:
        raise ArgumentError(
            f"--where compares json.{field} with {shown(values[0])} and with values of other "
            f"types: say which it has, --json-field {field}=string"
        )
    large = [v for v in values if isinstance(v, int) and abs(v) >= _FIRST_INEXACT]
    if large:
        raise ArgumentError(
            f"--where compares json.{field} with {shown(large[0])}, and numbers are read as "
            "float64, which does not tell that one from its neighbours: say "
            f"--json-field {field}=int64, or compare with a float"
        )
    return kinds.pop()


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


def _predicate(node: ast.expr, text: str) -> predicates.Predicate:
    if isinstance(node, ast.BoolOp):
        join = predicates.all_of if isinstance(node.op, ast.And) else predicates.any_of
        return join(_predicate(value, text) for value in node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return predicates.negated(_predicate(node.operand, text))
    if isinstance(node, ast.Compare):  # or a chain of them: ``256 <= width < 1024``
        operands = [node.left, *node.comparators]
        pairs = zip(operands[:-1], node.ops, operands[1:], strict=True)
        return predicates.all_of(_comparison(left, op, right, text) for left, op, right in pairs)
    raise ArgumentError(
        f"--where {text!r}: {_source_of(node)!r} is no comparison of a column; {_EXAMPLE}"
    )


def _comparison(left: ast.expr, op: ast.cmpop, right: ast.expr, text: str) -> predicates.Predicate:
    name = _OPERATORS.get(type(op))
    mirrored = None if name in ("in", "not in") else predicates.MIRRORED.get(name or "", name)
    for column, value, operator_ in ((left, right, name), (right, left, mirrored)):
        if _is_column(column) and operator_ is not None:
            return predicates.term(_source_of(column), operator_, _constant(value, text, operator_))
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
