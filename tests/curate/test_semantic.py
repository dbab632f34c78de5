"""Semantic duplicates: which rows go, for which, beside a comparison of all with all."""

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from embeddings import brute, near, table_of, topics, unit

import dask_image_ingest as dii
from dask_image_ingest.curate import (
    compute_similarity,
    find_overlaps,
    find_semantic_duplicates,
    near_vectors,
)

COLUMNS = ["semantic.keep", "semantic.group", "semantic.of", "semantic.similarity"]


def test_few_vectors_get_the_greedy_choice_of_all_with_all(random):
    # Chains, too: each vector of a walk is near to the next one alone.
    walk = [unit(random.standard_normal((1, 32)))]
    for _ in range(30):
        walk.append(near(random, walk[-1], random.uniform(0.955, 0.97)))
    vectors = np.concatenate([topics(random, 500, 32), *walk])
    table = table_of(vectors, score=random.choice([0.5, 1.5, np.nan], len(vectors)))
    order = table.sort_values(["score", "__key__"], ascending=[False, True]).index.to_numpy()
    of, similarity = brute(vectors[order], 0.95)
    found = find_semantic_duplicates(table, keep="score").loc[order]
    assert 0 < (of >= 0).sum() < len(of)
    assert found["semantic.keep"].tolist() == (of < 0).tolist()
    gone = found[~found["semantic.keep"]]
    assert gone["semantic.of"].tolist() == table["__key__"][order[of[of >= 0]]].tolist()
    np.testing.assert_allclose(
        gone["semantic.similarity"].astype(float), similarity[of >= 0], atol=1e-6
    )
    kept = found[found["semantic.keep"]]
    assert kept[["semantic.of", "semantic.similarity"]].isna().all(axis=None)
    assert found.groupby("semantic.group")["semantic.keep"].sum().eq(1).all()


@pytest.mark.slow
@pytest.mark.more
def test_many_vectors_lose_nearly_all_rows_that_all_with_all_finds(random):
    vectors = topics(random, 6000)
    of, _ = brute(vectors, 0.95)
    found = find_semantic_duplicates(table_of(vectors), keep="first")
    gone = ~found["semantic.keep"].to_numpy(bool)
    assert (gone & (of >= 0)).sum() >= 0.99 * (of >= 0).sum() > 500
    assert gone.sum() <= 1.01 * (of >= 0).sum()
    # No chains: each is near to one that stays.
    kept = found["semantic.of"][gone].astype(int).to_numpy()
    assert not gone[kept].any()
    cosines = (vectors[gone].astype(float) * vectors[kept]).sum(axis=1)
    assert cosines.min() >= 0.95 - 2e-6
    np.testing.assert_allclose(found["semantic.similarity"][gone].astype(float), cosines, atol=1e-5)


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_the_answer_is_the_same_whatever_the_partitions_are(random, count):
    table = table_of(topics(random, count, 32))
    table["width"] = random.integers(1, 4, count)
    expected = find_semantic_duplicates(table).set_index("__key__")[COLUMNS]
    assert 0 < (~expected["semantic.keep"]).sum() < count
    shuffled = table.sample(frac=1, random_state=1).reset_index(drop=True)
    for partitions in (1, 11):
        lazy = find_semantic_duplicates(dd.from_pandas(shuffled, npartitions=partitions))
        found = lazy.compute().set_index("__key__").loc[expected.index, COLUMNS]
        pd.testing.assert_frame_equal(found, expected, check_index_type=False, check_exact=True)


def test_workers_search_the_files_of_each_other(random, client, monkeypatch):
    vectors = topics(random, 600, 32)
    expected = find_semantic_duplicates(table_of(vectors))[COLUMNS]
    monkeypatch.setattr(near_vectors, "worker_memory", lambda: 1024)  # nothing stays in memory
    found = find_semantic_duplicates(dd.from_pandas(table_of(vectors), npartitions=5))
    pd.testing.assert_frame_equal(found[COLUMNS].compute(), expected, check_exact=True)


def test_the_length_of_vectors_does_not_matter(random):
    vectors = unit(random.standard_normal((2, 8)))
    table = table_of(np.concatenate([vectors, 1e-3 * vectors, -vectors]))
    found = find_semantic_duplicates(table, threshold=1)
    assert found["semantic.keep"].tolist() == [True, True, False, False, True, True]


def test_rows_without_a_direction_stay():
    one = [1.0, 0.0]
    table = table_of([one, None, [0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0], [2.0, 0.0]])
    for frame in (table, dd.from_pandas(table, npartitions=3)):
        found = find_semantic_duplicates(frame)
        found = found.compute() if frame is not table else found
        assert found["semantic.keep"].tolist() == [True] * 5 + [False]
        assert found["semantic.group"].isna().tolist() == [False] + [True] * 4 + [False]


def test_partitions_without_a_usable_vector_take_no_part():
    one = [1.0, 0.0, 0.0]
    table = table_of([one, one, None, None, [np.nan] * 3, [0.0] * 3, [2.0, 0.0, 0.0], one])
    lazy = dd.from_pandas(table, npartitions=4)
    found = find_semantic_duplicates(lazy).compute()
    assert found["semantic.keep"].tolist() == [True, False, True, True, True, True, False, False]
    without = lazy[lazy["__key__"] > table["__key__"][1]]  # the first partition is empty
    assert find_semantic_duplicates(without).compute()["semantic.keep"].tolist() == [True] * 5 + [
        False
    ]


def test_rows_may_be_told_apart_by_a_column_of_unique_values():
    table = table_of([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]).drop(columns=["__key__", "__url__"])
    table["path"] = ["c", "b", "a"]
    found = find_semantic_duplicates(table, keep="first", identity="path")
    assert found["semantic.keep"].tolist() == [False, True, True]
    assert found["semantic.of"][0] == "b"


