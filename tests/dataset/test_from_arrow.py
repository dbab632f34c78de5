"""Tables of other engines: references go there and back unharmed, and their rows are decoded."""

from __future__ import annotations

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from odd_shards import in_this_process, read, write_odd_shards  # noqa: F401

import dask_image_ingest as dii
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import REFERENCE, ImageReference

URL = "s3://bucket/train-000.tar"

# Each kind of reference, and none.
REFERENCES = [
    ImageReference(URL, 10240, '"etag"', 3, "cat/0003", 512, 7, None, None),
    ImageReference(URL, key="no bytes in one range", nbytes=5),
    ImageReference(None, key="held", nbytes=3, bytes=b"\xff\xd8\x00"),
    ImageReference(URL, 10240, "1.5", 4, "two", None, None, None, "duplicate-member"),
    ImageReference(URL, key="p", offset=0, nbytes=2**40, page=7),
    ImageReference(URL, key="t", offset=0, nbytes=9, top=0.25, left=-3.5, height=1e9, width=0.1),
    ImageReference(URL, key="ü", offset=0, nbytes=9, height=0.5, width=0.5, in_shares=True),
    ImageReference(URL, key="w", offset=0, nbytes=9, height=5.0, width=5.0, in_shares=False),
    None,
]


def through_polars(table, folder):
    polars = pytest.importorskip("polars", reason="needs polars")
    return polars.DataFrame(table).sort("row", descending=True).filter(polars.col("row") != 1)


def through_duckdb(table, folder):
    duckdb = pytest.importorskip("duckdb", reason="needs duckdb")
    return duckdb.from_arrow(table).order("row desc").filter("row != 1")


def through_lance(table, folder):
    lance = pytest.importorskip("lance", reason="needs pylance")
    dataset = lance.write_dataset(table, folder / "rows.lance", data_storage_version="2.1")
    return dataset.to_table(filter="row != 1").sort_by([("row", "descending")])


def through_pyarrow(table, folder):
    chosen = table.filter(pc.field("row") != 1).sort_by([("row", "descending")])
    return chosen.to_reader()


ENGINES = {
    "pyarrow": through_pyarrow,
    "polars": through_polars,
    "duckdb": through_duckdb,
    "lance": through_lance,
}


