"""A condition in words becomes a predicate, and runs nothing."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from dask_image_ingest.cli.where import json_fields_of, parse_where
from dask_image_ingest.dataset.predicates import holds
from dask_image_ingest.errors import ArgumentError

_LONG = " and ".join(f"(a < {number} or b < {number})" for number in range(20))


CONDITIONS = {
    "width >= 512": "width >= 512",
    "512 <= width": "width >= 512",
    "-1.5 < json.a.b": "json.a.b > -1.5",
    "256 <= width < 1024": "(width >= 256 and width < 1024)",
    "__key__ == 'a' and cls != 3": "(__key__ == 'a' and cls != 3)",
    "a < 1 or b > 2": "(a < 1 or b > 2)",
    "not (a < 1 or b == 2)": "(not a < 1 and b != 2)",
    "not a in [1, 2]": "a not in (1, 2)",
    "format not in ('png', 'webp')": "format not in ('png', 'webp')",
    "not not a not in [1]": "a not in (1,)",
    "not 1 < a < 3": "(not a > 1 or not a < 3)",
    "x == True": "x == True",
    "json.class == 3": "json.class == 3",
    "class in [3] or 1 < json.in.is": "(class in (3,) or json.in.is > 1)",
    "txt == 'a.class and from'": "txt == 'a.class and from'",
    "(a < 1\n  and json.class == 'é')": "(a < 1 and json.class == 'é')",
    "json.not != 'in'": "json.not != 'in'",
    "(a == 1 or a == 2) and b == 3 and c == 4": "((a == 1 or a == 2) and b == 3 and c == 4)",
    "a == 1 and (b == 3 and c == 1)": "(a == 1 and b == 3 and c == 1)",
    _LONG: f"({_LONG})",
}

NO_CONDITIONS = [
    "",
    "width >",
    "width",
    "width >= height",
    "1 < 2",
    "len(txt) > 3",
    "txt.startswith('a') == True",
    "__import__('os').system('true') == 0",
    "width >= (lambda: 1)()",
    "a[0] == 1",
    "width + 1 > 2",
    "a is None",
    "a.class",
    "class",
    "json.class == from",
    "json. == 3",
    "a < 1 and\n b < 2",
    "a == 'x",
    "a == (1",
    "a == 1)",
    "a == None",
    "a == float('nan')",
    "a in 3",
    "a == [1]",
    "a in []",
    "a < 1; b < 2",
    "x := 3",
    "a == f'{b}'",
    "a == " + "-" * 9000 + "1",
    "(" * 500 + "a < 1" + ")" * 500,
    "a < 1 or b",
]


def test_conditions_become_predicates():
    assert {text: repr(parse_where(text)) for text in CONDITIONS} == CONDITIONS


def test_anything_else_is_refused():
    for text in NO_CONDITIONS:
        with pytest.raises(ArgumentError, match="--where"):
            parse_where(text)


def test_json_fields_have_the_type_of_what_they_are_compared_with():
    predicate = parse_where(
        "json.score > 1 and json.name in ['a', 'b'] and json.good == True and width > 3"
    )
    assert json_fields_of(predicate) == {"score": "float64", "name": "string", "good": "bool"}


TYPES = {
    "json.x == 9007199254740991": "float64",
    "json.x == 1e18": "float64",
    "json.x >= 2 and json.x in [1, 2.5]": "float64",
    "json.x in ['a', 'b'] or json.x == 'c'": "string",
}

NO_TYPES = {
    "json.x == 9007199254740993": "--json-field x=int64",
    "not json.x in [9007199254740993]": "--json-field x=int64",
    "json.x == 99999999999999999999": "compare with a float",
    "json.x == 1" + "0" * 400: "compare with a float",
    "json.x == 'a' or json.x == 1": "with 'a' and with values of other types",
    "json.x in ['a', 1]": "other types",
    "json.x == True or json.x == 1": "other types",
}


def test_a_field_has_a_type_that_holds_all_it_is_compared_with():
    assert {text: json_fields_of(parse_where(text))["x"] for text in TYPES} == TYPES


def test_a_field_whose_type_is_not_told_is_refused_unless_it_is_named():
    for text, said in NO_TYPES.items():
        with pytest.raises(ArgumentError, match=said):
            json_fields_of(parse_where(text))
        more = parse_where(text + " and json.y == 1")
        assert json_fields_of(more, {"x": "int64"}) == {"y": "float64"}


def test_random_conditions_agree_with_python(rng):

    def condition(depth):
        if depth == 0 or rng.random() < 0.3:
            op = rng.choice(["<", "<=", ">", ">=", "==", "!="])
            return rng.choice(
                [f"{rng.choice('abc')} {op} {rng.randrange(4)}", f"{rng.randrange(4)} {op} b"]
            )
        one, other = condition(depth - 1), condition(depth - 1)
        return rng.choice([f"({one}) and ({other})", f"({one}) or ({other})", f"not ({one})"])

    for _ in range(300):
        text = condition(rng.randrange(4))
        rows = [{name: rng.randrange(4) for name in "abc"} for _ in range(10)]
        want = [number for number, row in enumerate(rows) if eval(text, {}, row)]
        table = pa.Table.from_pylist(rows)
        assert np.flatnonzero(holds(parse_where(text), table)).tolist() == want, (text, rows)
