"""However a query is put, images of rows that it leaves out are not decoded.

Random chains of what people do to a frame: columns in another order, renamed, dropped and made of
others, filters as masks and as text. Each is compared with the same over rows in memory, and its
decoded images and walks over shards are counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from counted import work  # noqa: F401

import dask_image_ingest as dii

NUMBERS = {"width": 200, "height": 150, "nbytes": 20_000, "cls": 1}
TEXTS = ["__key__", "txt", "format"]


@pytest.fixture(scope="module")
def ddf(shards):
    return dii.read_webdataset_images(shards, backend="pandas", size=32)


@pytest.fixture(scope="module")
def rows(ddf):
    return ddf.compute()


class Step(NamedTuple):
    """Something done to a frame, lazy or in memory, and what is done, for whoever reads of it."""

    do: Callable[[Any], Any]
    told: str


def step(rng: random.Random, frame: Any) -> Step | None:
    """A random step that fits the columns of a frame."""
    columns = list(frame.columns)
    numbers = [c for c in columns if c.partition("_of_")[0] in NUMBERS or c == "made"]
    texts = [c for c in columns if c.partition("_of_")[0] in TEXTS]
    kind = rng.choice(
        ["columns", "columns", "mask", "mask", "mask", "text", "make", "rename", "drop"]
    )
    if kind == "columns":
        some = rng.sample(columns, rng.randint(1, len(columns)))
        if "image" in columns and "image" not in some and rng.random() < 0.8:
            some.insert(rng.randint(0, len(some)), "image")
        return Step(lambda f: f[some], f"[{some}]")
    if kind == "drop":
        one = rng.choice(columns)
        return Step(lambda f: f.drop(columns=[one]), f".drop({one})") if columns[1:] else None
    if kind == "rename":
        one = rng.choice([*numbers, *texts, "image"])
        if one not in numbers + texts or "_of_" in one:
            return None
        return Step(lambda f: f.rename(columns={one: f"{one}_of_"}), f".rename({one})")
    if not numbers:
        return None
    one, other = rng.choice(numbers), rng.choice(numbers)
    bound = NUMBERS.get(one.partition("_of_")[0], 10_000)
    if kind == "make":
        return Step(lambda f: f.assign(made=f[one] + f[other]), f".assign({one} + {other})")
    if kind == "text":
        text = rng.choice([f"{one} > {bound}", f"{one} * 2 <= {other} + {bound}"])
        return Step(lambda f: f.query(text), f".query({text})")
    masks = [
        Step(lambda f: f[f[one] > bound], f"[{one} > {bound}]"),
        Step(lambda f: f[(f[one] > bound) | (f[other] * 2 < bound)], f"[{one} or {other}]"),
    ]
    if texts:
        word = rng.choice(texts)
        masks.append(Step(lambda f: f[f[word].str.contains("1")], f"[{word} has 1]"))
        masks.append(
            Step(lambda f: f[(f[one] > bound) & f[word].str.contains("1")], f"[{one} and {word}]")
        )
    return rng.choice(masks)


def question(rng: random.Random, kept: Any) -> Step:
    """What is asked at the end, of rows that are in memory too."""
    asked = [
        Step(lambda f: len(f), "len"),
        Step(lambda f: list(compute(f.index)), "index"),
        Step(lambda f: compute(f).index.tolist(), "all"),
        Step(lambda f: compute(f).index.tolist(), "all"),
    ]
    other = [column for column in kept.columns if column not in ("image", "error")]
    if other:
        name = rng.choice(other)
        asked.append(Step(lambda f: compute(f[name]).tolist(), name))
    return rng.choice(asked)


def compute(frame: Any) -> Any:
    return frame.compute() if hasattr(frame, "compute") else frame


@pytest.mark.slow
@pytest.mark.rounds(1, nightly=60)
def test_no_image_is_decoded_for_rows_and_columns_that_are_left_out(ddf, rows, work, rng):  # noqa: F811
    decoded = 0
    for _ in range(30):
        lazy, kept, told = ddf, rows, []
        for _ in range(rng.randint(1, 5)):
            chosen = step(rng, kept)
            if chosen is not None:
                lazy, kept = chosen.do(lazy), chosen.do(kept)
                told.append(chosen.told)
        asked = question(rng, kept)
        work.clear()
        assert asked.do(lazy) == asked.do(kept), (told, asked.told)
        needs_decode = asked.told == "all" and {"image", "error"}.intersection(kept.columns)
        assert work["decoded"] == (len(kept) if needs_decode else 0), (told, asked.told)
        assert work["walks"] == ddf.npartitions, (told, asked.told)
        decoded += work["decoded"]
    assert decoded  # some chains did ask for images
