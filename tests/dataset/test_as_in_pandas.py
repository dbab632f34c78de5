"""Queries that Dask's own rules answer wrongly or not at all have the answers of pandas."""

from __future__ import annotations

import dask
import pandas as pd
import pytest
from counted import work  # noqa: F401

import dask_image_ingest as dii
from dask_image_ingest.errors import ArgumentError


@pytest.fixture(scope="module")
def ddf(shards):
    return dii.read_webdataset_images(shards, backend="pandas", size=8)


@pytest.fixture(scope="module")
def rows(ddf):
    return ddf.compute(scheduler="synchronous")


@pytest.fixture(autouse=True)
def scheduler():
    with dask.config.set(scheduler="synchronous"):
        yield


MASKS = {
    "astype": lambda d: (d.height > 150).astype(bool),
    "astype of an extension type": lambda d: (d.height > 150).astype("boolean"),
    "astype of numbers": lambda d: d.cls.astype(bool),
    "rename": lambda d: (d.height > 150).rename("tall"),
    "isin": lambda d: d.cls.isin([1, 2]).astype(bool),
    "fillna": lambda d: (d.height > 150).fillna(False).astype(bool),
    "where": lambda d: (d.height > 150).where(d.cls > 0, False).astype(bool),
    "clip": lambda d: d.cls.clip(0, 1).astype(bool),
    "not": lambda d: ~(d.height > 150).astype(bool),
    "both": lambda d: (d.height > 150).astype(bool) & (d.cls > 0).astype(bool),
    "copy": lambda d: (d.height > 150).copy(),
    "rename_axis": lambda d: (d.height > 150).rename_axis("label"),
    "to_frame": lambda d: (d.height > 150).to_frame().astype(bool)["height"],
    "error": lambda d: d.error.isna().astype(bool),
}

FILTERED = {
    "rows": lambda d, mask: d[mask],
    "columns": lambda d, mask: d[mask][["__key__", "cls"]],
    "a column": lambda d, mask: d[mask]["height"],
    "of a column": lambda d, mask: d["height"][mask],
    "assigned": lambda d, mask: d.assign(kept=mask)[mask],
    "renamed": lambda d, mask: d.rename(columns={"cls": "label"})[mask],
    "twice": lambda d, mask: d[mask].query("cls > 1"),
    "loc": lambda d, mask: d.loc[mask],
    "itself": lambda d, mask: mask[mask],
}


PAIRS = [*((mask, "rows") for mask in MASKS), *(("astype", filtered) for filtered in FILTERED)]


@pytest.mark.parametrize(("mask", "filtered"), PAIRS)
def test_a_mask_selects_the_rows_where_it_is_true_whatever_it_ends_with(mask, filtered, ddf, rows):
    query = FILTERED[filtered](ddf, MASKS[mask](ddf))
    expected = FILTERED[filtered](rows, MASKS[mask](rows))
    assert len(query) == len(expected)
    assert same(query.compute(), expected)


@pytest.mark.parametrize("kind", ["persisted", "references"])
def test_a_mask_of_a_frame_without_pixels(kind, ddf, rows, shards):
    frame = dii.read_webdataset_images(shards, backend="pandas", decode=False)
    if kind == "persisted":
        frame = ddf.drop(columns=["image", "error"]).persist()
    assert same(frame[(frame.height > 150).astype(bool)].compute(), rows[rows.height > 150])


def same(got, expected):
    """True for equal metadata and labels."""
    if got.ndim == 1 or expected.ndim == 1:
        return got.equals(expected)
    shown = [name for name in got.columns if name not in ("image", "error")]
    return got[shown].equals(expected[shown])


def test_sums_of_a_mask_that_ends_in_astype_decode_nothing(ddf, rows, work):  # noqa: F811
    mask = (ddf.height > 150).astype(bool)
    assert ddf[mask].height.sum().compute() == rows[rows.height > 150].height.sum()
    assert len(ddf[mask]) == (rows.height > 150).sum()
    assert not work["decoded"]
    assert len(ddf[mask].compute()) == work["decoded"]


@pytest.mark.parametrize(
    "query",
    [
        lambda d: (lambda e: e[e["half"] == 1])(half(d).astype({"half": "int64"})),
        lambda d: (lambda s: s[s == 1])(half(d)["half"].astype("int64")),
        lambda d: (lambda e: e[e.index.to_series() > 1])(d[d.cls > 1].reset_index(drop=True)),
    ],
    ids=["a frame", "a column", "labels"],
)
def test_a_mask_of_changed_values_is_no_mask_of_those_before(query, ddf):
    table = ddf.drop(columns=["image", "error"])
    expected = pd.concat(query(part.compute()) for part in table.partitions)
    assert 0 < len(expected) < 24
    assert query(table).compute().equals(expected)


def half(frame):
    return frame.assign(half=frame["cls"] / 2)


