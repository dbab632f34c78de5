"""Near vectors: the greedy choice of all pairs, whatever the clusters, tasks and files are.

Of a GPU: the same code and result, nothing mixed of both memories. None is needed: a stand-in for
CuPy's arrays refuses what CuPy refuses, an array of the host.
"""

import sys
import tracemalloc

import numpy as np
import pytest
from device_arrays import DeviceArray, device_library
from embeddings import brute, near, topics, unit

import dask_image_ingest as dii
from dask_image_ingest.curate import near_vectors
from dask_image_ingest.curate.near_vectors import (
    Scratch,
    StoredVectors,
    invert,
    k_means,
    nearest_kept_vectors,
    nearest_of,
    scratch_folder,
)


@pytest.fixture(autouse=True)
def _cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", device_library)


def _vectors(rng, count, length=24):
    vectors = rng.standard_normal((count, length)).astype(np.float32)
    near = rng.permutation(count)[: count // 3]
    vectors[near] = vectors[rng.permutation(count)[: count // 3]] + np.float32(0.02)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _lists(vectors, asarray=np.asarray):
    stored = StoredVectors([vectors], np.array([0, len(vectors)]), vectors.shape[1])
    with scratch_folder(1 << 30) as scratch:
        return invert(stored, np.arange(len(vectors)), 0.95, scratch, asarray)


@pytest.fixture
def small(monkeypatch):
    """Many clusters, tasks and blocks of few vectors."""
    for name, value in [("_BRUTE_FORCE_MAX", 10), ("_BLOCK", 16), ("_OTHERS", 24), ("_ROWS", 32)]:
        monkeypatch.setattr(near_vectors, name, value)


@pytest.mark.usefixtures("small")
def test_the_choice_is_the_greedy_one_of_all_pairs(random, monkeypatch):
    monkeypatch.setattr(near_vectors, "_REACH", 9.0)  # every border is near: no pair is missed
    # Chains, too, from cluster to cluster, in order and in none: each is near the next one alone.
    walk = [unit(random.standard_normal((1, 8)))]
    for _ in range(150):
        walk.append(near(random, walk[-1], random.uniform(0.955, 0.97)))
    walk = np.concatenate(walk)
    equal = np.repeat(unit(random.standard_normal((1, 8))), 50, axis=0)
    vectors = np.concatenate([walk, topics(random, 300, 8), equal, random.permutation(walk)])
    of, similarity = brute(vectors, 0.95)
    found, cosine = nearest_kept_vectors(_lists(vectors))
    assert 100 < (of >= 0).sum() < len(of) - 100
    assert (found >= 0).tolist() == (of >= 0).tolist()
    np.testing.assert_allclose(cosine, similarity, atol=1e-6)
    gone = found >= 0
    cosines = (vectors[gone].astype(float) * vectors[found[gone]]).sum(axis=1)
    np.testing.assert_allclose(cosines, similarity[gone], atol=1e-6)
    assert not gone[found[gone]].any()


def test_equal_vectors_take_no_memory_for_their_pairs():
    vectors = np.repeat(unit(np.arange(1.0, 9)[None]), 20_000, axis=0)
    tracemalloc.start()
    found, _ = nearest_kept_vectors(_lists(vectors))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.tolist() == [-1] + [0] * 19_999
    assert peak < 200e6  # a byte a pair would be twice that


@pytest.mark.usefixtures("small")
def test_files_give_what_memory_does(random, tmp_path):
    vectors = topics(random, 500, 24)
    with scratch_folder(64 << 20) as scratch:
        parts = [scratch.put(vectors[start : start + 90]) for start in range(0, 500, 90)]
        starts = np.array([*range(0, 500, 90), 500])
        stored, rows = StoredVectors(parts, starts, 24), random.permutation(500)
        found = nearest_kept_vectors(invert(stored, rows, 0.95, scratch))
    expected = nearest_kept_vectors(_lists(vectors[rows]))
    assert all(isinstance(part, str) for part in parts)
    assert [one.tolist() for one in found] == [one.tolist() for one in expected]
    with pytest.raises(dii.DaskImageIngestError, match=r"is not here. Set temporary-directory"):
        stored.take(rows)
    (tmp_path / "file").touch()
    with pytest.raises(dii.DaskImageIngestError, match=r"can't be stored .* of a larger disk"):
        Scratch(str(tmp_path / "file"), 64 << 20, 0).put(vectors)


# So many that there is one cluster, and so many that there are 70.
@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.more)])
def test_near_vectors_on_a_device_are_those_on_the_host(seed, count):
    vectors = _vectors(np.random.default_rng(seed), count)
    of, similarity = nearest_kept_vectors(_lists(vectors))
    there_of, there_similarity = nearest_kept_vectors(_lists(vectors, DeviceArray))
    assert (of >= 0).sum() > count // 10
    assert there_of.tolist() == of.tolist()
    assert there_similarity.tolist() == similarity.tolist()
    of, similarity = nearest_of(_lists(vectors), 200)
    there_of, there_similarity = nearest_of(_lists(vectors, DeviceArray), 200)
    assert there_of.tolist() == of.tolist()
    assert there_similarity.tolist() == similarity.tolist()


def test_centers_stay_where_the_vectors_are(seed):
    vectors = _vectors(np.random.default_rng(seed), 600)
    centers = k_means(DeviceArray(vectors), 9, np.random.default_rng(0))
    assert isinstance(centers, DeviceArray)
    on_host = k_means(vectors, 9, np.random.default_rng(0))
    # NumPy 2.0 rounds a power of its own arrays otherwise than one that a ufunc is asked for.
    np.testing.assert_allclose(centers.get(), on_host, rtol=0, atol=1e-6)
