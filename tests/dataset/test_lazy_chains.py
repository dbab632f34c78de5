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


# Columns that are known without pixels, also of `find_issues`.
KNOWN = ("width", "height", "nbytes", "cls", "quality.aspect")


def computing_step(rng: random.Random, frame: Any) -> Step:
    """A new column, mostly from pixels."""
    flags = [c for c in frame.columns if str(frame.dtypes[c]) in ("bool", "bool[pyarrow]")]
    kind = rng.choice(["light", "light", "bright", "issues", "both", "column"])
    if kind == "issues" and "issue.dark" not in frame.columns:
        return Step(dii.curate.find_issues, ".find_issues")
    if kind == "bright":
        return Step(lambda f: f.assign(bright=light_of(f) > 120), ".assign(light > 120)")
    if kind == "both" and flags:
        one, other = rng.choice(flags), rng.choice(flags)
        return Step(lambda f: f.assign(both=f[one] & ~f[other]), f".assign({one} & ~{other})")
    if kind == "column":
        name = rng.choice([c for c in KNOWN if c in frame.columns])
        return Step(lambda f: f.assign(double=f[name] * 2), f".assign({name} * 2)")
    name = f"light{len(frame.columns)}"
    return Step(lambda f: put(f, name, light_of(f) + f["cls"]), f"[{name}] = light + cls")


def put(frame: Any, name: str, values: Any) -> Any:
    frame = frame.copy()
    frame[name] = values
    return frame


def light_of(frame: Any) -> Any:
    outputs = {"light": "float32"}
    return frame.images.map_batches(lambda images: [i.mean() for i in images], outputs)["light"]


def filtering_step(rng: random.Random, frame: Any) -> Step:
    """A filter on columns that are known without pixels."""
    name = rng.choice([c for c in (*KNOWN, "double") if c in frame.columns])
    bound = frame[name].quantile(rng.choice([0.2, 0.5, 0.8])) if len(frame) else 1
    values = frame["cls"].drop_duplicates().tolist()[:1]
    filters = [
        Step(lambda f: f[f[name] > bound], f"[{name} > {bound}]"),
        Step(lambda f: f.loc[(f[name] <= bound) | (f["cls"] == 1)], f".loc[{name} or cls]"),
        Step(lambda f: f[f["cls"].isin(values)], f"[cls in {values}]"),
        Step(lambda f: f.query(f"`{name}` >= {bound}"), f".query({name} >= {bound})"),
        Step(lambda f: f.dropna(subset=["height", name]), f".dropna({name})"),
        Step(lambda f: f[f["width"] * f["height"] > 30_000], "[width * height]"),
        Step(lambda f: f[f["width"] >= f["width"].mean()], "[width >= mean]"),
    ]
    for issue in ("issue.odd_aspect", "issue.odd_size"):
        if issue in frame.columns:
            filters += [Step(lambda f, i=issue: f[~f[i] & (f[name] > bound)], f"[~{issue}]")] * 3
    return rng.choice(filters)


@pytest.mark.slow
@pytest.mark.rounds(1, nightly=40)
def test_no_image_is_decoded_for_rows_that_a_filter_after_computed_columns_drops(
    ddf,
    rows,
    work,  # noqa: F811
    rng,
):
    for _ in range(12):
        lazy, kept, told = ddf, rows, []
        for number in range(rng.randint(3, 6)):
            filters = number > 0 and rng.random() < 0.5
            chosen = (filtering_step if filters else computing_step)(rng, kept)
            lazy, kept = chosen.do(lazy), chosen.do(kept)
            told.append(chosen.told)
        unused = rng.sample([c for c in kept.columns if c not in ("image", *KNOWN)], 2)
        lazy, kept = lazy.drop(columns=unused), kept.drop(columns=unused)
        told.append(f".drop({unused})")
        if rng.random() < 0.5:
            chosen = filtering_step(rng, kept)
            lazy, kept = chosen.do(lazy), chosen.do(kept)
            told.append(chosen.told)
        work.clear()
        assert len(lazy) == len(kept), told
        assert work["decoded"] == 0, told
        got = lazy.compute()
        assert list(got.columns) == list(kept.columns), told
        for name in kept.columns.difference(["image"]):
            assert got[name].equals(kept[name]), (told, name)
        assert (
            got.images.arrays()[0].tolist() == kept.images.arrays()[0].tolist() if len(kept) else 1
        )
        assert work["decoded"] == len(kept), told
