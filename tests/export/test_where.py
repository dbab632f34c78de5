"""A condition in words means the filters that one would write, and runs nothing."""

from __future__ import annotations

import operator
import random

import pytest

from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export.where import json_fields_of, parse_where


@pytest.mark.parametrize(
    ("text", "filters"),
    [
        ("width >= 512", ((("width", ">=", 512),),)),
        ("512 <= width", ((("width", ">=", 512),),)),
        ("-1.5 < json.a.b", ((("json.a.b", ">", -1.5),),)),
        ("256 <= width < 1024", ((("width", ">=", 256), ("width", "<", 1024)),)),
        ("__key__ == 'a' and cls != 3", ((("__key__", "==", "a"), ("cls", "!=", 3)),)),
        ("a < 1 or b", None),
        ("a < 1 or b > 2", ((("a", "<", 1),), (("b", ">", 2),))),
        ("not (a < 1 or b > 2)", ((("a", ">=", 1), ("b", "<=", 2)),)),
        ("not a in [1, 2]", ((("a", "not in", (1, 2)),),)),
        ("format not in ('png', 'webp')", ((("format", "not in", ("png", "webp")),),)),
        ("not 1 < a < 3", ((("a", "<=", 1),), (("a", ">=", 3),))),
        ("x == True", ((("x", "==", True),),)),
        (
            "(a == 1 or a == 2) and b == 3",
            ((("a", "==", 1), ("b", "==", 3)), (("a", "==", 2), ("b", "==", 3))),
        ),
    ],
)
def test_conditions_mean_filters(text, filters):
    if filters is None:
        with pytest.raises(ArgumentError):
            parse_where(text)
    else:
        assert parse_where(text) == filters


@pytest.mark.parametrize(
    "text",
    [
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
        " and ".join(["(a < 1 or b < 1)"] * 8),
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ArgumentError, match="--where"):
        parse_where(text)


def test_json_fields_have_the_type_of_what_they_are_compared_with():
    filters = parse_where(
        "json.score > 1 and json.name in ['a', 'b'] and json.good == True and width > 3"
    )
    assert json_fields_of(filters) == {"score": "float64", "name": "string", "good": "bool"}


def test_random_conditions_agree_with_python():
    rng = random.Random(5)

    def condition(depth):
        if depth == 0 or rng.random() < 0.3:
            op = rng.choice(["<", "<=", ">", ">=", "==", "!="])
            return rng.choice(
                [f"{rng.choice('abc')} {op} {rng.randrange(4)}", f"{rng.randrange(4)} {op} b"]
            )
        one, other = condition(depth - 1), condition(depth - 1)
        return rng.choice([f"({one}) and ({other})", f"({one}) or ({other})", f"not ({one})"])

    operators = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
    operators |= {"==": operator.eq, "!=": operator.ne}
    for _ in range(300):
        text = condition(rng.randrange(4))
        filters = parse_where(text)
        for _ in range(10):
            row = {name: rng.randrange(4) for name in "abc"}
            holds = any(all(operators[op](row[n], v) for n, op, v in f) for f in filters)
            assert holds is eval(text, {}, row), (text, row)
