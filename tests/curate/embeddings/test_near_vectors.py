"""Clusters and near vectors on a GPU: the same code and result, nothing mixed of both memories.

No GPU is needed: a stand-in for CuPy's arrays refuses what CuPy refuses, an array of the host.
"""

import sys
import types

import numpy as np
import pytest

from dask_image_ingest.curate.embeddings.k_means import k_means
from dask_image_ingest.curate.embeddings.near_vectors import near_to_first


class DeviceArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that meets others of its kind and numbers, and comes to the host by ``get``."""

    def __init__(self, array):
        self._array = np.asarray(array)

    shape = property(lambda self: self._array.shape)
    T = property(lambda self: DeviceArray(self._array.T))

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        assert method == "__call__"
        assert not kwargs
        return DeviceArray(ufunc(*map(_unwrapped, inputs)))

    def __len__(self):
        return len(self._array)

    def __iter__(self):
        return map(DeviceArray, self._array)

    def __getitem__(self, key):
        return DeviceArray(self._array[_index(key)])

    def __setitem__(self, key, value):
        self._array[_index(key)] = _unwrapped(value)

    def get(self):
        return self._array.copy()

    def copy(self):
        return DeviceArray(self._array.copy())

    def sum(self, axis, keepdims=False):
        return DeviceArray(self._array.sum(axis=axis, keepdims=keepdims))

    def max(self, axis):
        return DeviceArray(self._array.max(axis=axis))

    def argmax(self, axis):
        return DeviceArray(self._array.argmax(axis=axis))


def _unwrapped(value):
    if isinstance(value, DeviceArray):
        return value._array
    assert not (isinstance(value, np.ndarray) and value.ndim), "an array of the host"
    return value


def _index(key):
    return tuple(map(_unwrapped, key)) if isinstance(key, tuple) else _unwrapped(key)


@pytest.fixture(autouse=True)
def _cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(asarray=DeviceArray))


def _vectors(rng, count, length=24):
    vectors = rng.standard_normal((count, length)).astype(np.float32)
    near = rng.permutation(count)[: count // 3]
    vectors[near] = vectors[rng.permutation(count)[: count // 3]] + np.float32(0.02)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


# So many that there is one cluster, and so many that there are 70.
@pytest.mark.parametrize("count", [300, 5000])
def test_near_vectors_on_a_device_are_those_on_the_host(seed, count):
    vectors = _vectors(np.random.default_rng(seed), count)
    of, similarity = near_to_first(vectors, 0.95)
    there_of, there_similarity = near_to_first(DeviceArray(vectors), 0.95)
    assert (of >= 0).sum() > count // 10
    assert there_of.tolist() == of.tolist()
    assert there_similarity.tolist() == similarity.tolist()


def test_centers_stay_where_the_vectors_are(seed):
    vectors = _vectors(np.random.default_rng(seed), 600)
    centers = k_means(DeviceArray(vectors), 9, np.random.default_rng(0))
    assert isinstance(centers, DeviceArray)
    on_host = k_means(vectors, 9, np.random.default_rng(0))
    # NumPy 2.0 rounds a power of its own arrays otherwise than one that a ufunc is asked for.
    np.testing.assert_allclose(centers.get(), on_host, rtol=0, atol=1e-6)
