"""Numbers of clusters: the same in all partitions, beside scikit-learn's k-means."""

import dask.dataframe as dd
import numpy as np
import pytest
from embeddings import table_of, topics

import dask_image_ingest as dii
from dask_image_ingest.curate import find_clusters


@pytest.fixture
def vectors():
    return topics(np.random.default_rng(3), 3000, 32)


def within(vectors, numbers):
    """The mean cosine of vectors with the center of their cluster."""
    total = 0.0
    for number in np.unique(numbers):
        total += np.linalg.norm(vectors[numbers == number].sum(axis=0))
    return total / len(vectors)


def test_vectors_are_as_near_to_their_centers_as_those_of_k_means_by_scikit_learn(vectors):
    from sklearn.cluster import KMeans  # takes two seconds, of each process that collects tests

    found = find_clusters(table_of(vectors), 20)["cluster"]
    assert str(found.dtype).startswith("int32")
    assert set(found) == set(range(20))
    witness = KMeans(20, n_init=1, random_state=0).fit_predict(vectors)
    assert within(vectors, found.to_numpy()) > 0.95 * within(vectors, witness)


@pytest.mark.parametrize("partitions", [1, 3, pytest.param(40, marks=pytest.mark.nightly)])
def test_the_numbers_are_the_same_whatever_the_partitions_are(vectors, partitions):
    table = table_of(vectors)
    lazy = find_clusters(dd.from_pandas(table, npartitions=partitions, sort=False), 7)
    assert lazy["cluster"].compute().tolist() == find_clusters(table, 7)["cluster"].tolist()
    assert find_clusters(table, 7, seed=1)["cluster"].tolist() != lazy["cluster"].compute().tolist()


def test_rows_without_a_vector_have_no_number(vectors):
    table = table_of(vectors[:50])
    table.loc[table.index[3], "embedding"] = None
    found = find_clusters(table, 4)["cluster"]
    assert found.isna().tolist() == [row == 3 for row in range(50)]


def test_more_clusters_than_vectors_are_refused(vectors):
    with pytest.raises(dii.ArgumentError, match="k=6: the column 'embedding' has 5 vectors"):
        find_clusters(table_of(vectors[:5]), 6)
    with pytest.raises(dii.ArgumentError, match="k=0"):
        find_clusters(table_of(vectors[:5]), 0)


def test_clusters_that_are_far_apart_are_found(random):
    centers = random.normal(size=(50, 64))
    truth = random.integers(0, 50, 3000)
    vectors = centers[truth] + 0.2 * random.normal(size=(3000, 64))
    found = find_clusters(table_of(vectors.astype(np.float32)), 50)["cluster"].to_numpy(int)
    # Clusters of the truth and those found, one to one.
    assert len({*zip(truth.tolist(), found.tolist(), strict=True)}) <= 53


def test_a_vector_without_a_direction_is_in_no_cluster(random):
    vectors = random.normal(size=(6, 4)).astype(np.float32)
    vectors[1], vectors[2, 0], vectors[3, 1] = 0, np.nan, np.inf
    found = find_clusters(table_of(vectors), 2)["cluster"]
    assert found.isna().tolist() == [False, True, True, True, False, False]