def test_vectors_may_be_lists_of_one_length_or_arrays():
    for kind in ["fixed", "object"]:
        import pyarrow as pa

        vectors = [[1.0, 0.0], [1.0, 0.0], None, [0.0, 1.0]]
        table = table_of(vectors)
        if kind == "fixed":
            fixed = pd.ArrowDtype(pa.list_(pa.float32(), 2))
            table["embedding"] = pd.Series(vectors, dtype=fixed)
        else:
            arrays = [None if vector is None else np.array(vector) for vector in vectors]
            table["embedding"] = pd.Series(arrays, dtype=object)
        assert find_semantic_duplicates(table)["semantic.keep"].tolist() == [
            True,
            False,
            True,
            True,
        ]
        first = compute_similarity(table, np.array([1.0, 0.0]))["similarity"]
        assert first.isna().tolist() == [False, False, True, False]
        assert first.dropna().tolist() == [1, 1, 0]


def test_a_frame_without_rows_or_vectors_has_the_columns(random):
    for table in (table_of(topics(random, 100))[:0], table_of([None, None])):
        found = find_semantic_duplicates(table)
        assert list(found.columns[-4:]) == COLUMNS
        assert found["semantic.keep"].all()


def test_lazy_columns_have_the_types_they_say(random):
    lazy = find_semantic_duplicates(dd.from_pandas(table_of(topics(random, 100)), npartitions=3))
    assert lazy[COLUMNS].compute().dtypes.to_dict() == lazy[COLUMNS].dtypes.to_dict()


def test_wrong_arguments_are_refused(random):
    table = table_of(topics(random, 20))
    for threshold in (0, 1.1, float("nan"), "0.9", None):
        with pytest.raises(dii.ArgumentError, match="above 0 and up to 1"):
            find_semantic_duplicates(table, threshold=threshold)
    with pytest.raises(dii.ArgumentError, match="no column 'vector'"):
        find_semantic_duplicates(table, column="vector")
    with pytest.raises(dii.ArgumentError, match="no column '__key__'"):
        find_semantic_duplicates(table.drop(columns="__key__"))
    with pytest.raises(dii.ArgumentError, match="choose 'best'"):
        find_semantic_duplicates(table, keep="prettiest")
    with pytest.raises(dii.ArgumentError, match="memory='1 MiB': pass at least 64 MiB"):
        find_semantic_duplicates(table, memory="1 MiB")
    with pytest.raises(dii.ArgumentError, match="no column of lists"):
        find_semantic_duplicates(table, column="height")
    mixed = dd.concat([dd.from_pandas(table), dd.from_pandas(table_of(topics(random, 9, 8)))])
    with pytest.raises(dii.ArgumentError, match="differ in length"):
        find_semantic_duplicates(mixed)


@pytest.mark.parametrize("count", [600, pytest.param(6000, marks=pytest.mark.slow)])
def test_overlaps_of_vectors_are_those_of_all_with_all(random, count):
    vectors = topics(random, count)
    train, test = vectors[: count // 3], vectors[count // 3 :]
    cosines = train.astype(float) @ test.T.astype(float)
    expected = cosines.max(axis=1) >= 0.95
    test_table = table_of(test)
    test_table["__key__"] = "test " + test_table["__key__"]
    for partitions in (1, 5):
        lazy = dd.from_pandas(table_of(3 * train), npartitions=partitions)
        found = find_overlaps(lazy, test_table, by="embedding").compute()
        is_found = found["overlap.found"].to_numpy(bool)
        assert not (is_found & ~expected).any()
        assert is_found.sum() >= (1 if count < 4096 else 0.99) * expected.sum() > 0.05 * len(train)
        of = found["overlap.of"][is_found].str.removeprefix("test ").astype(int).to_numpy()
        similarity = found["overlap.similarity"][is_found].astype(float)
        np.testing.assert_allclose(similarity, cosines[is_found, of], atol=1e-5)
        if count < 4096:
            np.testing.assert_allclose(similarity, cosines[is_found].max(axis=1), atol=1e-5)
        assert found.loc[~is_found, ["overlap.of", "overlap.similarity"]].isna().all(axis=None)


def test_rows_without_a_direction_overlap_nothing_and_ties_go_to_the_first():
    one, zero = [1.0, 0.0], [0.0, 0.0]
    test = table_of([zero, None, one, one, [np.nan, 1.0]])
    found = find_overlaps(table_of([one, zero, None, [0.0, 1.0]]), test, by="embedding")
    assert found["overlap.found"].tolist() == [True, False, False, False]
    assert found["overlap.of"][0] == test["__key__"][2]
    nothing = find_overlaps(test, table_of([zero]), by="embedding")
    assert not nothing["overlap.found"].any()


def test_overlaps_of_what_cannot_be_compared_are_refused():
    for options, message in [
        ({"by": "vector"}, "choose 'bytes', 'pixels', 'pdq', or a column of vectors"),
        ({"threshold": float("nan")}, "threshold=nan"),
        ({"threshold": 0}, "threshold=0"),
        ({"variants": ["mirrored"]}, "variants= are those of PDQ"),
        ({"test": "hashes"}, "stores no vectors"),
        ({"test": table_of([[1.0, 0.0]]).rename(columns={"embedding": "other"})}, "test= has no"),
        ({"test": table_of([[1.0, 0.0, 0.0]])}, "train= have 2 numbers, those of test= 3"),
    ]:
        table = table_of([[1.0, 0.0]])
        with pytest.raises(dii.ArgumentError, match=message):
            find_overlaps(table, **{"test": table, "by": "embedding", **options})
