"""``find_nearest``: the rows that a search of all finds, without all vectors in one place."""

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from embeddings import table_of, topics, unit

import dask_image_ingest as dii
from dask_image_ingest.curate import embed, find_nearest, vectors


@pytest.mark.parametrize("partitions", [None, 1, 7, pytest.param(40, marks=pytest.mark.nightly)])
def test_it_is_what_a_search_of_all_finds(random, partitions):
    vectors = topics(random, 500, 32)
    queries = random.standard_normal((3, 32))
    table = table_of(list(vectors), note="x")
    frame = dd.from_pandas(table, npartitions=partitions) if partitions else table
    found = find_nearest(frame, queries, k=8)
    cosines = unit(queries).astype(float) @ vectors.T.astype(float)
    for number, expected in enumerate(cosines):
        some = found[found["query"] == number]
        order = np.argsort(-expected)[:8]
        assert some["__key__"].tolist() == table["__key__"][order].tolist()
        np.testing.assert_allclose(some["similarity"], expected[order], atol=1e-6)
    assert list(found.columns) == [
        "query", "similarity", "__key__", "__url__", "offset", "height", "width", "note"
    ]  # fmt: skip
    assert found["similarity"].dtype == np.float32
    assert found.index.tolist() == list(range(24))


def test_equally_near_rows_come_by_key_whatever_the_partitions_are(random):
    table = table_of(np.repeat(unit(random.standard_normal((1, 8))), 60, axis=0))
    shuffled = table.sample(frac=1, random_state=2)
    for partitions in (1, 9):
        found = find_nearest(
            dd.from_pandas(shuffled, npartitions=partitions, sort=False), np.ones(8), 5
        )
        assert found["__key__"].tolist() == table["__key__"][:5].tolist()


def test_no_step_has_more_than_a_few_rows_of_each_partition(random, monkeypatch):
    sizes = []

    def merge(found, k, merge=vectors._top_k):
        sizes.append(len(found))
        return merge(found, k)

    monkeypatch.setattr(vectors, "_top_k", merge)
    table = table_of(topics(random, 2000, 8))
    find_nearest(dd.from_pandas(table, npartitions=100), np.ones(8), k=3)
    # dask merges 8 at a time.
    assert len(sizes) > 12
    assert max(sizes) <= 8 * 3


def test_an_image_is_embedded_by_the_model(shards):
    ddf = dii.read_webdataset_images(shards, size=32, backend="pandas")

    def model(images):
        return images.reshape(len(images), -1).astype("float32") - 128

    class Model:
        def __call__(self, images):
            return model(images)

    image = ddf.partitions[1].compute().images.arrays()[2]
    for given in (model, Model):
        found = find_nearest(embed(ddf, given), image, k=2, model=given)
        assert found["__key__"][0] == ddf.partitions[1]["__key__"].compute().iloc[2]
        assert found["similarity"][0] == pytest.approx(1)
        assert "image" not in found.columns


def test_rows_without_a_direction_are_left_out():
    table = table_of([None, [0.0, 0.0], [np.nan, 1.0], [2.0, 0.0], [0.0, 1.0]])
    found = find_nearest(table, [1, 0], k=10)
    assert found["__key__"].tolist() == ["0000003", "0000004"]
    assert found["similarity"].tolist() == [1, 0]
    none = find_nearest(dd.from_pandas(table[:3], npartitions=2), [1, 0])
    assert len(none) == 0
    assert list(none.columns) == list(found.columns)


def test_wrong_arguments_are_refused(random):
    table = table_of(topics(random, 20, 8))
    for query, said in [
        (np.ones(7), "length 7, the column 'embedding' of 8"),
        (np.zeros(8), "no direction"),
        ([[1, np.nan] * 4], "no direction"),
        ("cat", "pass an array"),
        (np.ones((1, 2, 8)), "pass a vector"),
        ([], "pass a vector"),
        ([[1, 2], [3]], "pass an array"),
    ]:
        with pytest.raises(dii.ArgumentError, match=said):
            find_nearest(table, query)
    with pytest.raises(dii.ArgumentError, match="pass a positive number"):
        find_nearest(table, np.ones(8), k=0)
    with pytest.raises(dii.ArgumentError, match="with model= pass an image"):
        find_nearest(table, np.ones(8), model=len)
    with pytest.raises(dii.ArgumentError, match="no column 'x'"):
        find_nearest(table, np.ones(8), column="x")
    with pytest.raises(dii.ArgumentError, match="has a column 'similarity'"):
        find_nearest(table.assign(similarity=pd.Series(1.0, index=table.index)), np.ones(8))
