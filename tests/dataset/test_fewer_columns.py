"""Labels of rows are those of the rows, however few columns are read for them."""

import dask.dataframe as dd
import pytest

import dask_image_ingest as dii


@pytest.fixture(scope="module")
def ddf(shards):
    return dii.read_webdataset_images(shards, backend="pandas", size=16)


QUESTIONS = {
    "of two frames, one of which lacks a column": lambda d: dd.concat(
        [d[["image", "nbytes"]], d[["width"]][d["width"] > 150]]
    ),
    "of two frames that share no column": lambda d: dd.concat(
        [d[["image"]], d[["width"]][d["width"] > 150]]
    ),
    "of the largest": lambda d: d[["image", "width", "cls"]].nlargest(3, "width"),
    "of overlaps": lambda d: d[["width", "cls"]].map_overlap(lambda part: part, 0, 0),
    "of a merge": lambda d: d[d["width"] > 150].merge(d[["__key__", "cls"]], on="__key__"),
    "of sorted rows that were filtered": lambda d: d.sort_values("width")[["width", "image"]].query(
        "width > 150"
    ),
    "of chosen rows": lambda d: d[["image", "width", "txt"]].query("width > 150")[["txt"]],
    "of all": lambda d: d.assign(new=d["width"] + 1)[["new", "image"]],
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_labels_are_those_of_the_rows(ddf, question):
    rows = QUESTIONS[question](ddf)
    labels = rows.index.compute().tolist()
    assert labels == rows.compute().index.tolist()
    assert 0 < len(labels) == len(rows)
