"""What a read leaves out for filters further up is what these leave out, and no more."""

import pytest
from counted import work  # noqa: F401

import dask_image_ingest as dii

COLUMNS = ["image", "width", "height", "cls", "txt"]


@pytest.fixture(scope="module")
def ddf(shards):
    return dii.read_webdataset_images(shards, backend="pandas", size=16)


@pytest.fixture(scope="module")
def parts(ddf):
    """The partitions in memory."""
    return [ddf.get_partition(number).compute() for number in range(ddf.npartitions)]


@pytest.mark.parametrize(
    "ask",
    [
        lambda f: f[f.txt.notnull() & (f.query("width > 200").width > 10)],
        lambda f: f[COLUMNS][f.txt.notnull() & (f[COLUMNS].query("width > 200").width > 10)],
        lambda f: f[COLUMNS][(f.width > 10) & (f[f.height > 150].width > 200)],
        lambda f: f[f.height > 150][COLUMNS][f[f.height > 150].width > 200],
    ],
)
def test_a_mask_of_rows_that_were_filtered_further_keeps_those_alone(ddf, parts, ask):
    kept = ask(ddf).compute()
    assert kept.index.tolist() == [label for part in parts for label in ask(part).index]
    assert 0 < len(kept) < 24


def test_a_query_of_all_rows_sees_them_all(ddf, parts):
    def ask(frame):
        frame = frame[COLUMNS].rename(columns={"width": "w"}).query("w > w.size * 20")
        return frame[frame.height > 200]

    assert ask(ddf).compute().index.tolist() == [n for part in parts for n in ask(part).index]


@pytest.mark.parametrize(
    "ask",
    [
        lambda f: f.rename(columns={"width": "__position__"}),
        lambda f: f.assign(__position__=f.width),
    ],
)
def test_a_column_may_have_the_name_of_the_position(ddf, parts, ask):
    def wide(frame):
        return ask(frame).query("__position__ > 200")

    assert wide(ddf).compute().index.tolist() == [n for part in parts for n in wide(part).index]


def test_a_function_is_asked_once_for_each_row(ddf):
    asked = []

    def every_second(width):
        asked.append(width)
        return len(asked) % 2 == 0

    frame = ddf[COLUMNS].rename(columns={"width": "w"})
    kept = frame[frame.w.apply(every_second, meta=("w", bool))]
    asked.clear()
    assert len(kept.compute()) == 12
    assert len(asked) == 24


def test_images_of_a_chain_that_waits_for_its_filter_are_not_decoded(ddf, work):  # noqa: F811
    frame = ddf[["image", "width", "txt"]].rename(columns={"width": "w"})
    frame = frame.assign(double=frame.w * 2)[["double", "image", "txt"]]
    frame = frame[(frame.double > 500) & frame.txt.str.contains("1")]
    assert 0 < len(frame.compute()) == work["decoded"] < 24
