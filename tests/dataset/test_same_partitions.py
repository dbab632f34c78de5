"""The partitions and labels of a read are the same, whichever columns are asked for.

Where they once were not, queries lost or repeated rows without a word, or failed.
"""

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from query_answers import answer
from query_sources import partitions, source

import dask_image_ingest as dii

LOCATION_COLUMNS = ["__key__", "__url__", "offset", "nbytes", "width"]


@pytest.fixture(scope="module")
def read(shards):
    return dii.read_webdataset_images(shards, backend="pandas", size=32)


@pytest.fixture
def table(read):
    """The read without its pixels."""
    return read.drop(columns=["image", "error"])


@pytest.fixture(scope="module")
def plain(read):
    """The same rows in partitions in memory, which take up nothing of a query."""
    return source(read, partitions(read)).plain


@pytest.fixture(scope="module")
def frame(plain):
    return plain.compute(scheduler="synchronous")


@pytest.mark.parametrize(
    "query",
    [
        lambda d: d,
        lambda d: d[["txt"]],
        lambda d: d["width"],
        lambda d: d[["image"]],
        lambda d: d[d.width > 150],
        lambda d: d.drop(columns=["image", "error"]),
        lambda d: d.width + 1,
        lambda d: dii.decode_images(d[LOCATION_COLUMNS], size=32),
        lambda d: dd.concat([d, d])[["txt"]],
    ],
)
def test_a_query_keeps_its_number_of_partitions(read, query):
    lazy = query(read)
    optimized = lazy.optimize()
    assert optimized.npartitions == lazy.npartitions
    assert optimized.divisions == lazy.divisions
    assert len(lazy.map_partitions(len).compute()) == lazy.npartitions


def test_a_mask_over_a_late_decode_keeps_the_rows_it_is_true_for(table, frame):
    got = dii.decode_images(table, size=32)[table.width > 150].compute()
    assert (got["width"] > 150).all()
    assert got["__key__"].tolist() == frame[frame.width > 150]["__key__"].tolist()


def test_two_filters_have_a_length_and_labels(read, frame):
    wide = read[read.width > 150]
    large = wide[wide.height > 200]
    want = frame[(frame.width > 150) & (frame.height > 200)]
    assert len(large) == len(want)
    assert large.index.compute().tolist() == want.index.tolist()


@pytest.mark.parametrize(
    "query",
    [
        lambda t: t.width + t[t.height > 200].width,
        lambda t: t.cls.combine_first(t.width),
        lambda t: t.assign(x=t[t.height > 200].width),
        lambda t: t["nbytes"].cumsum(),
        lambda t: t.map_partitions(lambda part: part.iloc[:2]),
        lambda t: t.sample(frac=0.4, random_state=1),
        lambda t: t[["txt"]].loc[sorted(t.index.compute())[len(t) // 2] :],
        lambda t: t[["width"]].to_dask_array(lengths=True),
        lambda t: t.tail(20, compute=False),
        lambda t: t.repartition(npartitions=2),
    ],
    ids=[
        "sum", "combine_first", "assign", "cumsum", "map_partitions", "sample", "loc",
        "to_dask_array", "tail", "repartition",
    ],
)  # fmt: skip
def test_a_query_without_pixels_has_the_answer_of_partitions_in_memory(table, plain, query):
    without = plain.drop(columns=["image", "error"])
    got = query(table).compute()
    assert len(got)
    assert answer(got) == answer(query(without).compute())


@pytest.mark.parametrize("number", range(6))
def test_a_concatenation_has_the_partitions_of_its_parts(table, plain, number):
    both = dd.concat([table, table])
    assert both.npartitions == 6
    got = both.partitions[number]["__key__"].compute()
    assert got.tolist() == plain.partitions[number % 3]["__key__"].compute().tolist()


@pytest.mark.parametrize("number", range(3))
def test_each_partition_of_a_running_sum_is_there(table, plain, number):
    got = table["nbytes"].cumsum().partitions[number].compute()
    assert got.tolist() == plain["nbytes"].cumsum().partitions[number].compute().tolist()


def test_a_mask_of_the_read_fits_its_renamed_columns(read, frame):
    got = read.rename(columns={"txt": "caption"})[read.width > 150].compute()
    assert got["caption"].tolist() == frame[frame.width > 150]["txt"].tolist()


def test_two_projections_persist_together(table, frame):
    keys, wide = dask.persist(table[["__key__"]], table[table.width > 150][["__key__", "txt"]])
    assert keys.compute()["__key__"].tolist() == frame["__key__"].tolist()
    assert wide.compute()["txt"].tolist() == frame[frame.width > 150]["txt"].tolist()
    assert (keys.npartitions, wide.npartitions) == (3, 3)


@pytest.mark.parametrize("late", [False, True])
def test_a_query_that_is_optimised_twice_knows_its_own_tasks(read, table, frame, late):
    d = dii.decode_images(table, size=32) if late else read
    wide = d[(d["width"] == 31) | (d["cls"] > d["cls"].mean()) | d["txt"].isna()]
    equal = wide["width"] == wide["height"]
    assert equal.persist().compute().tolist() == equal.optimize().compute().tolist()
    assert len(equal.persist()) == (frame["cls"] > frame["cls"].mean()).sum()


def test_a_column_of_the_read_fits_what_map_batches_made(read, frame):
    light = read.images.map_batches(lambda images: [1] * len(images), {"light": "float32"})
    got = light.assign(key=read["__key__"].str.upper()).compute()
    assert got["key"].tolist() == frame["__key__"].str.upper().tolist()
    assert got["light"].tolist() == [1] * len(frame)


def test_rows_by_place_are_the_same_with_and_without_pixels(read, table):
    for ask in (
        lambda d: d.tail(20),
        lambda d: d.sample(frac=0.4, random_state=1).compute(),
        lambda d: d.map_partitions(lambda part: part.iloc[:2]).compute(),
    ):
        pd.testing.assert_series_equal(ask(read)["__key__"], ask(table[["__key__"]])["__key__"])
