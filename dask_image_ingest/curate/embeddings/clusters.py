"""``find_clusters``: spherical k-means, clusters of unit vectors by cosine."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import dask
import numpy as np
import pyarrow as pa
import xxhash

from dask_image_ingest.arguments import whole_number
from dask_image_ingest.curate.embeddings.vectors import (
    check_vectors,
    from_vectors,
    on_host,
    to_device_of,
    unit,
    valid_vectors,
)
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import Frame
from dask_image_ingest.dataset.plan import select_columns
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of

#: Vectors to sample for each center: enough for centers that need not be exact.
SAMPLED = 64

_ROUNDS = 8

# Vectors for each center that spread ones are drawn from.
_DRAWN = 8

# Rows whose products with all centers fit in memory.
_BLOCK = 2048


def k_means(vectors: Any, count: int, random: np.random.Generator, *, spread: bool = False) -> Any:
    """Find centers of clusters: unit vectors, float32 (count, d), in the memory of ``vectors``.

    Parameters
    ----------
    vectors
        float32 (n, d), NumPy or CuPy, each of length one; n is at least ``count``.
    count
        Number of centers.
    random
        Draws the initial centers from the vectors.
    spread
        Draw them far from each other (k-means++), which takes as long as ``count`` / 8 rounds.
    """
    drawn = random.permutation(len(vectors))[: _DRAWN * count if spread else count]
    if spread:
        drawn = drawn[_spread(vectors[to_device_of(drawn, vectors)], count, random)]
    centers = vectors[to_device_of(drawn, vectors)]
    blocks = [slice(start, start + _BLOCK) for start in range(0, len(vectors), _BLOCK)]
    for _ in range(_ROUNDS):
        nearest = [on_host((vectors[block] @ centers.T).argmax(axis=1)) for block in blocks]
        own = np.concatenate(nearest)
        members = vectors[to_device_of(np.argsort(own, kind="stable"), vectors)]
        ends = [0, *np.cumsum(np.bincount(own, minlength=count)).tolist()]
        sums = centers.copy()
        for cluster, (start, stop) in enumerate(pairwise(ends)):
            if start < stop:
                sums[cluster] = members[start:stop].sum(axis=0)
        lengths = (sums**2).sum(axis=1, keepdims=True) ** 0.5
        # A center whose vectors cancel out is not moved (one without vectors is its own sum).
        is_zero = lengths <= 0
        centers = sums / (lengths + is_zero) + centers * is_zero
    return centers


def _spread(vectors: Any, count: int, random: np.random.Generator) -> np.ndarray:
    """Greedy k-means++ (Arthur and Vassilvitskii 2007): numbers of ``count`` unit vectors.

    Each is the best of a few that are drawn by their squared distance to the nearest one before.
    """
    trials = 2 + int(np.log(count))
    chosen = [int(random.integers(len(vectors)))]
    distance = np.maximum(1 - on_host(vectors @ vectors[chosen[0]]), 0)
    while len(chosen) < count:
        total = distance.cumsum(dtype=np.float64)
        drawn = np.searchsorted(total, random.random(trials) * total[-1])
        drawn = np.minimum(drawn, len(vectors) - 1)
        products = on_host(vectors @ vectors[to_device_of(drawn, vectors)].T)
        distances = np.minimum(distance[:, None], np.maximum(1 - products, 0))
        best = int(distances.sum(axis=0).argmin())
        chosen.append(int(drawn[best]))
        distance = distances[:, best]
    return np.array(chosen)


# Samples merged by one task of the tree.
_MERGED = 16

_Sample = tuple[np.ndarray, np.ndarray]  # hashes, uint64 (n,), and vectors, float32 (n, d)


def find_clusters(frame: Frame, k: int, *, column: str = "embedding", seed: int = 0) -> Frame:
    """Add a column with the number of each vector's cluster.

    Computes the centers at once, by k-means of a sample of 64 vectors for each; the column is lazy
    if the frame is. Vectors that are not stored are computed twice, from images decoded again.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with a column of vectors.
    k
        Number of clusters.
    column
        The column of vectors, as from ``embed``.
    seed
        Seed of the sample and the initial centers.

    Returns
    -------
    dataframe
        ``frame`` with a column ``cluster``, int32, added or replaced: the number, 0 to ``k`` - 1,
        of the center with which the vector has the largest cosine; null where there is no vector,
        or one that is zero or not finite.
        It does not depend on the partitions.

    Raises
    ------
    ArgumentError
        If a column is missing, there are fewer than ``k`` vectors, or they differ in length.

    Notes
    -----
    Centers are of length one (spherical k-means), and found in 8 rounds from vectors of the sample
    that are far from each other (greedy k-means++).
    The sample consists of the vectors with the smallest hashes, without those that are zero or not
    finite.

    Examples
    --------
    >>> found = curate.find_clusters(frame, 3)
    >>> found["cluster"].nunique() <= 3
    True
    """
    check_vectors(frame, column)
    k = whole_number("k", k, 1, "pass a positive number of clusters")
    seed = whole_number("seed", seed, 0, "pass a whole number")
    sample = functools.partial(_sample, column=column, count=SAMPLED * k, seed=seed)
    merge = functools.partial(_merge, count=SAMPLED * k)
    vectors = select_columns(frame, [column])
    if isinstance(frame, FrameBase):
        parts = [dask.delayed(sample)(part) for part in vectors.to_delayed()]
        while len(parts) > 1:
            groups = (parts[start : start + _MERGED] for start in range(0, len(parts), _MERGED))
            parts = [dask.delayed(merge)(group) for group in groups]
        ((_, sampled),) = dask.compute(*parts)
    else:
        _, sampled = sample(vectors)
    if len(sampled) < k:
        raise ArgumentError(f"k={k}: the column {column!r} has {len(sampled)} vectors")
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    sampled = backend_of(meta).numpy.asarray(sampled)
    centers = on_host(k_means(sampled, k, np.random.default_rng(seed), spread=True))
    nearest = functools.partial(_nearest, centers=centers)
    return from_vectors(frame, (column,), "cluster", nearest, pa.int32(), directed=True)


def _sample(frame: Any, column: str, count: int, seed: int) -> _Sample:
    """Bottom-k sample of a partition: the vectors with the ``count`` smallest hashes."""
    _, vectors = valid_vectors(frame, column)
    vectors = np.ascontiguousarray(unit(vectors)) if len(vectors) else vectors
    hashes = [xxhash.xxh3_64_intdigest(vector, seed) for vector in vectors]
    return _smallest(np.array(hashes, np.uint64), vectors, count)


def _merge(samples: list[_Sample], count: int) -> _Sample:
    """Bottom-k sample of several samples."""
    nonempty = [sample for sample in samples if len(sample[0])] or samples[:1]
    lengths = {vectors.shape[1] for _, vectors in nonempty}
    if len(lengths) > 1:
        raise ArgumentError(f"the vectors differ in length: {', '.join(map(str, sorted(lengths)))}")
    hashes, vectors = (np.concatenate(parts) for parts in zip(*nonempty, strict=True))
    return _smallest(hashes, vectors, count)


def _smallest(hashes: np.ndarray, vectors: np.ndarray, count: int) -> _Sample:
    order = np.argsort(hashes, kind="stable")[:count]
    return hashes[order], vectors[order]


def _nearest(vectors: Any, centers: np.ndarray) -> Any:
    # In float64, so that the result of a row does not depend on its partition.
    products = vectors.astype(np.float64) @ to_device_of(centers.astype(np.float64), vectors).T
    return products.argmax(axis=1)
