"""Queries directly over a read that Dask alone answers wrongly have the answers of pandas."""

from __future__ import annotations

import dask
import pandas as pd
import pytest
from counted import work  # noqa: F401

import dask_image_ingest as dii


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
    "twice": lambda d, mask: d[mask].query("cls > 1"),
    "twice by casts": lambda d, mask: (lambda kept: kept[(kept.cls > 1).astype(bool)])(d[mask]),
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


def test_a_mask_of_a_frame_without_pixels(rows, shards):
    frame = dii.read_webdataset_images(shards, backend="pandas", decode=False)
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


@pytest.mark.more
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


SMALLEST = {
    "nsmallest": lambda d: d.nsmallest(3, "nbytes"),
    "head of sorted rows": lambda d: head(d.sort_values("nbytes"), 3),
    "filled": lambda d: d.fillna({"txt": "none"}),
    "replaced": lambda d: d.replace({"cls": {1: 7}}),
}


def head(frame, n):
    return frame.head(n) if isinstance(frame, pd.DataFrame) else frame.head(n, compute=False)


@pytest.mark.parametrize("operation", SMALLEST)
def test_functions_of_the_package_after_operations_on_columns_that_they_do_not_use(
    operation, ddf, rows
):
    def light(images):
        return [image.mean() for image in images]

    expected, lazy = SMALLEST[operation](rows), SMALLEST[operation](ddf)
    lights = light(expected.images.arrays())
    computed = lazy.images.map_batches(light, {"light": "float32"})
    assert computed["light"].compute().tolist() == pytest.approx(lights)
    assert computed[["__key__", "light"]].compute()["__key__"].equals(expected["__key__"])
    for column in ("cls", "txt", "nbytes"):
        assert computed[column].compute().equals(expected[column])
    assert lazy.images.stack().compute().tolist() == [a.tolist() for a in expected.images.arrays()]
    assert dii.curate.find_issues(lazy)["issue.dark"].compute().tolist() == (
        dii.curate.find_issues(expected)["issue.dark"].tolist()
    )


def test_the_images_of_the_smallest_rows(ddf, rows, work):  # noqa: F811
    smallest = ddf.nsmallest(3, "nbytes")
    expected = [image.tolist() for image in rows.nsmallest(3, "nbytes").images.arrays()]
    assert smallest.images.stack().compute().tolist() == expected
    assert [i.tolist() for b in smallest.images.iter_batches(2) for i in b["image"]] == expected
    assert work["decoded"] == 6


def test_rows_of_a_transform_are_paired_by_their_labels(ddf, rows):
    table = ddf[["__key__", "cls", "height"]]
    tallest = table.groupby("cls").height.transform("max", meta=("height", "int32[pyarrow]"))
    assigned = table.assign(tallest=tallest).compute().set_index("__key__")
    expected = rows.groupby("cls").height.transform("max").set_axis(rows["__key__"])
    assert assigned["tallest"].to_dict() == expected.to_dict()
