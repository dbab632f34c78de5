"""Groups are brought together as references, then decoded; their functions agree with pandas."""

from __future__ import annotations

import dask
import numpy as np
import pandas as pd
import pytest
from counted import work  # noqa: F401
from odd_shards import in_this_process, read, write_odd_shards  # noqa: F401
from photo_shards import make_photos

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.references import Decode
from dask_image_ingest.errors import PartitionTooLargeError
from dask_image_ingest.frames.pandas_backend import PandasBackend

ROW = 16 * 16 * 3


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    jpeg = make_photos(1)[0].members["jpg"]
    return write_odd_shards(tmp_path_factory.mktemp("shards"), ("lost.jpg", jpeg))


@pytest.fixture
def ddf(shards):
    return read(shards)


@pytest.fixture(scope="module")
def whole(shards):
    """The rows in pandas, decoded by the read."""
    return read(shards).compute(scheduler="sync")


def light(group, factor=1):
    return factor * sum(float(image.mean()) for image in group.images.arrays() if image is not None)


def light_by_keyword(group, *, factor):
    return light(group, factor)


def told(group):
    return pd.Series({"light": light(group), "rows": len(group), "errors": group.error.count()})


def named(group):
    return f"{group.name} of {', '.join(group.columns)}, {', '.join(map(str, group.dtypes))}"


def larger(group):
    return group[group.width > 200]


def one_row(group):
    return pd.DataFrame({"key": [group["__key__"].min()], "light": [light(group)]})


def with_light(group):
    return group.assign(light=[None if a is None else a.mean() for a in group.images.arrays()])


FUNCTIONS = {
    "a number": (light, (None, "float64"), {}),
    "an argument": (light, (None, "float64"), {"args": (2,)}),
    "a keyword": (light_by_keyword, (None, "float64"), {"kwargs": {"factor": 3}}),
    "a series": (told, {"light": "float64", "rows": "float64", "errors": "float64"}, {}),
    "what it sees": (named, (None, "object"), {}),
    "fewer rows": (larger, None, {}),
    "a frame": (one_row, {"key": "string", "light": "float64"}, {}),
    "all rows": (with_light, {"light": "float64"}, {}),
}

GROUPS = {
    "by a number": {"by": "cls"},
    "with nulls": {"by": "cls", "dropna": False},
    "by two": {"by": ["cls", "format"]},
    "without keys": {"by": "cls", "group_keys": False},
}


def applied(frame, function, groups):
    """The answer of a frame, lazy or not, in one order."""
    call, meta, given = FUNCTIONS[function]
    options = {**given.get("kwargs", {})}
    if not isinstance(frame, pd.DataFrame):
        by = GROUPS[groups]["by"]
        rows = frame._meta.drop(columns=by)
        known = {"fewer rows": rows, "all rows": rows.assign(light=1.0)}
        options["meta"] = known.get(function, meta)
    return frame.groupby(**GROUPS[groups]).apply(call, *given.get("args", ()), **options)


PAIRS = {
    *((function, "by a number") for function in FUNCTIONS),
    *(("a frame", groups) for groups in GROUPS),
    ("all rows", "without keys"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("function", "groups"), sorted(PAIRS))
def test_a_function_of_groups_answers_as_in_pandas(ddf, whole, function, groups):
    lazy = applied(ddf, function, groups)
    assert moves_references(lazy)
    got = lazy.compute()
    with dask.config.set({"image-ingest.decode-late": False}):
        assert not moves_references(lazy)
        moved = lazy.compute()
    want = applied(whole, function, groups)
    same = getattr(pd.testing, f"assert_{type(got).__name__.lower().replace('data', '')}_equal")
    same(got, moved)
    same(in_order(got), in_order(want), check_names=False)


def moves_references(collection):
    """True if images are decoded after a shuffle of references."""
    moves = list(collection.simplify().expr.find_operations(dx.RearrangeByColumn))
    return any(not list(move.find_operations(Decode)) for move in moves)


def in_order(result):
    """By labels and keys: partitions are in no order, and the rows of a group in that of shards."""
    keys = [name for name in ("__key__", "key") if name in getattr(result, "columns", ())]
    result = result.sort_values(keys, kind="stable") if keys else result
    return result.sort_index(kind="stable")


@pytest.mark.slow
def test_groups_of_a_frame_that_lies_by_its_keys_are_not_moved_again(ddf, whole):
    for moved in (ddf.shuffle("cls"), ddf.dropna(subset=["cls"]).set_index("cls")):
        lazy = moved.groupby("cls").apply(light, meta=(None, "float64"))
        moves = lazy.optimize(fuse=False).expr.find_operations(dx.ShuffleBase)
        assert len(list(moves)) == 1
        want = whole.groupby("cls").apply(light)
        pd.testing.assert_series_equal(lazy.compute().sort_index(), want, check_names=False)


def test_a_category_of_no_row_is_an_empty_group(ddf, whole):
    def kinds(frame):
        dtype = pd.CategoricalDtype(["jpeg", "png"])
        known = frame["format"].where(frame["format"] == "jpeg")
        frame = frame.assign(kind=known.astype(dtype))
        return frame.groupby("kind", observed=False)

    lazy = kinds(ddf).apply(told, meta=FUNCTIONS["a series"][1])
    assert moves_references(lazy)
    got = lazy.compute()
    want = kinds(whole).apply(told)
    pd.testing.assert_frame_equal(got[got.rows > 0], want[want.rows > 0], check_names=False)
    assert (got[got.rows == 0].light == 0).all()
    assert "png" in got.index


LEFT = {
    "a column of groups": lambda ddf: ddf.groupby("cls")["image"].apply(len, meta=(None, "int64")),
    "groups by a function of rows": lambda ddf: ddf.groupby(ddf.cls + 1).apply(
        light, meta=(None, "float64")
    ),
    "groups by errors": lambda ddf: ddf.groupby("error").apply(light, meta=(None, "float64")),
    "a transform": lambda ddf: ddf.groupby("cls").transform(
        lambda column: column, meta=ddf._meta.drop(columns="cls")
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_functions_of_groups_are_left_alone(ddf, name):
    assert not list(LEFT[name](ddf).simplify().expr.find_operations(dx.RearrangeByColumn))


def test_groups_that_one_worker_cannot_hold_are_an_error_before_the_decode(ddf, whole, monkeypatch):
    lazy = ddf.groupby("cls").apply(light, meta=(None, "float64"))
    monkeypatch.setattr(PandasBackend, "largest_partition", ROW)
    with pytest.raises(PartitionTooLargeError, match=r"the \d+ images of a partition"):
        lazy.compute()


def test_images_of_groups_can_be_kept(ddf, whole):
    got = ddf.groupby("cls").apply(larger, meta=ddf._meta.drop(columns="cls")).compute()
    want = whole.set_index("__key__").image
    for key, image in zip(got["__key__"], got.images.arrays(), strict=True):
        np.testing.assert_array_equal(image, want.loc[[key]].to_frame().images.arrays()[0])