BY_COLUMN = {
    "nlargest": lambda d: d.nlargest(3, "nbytes"),
    "nsmallest of two": lambda d: d.nsmallest(3, ["cls", "nbytes"]),
    "head of sorted rows": lambda d: head(d.sort_values("nbytes"), 3),
    "tail of sorted rows": lambda d: tail(d.sort_values(["cls", "nbytes"]), 3),
    "fillna": lambda d: d.fillna({"txt": "none"}),
    "replace": lambda d: d.replace({"cls": {1: 7}}),
    "round": lambda d: half(d).round({"half": 0}),
    "query": lambda d: d.query("nbytes > 20_000"),
}


def head(frame, n):
    return frame.head(n) if isinstance(frame, pd.DataFrame) else frame.head(n, compute=False)


def tail(frame, n):
    return frame.tail(n) if isinstance(frame, pd.DataFrame) else frame.tail(n, compute=False)


@pytest.mark.parametrize("operation", BY_COLUMN)
def test_some_columns_of_an_operation_on_others(operation, ddf, rows):
    expected = BY_COLUMN[operation](rows)
    for columns in ("cls", ["cls"], ["__key__", "height"], ["nbytes"], "txt"):
        got = BY_COLUMN[operation](ddf)[columns].compute()
        assert got.equals(expected[columns]), columns


BY_ERRORS = {
    "text": lambda d: ~d.error.fillna("").str.startswith("no image"),
    "length": lambda d: d.error.str.len() > 3,
    "constant": lambda d: d.error == "x",
    "isin": lambda d: d.error.isin(["x"]),
    "where": lambda d: d.error.where(d.error.notnull(), "x") == "x",
    "mask": lambda d: d.error.mask(d.error.isna(), "x") == "x",
    "cast": lambda d: d.error.isna().astype(int) > 0,
    "aggregate": lambda d: d.error.str.len().fillna(0) > d.error.str.len().fillna(0).min(),
    "metadata, too": lambda d: (d.error.fillna("x") == "x") & (d.height > 150),
}

OF_KEPT = {
    "error": lambda kept: kept["error"],
    "image": lambda kept: kept["image"],
    "other columns": lambda kept: kept.drop(columns=["image"]).height,
    "counts": lambda kept: kept["error"].value_counts(),
    "filtered again": lambda kept: kept[kept.error.isna()].image,
    "renamed": lambda kept: kept.rename(columns={"image": "photo"})["photo"],
}


def test_columns_of_the_rows_that_a_function_of_their_errors_keeps(ddf, rows):
    wrong = {}
    for mask, keep in BY_ERRORS.items():
        for part, of_kept in OF_KEPT.items():
            expected = of_kept(rows[keep(rows).fillna(False)])
            try:
                result = of_kept(ddf[keep(ddf)]).compute()
            except Exception as error:
                wrong[mask, part] = error
            else:
                if result.index.tolist() != expected.index.tolist():
                    wrong[mask, part] = result
    assert not wrong


def test_the_images_of_the_smallest_rows(ddf, rows, work):  # noqa: F811
    smallest = ddf.nsmallest(3, "nbytes")
    expected = [image.tolist() for image in rows.nsmallest(3, "nbytes").images.arrays()]
    assert smallest.images.stack().compute().tolist() == expected
    assert [i.tolist() for b in smallest.images.iter_batches(2) for i in b["image"]] == expected
    assert work["decoded"] == 6


@pytest.mark.parametrize(
    "query",
    [
        lambda d: d,
        lambda d: d[d.height > 150],
        lambda d: d.assign(area=d.height * d.width),
        lambda d: d.images.map_batches(lambda x: [0.0] * len(x), {"score": "float32"}),
    ],
    ids=["read", "filter", "assign", "map_batches"],
)
def test_no_partitions_are_no_rows(query, ddf, work):  # noqa: F811
    frame = query(ddf)
    rest = frame.partitions[ddf.npartitions :]
    assert (len(rest), len(rest.head()), rest["cls"].sum().compute()) == (0, 0, 0)
    assert rest.compute().dtypes.equals(frame.dtypes)
    assert len(rest[rest.height > 9].compute()) == 0
    assert not work["walks"]


def test_why_the_rows_of_a_transform_cannot_be_paired_is_told(ddf, rows):
    table = ddf[["__key__", "cls", "height"]]
    tallest = table.groupby("cls").height.transform("max", meta=("height", "int32[pyarrow]"))
    with pytest.raises(ArgumentError, match=r"in other partitions, as after groupby\(\.\.\.\)\.tr"):
        table.assign(tallest=tallest).compute()
    merged = table.merge(table.groupby("cls").height.max().reset_index(), on="cls").compute()
    expected = rows.groupby("cls").height.transform("max").set_axis(rows["__key__"])
    assert merged.set_index("__key__").height_y.to_dict() == expected.to_dict()
