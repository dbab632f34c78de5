"""Clusters and near vectors on a GPU: the same code and result, nothing mixed of both memories.

No GPU is needed: a stand-in for CuPy's arrays refuses what CuPy refuses, an array of the host.
"""

import sys

import numpy as np
import pytest
from device_arrays import DeviceArray, device_library

from dask_image_ingest.curate.near_vectors import (
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


# So many that there is one cluster, and so many that there are 70.
@pytest.mark.parametrize("count", [300, 5000])
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