def chosen(frame):
    """What each engine does, by pandas."""
    return frame[frame.row != 1].sort_values("row", ascending=False).reset_index(drop=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_reference_goes_through_an_engine_unharmed(engine, tmp_path):
    column = pd.array(REFERENCES, dtype="image_reference")
    frame = pd.DataFrame({"row": np.arange(len(REFERENCES)), "image": column})

    back = dii.from_arrow(ENGINES[engine](pa.table(frame), tmp_path), backend="pandas")

    assert str(back.dtypes["image"]) == "image_reference"
    assert pa.array(back.image).type == REFERENCE
    assert back.image.tolist() == chosen(frame).image.tolist()
    assert back.image.isna().tolist() == chosen(frame).image.isna().tolist()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_odd_shards(tmp_path_factory.mktemp("shards"))


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_chosen_by_an_engine_decode_to_the_images_of_the_read(engine, shards, tmp_path):
    rows = dii.read_webdataset_images(shards, backend="pandas", decode=False).compute()
    whole = read(shards).compute(scheduler="sync")
    number = np.arange(len(rows))

    table = ENGINES[engine](pa.table(rows.assign(row=number)), tmp_path)
    decoded = dii.decode_images(table, size=16)

    want = chosen(whole.assign(row=number))
    assert isinstance(decoded, pd.DataFrame)
    assert decoded["__key__"].tolist() == want["__key__"].tolist()
    assert decoded.error.isna().tolist() == want.error.isna().tolist()
    pairs = zip(decoded.images.arrays(), want.images.arrays(), strict=True)
    for got, expected in pairs:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_frame_of_an_engine_has_the_types_that_a_read_gives(engine, tmp_path):
    rows = pd.DataFrame(
        {
            "row": pd.array([0, 1, 2], "int64[pyarrow]"),
            "text": pd.array(["a", "b", None], pd.ArrowDtype(pa.large_string())),
            "score": pd.array([0.5, None, 1.5], "float[pyarrow]"),
            "tags": pd.array([["x"], [], ["y", "z"]], pd.ArrowDtype(pa.list_(pa.string()))),
            "at": pd.array([{"x": 1}, None, {"x": None}], pd.ArrowDtype(pa.struct({"x": "int32"}))),
            "jpg": pd.array([b"1", b"2", None], pd.ArrowDtype(pa.binary())),
        }
    )
    back = dii.from_arrow(ENGINES[engine](pa.table(rows), tmp_path), backend="pandas")

    assert back.dtypes["text"] == pd.StringDtype("pyarrow")
    assert str(back.dtypes["tags"]) == "list<string>"
    assert str(back.dtypes["at"]) == "struct<x: int32>"
    assert back.row.tolist() == [2, 0]
    assert back.text.isna().tolist() == [True, False]
    assert back.score.tolist() == [1.5, 0.5]
    assert back["tags"].tolist() == [["y", "z"], ["x"]]
    assert back["at"].tolist() == [{"x": None}, {"x": 1}]
    assert back.jpg.dropna().tolist() == [b"1"]


def test_categories_whose_texts_are_views_are_strings():
    """As Polars hands its categories and enums over, in a struct and in lists, too."""
    texts = pa.array(["a", "b"], pa.string_view())
    category = pa.DictionaryArray.from_arrays(pa.array([1, 0, None], pa.uint32()), texts)
    names = REFERENCE.names
    fields = [category if n == "url" else pa.nulls(3, REFERENCE.field(n).type) for n in names]
    columns = {
        "image": pa.StructArray.from_arrays(fields, names),
        "text": category,
        "at": pa.StructArray.from_arrays([category], ["x"]),
        "list": pa.ListArray.from_arrays([0, 2, 2, 3], category),
        "two": pa.FixedSizeListArray.from_arrays(pa.concat_arrays([category, category]), 2),
    }
    back = dii.from_arrow(pa.table(columns), backend="pandas")
    assert back["text"].tolist() == ["b", "a", pd.NA]
    assert back["at"].tolist() == [{"x": "b"}, {"x": "a"}, {"x": None}]
    assert back["list"].tolist() == [["b", "a"], [], [None]]
    assert back["two"].tolist() == [["b", "a"], [None, "b"], ["a", None]]
    assert [image.url for image in back["image"]] == ["b", "a", None]


def test_a_lazy_frame_is_merged_with_a_table(shards):
    ddf = dii.read_webdataset_images(shards, backend="pandas", size=16)
    keys = ddf["__key__"].compute()
    table = pa.table({"__key__": pa.array(keys, pa.string_view()), "score": np.arange(len(keys))})
    merged = ddf.merge(dii.from_arrow(table), on="__key__")
    best = merged[merged.score < 3]
    found = best[["__key__", "score"]].compute().sort_values("score")
    assert found["__key__"].tolist() == keys.tolist()[:3]


def test_encoded_images_of_a_table_are_decoded(shards):
    frame = read(shards).compute(scheduler="sync")
    frame = frame[frame.error.isna()].head(3)
    for kind in (pa.binary(), pa.large_binary(), pa.binary_view()):
        files = pa.array(frame.images.encode("png"), pa.binary()).cast(kind)
        decoded = dii.decode_images(pa.table({"png": files}), image={"image": "png"})
        for got, expected in zip(decoded.images.arrays(), frame.images.arrays(), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_a_table_becomes_a_lazy_frame_by_dask(shards):
    rows = dii.read_webdataset_images(shards, backend="pandas", decode=False).compute()
    frame = dii.from_arrow(pa.table(rows))
    lazy = dii.decode_images(dd.from_pandas(frame, npartitions=3), size=16)
    assert lazy.npartitions == 3
    whole = read(shards).compute(scheduler="sync")
    for got, expected in zip(lazy.compute().images.arrays(), whole.images.arrays(), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_what_is_no_table_is_refused():
    for value in ({"a": [1]}, [1], pa.array([1]).type):
        with pytest.raises(ArgumentError, match="__arrow_c_stream__"):
            dii.from_arrow(value)
    twice = pa.table([[1], [2]], names=["a", "a"])
    with pytest.raises(ArgumentError, match="two columns"):
        dii.from_arrow(twice)


def test_columns_of_types_that_no_read_has_are_left_out_and_named():
    table = pa.table({"a": [1], "m": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32()))})
    with pytest.warns(UserWarning, match="'m'"):
        assert list(dii.from_arrow(table, backend="pandas").columns) == ["a"]


def test_calls_that_take_files_or_frames_say_what_makes_a_frame_of_a_table():
    table = pa.table({"image": pa.array([b"x"])})
    with pytest.raises(ArgumentError, match=r"decode_images.*from_arrow"):
        dii.read_parquet_images(table)
    with pytest.raises(ArgumentError, match="from_arrow"):
        dii.curate.find_duplicates(table)
