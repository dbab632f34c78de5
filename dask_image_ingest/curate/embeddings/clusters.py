"""``clusters``: groups of images that a model finds alike, by number."""

from __future__ import annotations

import functools
from typing import Any

import dask
import numpy as np
import pyarrow as pa
import xxhash

from dask_image_ingest.arguments import whole_number
from dask_image_ingest.curate.embeddings.k_means import SAMPLED, k_means
from dask_image_ingest.curate.embeddings.vectors import (
    beside,
    check_vectors,
    from_vectors,
    on_host,
    unit,
    valid_vectors,
)
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import Frame
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of

# Samples of so many partitions are merged by one task.
_MERGED = 16

_Sample = tuple[np.ndarray, np.ndarray]


def clusters(frame: Frame, k: int, *, column: str = "embedding", seed: int = 0) -> Frame:
    """Add a column with the number of the cluster that each vector is in.

    Computes the centers at once, by k-means of a sample of 64 vectors for each; the column is lazy
    if the frame is. Vectors that are not stored are made twice, from images that are decoded again.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with a column of vectors.
    k
        How many clusters to make.
    column
        The column of vectors, such as ``embed`` makes.
    seed
        Chooses the sample and the first centers.

    Returns
    -------
    dataframe
        ``frame`` with a column ``cluster``, int32, in place of the one it has: the number, 0 to
        ``k`` - 1, of the center with which the vector has the largest cosine; null where there is
        no vector. The same whatever the partitions are.

    Raises
    ------
    ArgumentError
        If a column is missing, there are fewer than ``k`` vectors, or they differ in length.

    Notes
    -----
    Centers are of length one (spherical k-means), and found in 8 rounds from vectors of the sample.
    The sample is those whose hashes are the smallest. Vectors that are zero or not finite have no
    part in it.

    Examples
    --------
    >>> found = curate.clusters(frame, 3)
    >>> found["cluster"].nunique() <= 3
    True
    """
    check_vectors(frame, column)
    k = whole_number("k", k, 1, "pass a positive number of clusters")
    seed = whole_number("seed", seed, 0, "pass a whole number")
    sample = functools.partial(_sample, column=column, count=SAMPLED * k, seed=seed)
    merge = functools.partial(_merge, count=SAMPLED * k)
    vectors = frame[[column]]
    if isinstance(frame, FrameBase):
        parts = [dask.delayed(sample)(part) for part in vectors.to_delayed()]
        while len(parts) > 1:
            some = (parts[start : start + _MERGED] for start in range(0, len(parts), _MERGED))
            parts = [dask.delayed(merge)(part) for part in some]
        (found,) = dask.compute(*parts)
    else:
        found = sample(vectors)
    if len(found[1]) < k:
        raise ArgumentError(f"k={k}: the column {column!r} has {len(found[1])} vectors")
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    sampled = backend_of(meta).numpy.asarray(found[1])
    centers = on_host(k_means(sampled, k, np.random.default_rng(seed)))
    nearest = functools.partial(_nearest, centers=centers)
    return from_vectors(frame, (column,), "cluster", nearest, pa.int32())


def _sample(frame: Any, column: str, count: int, seed: int) -> _Sample:
    """Hashes and vectors of those rows of a partition whose hashes are the smallest."""
    _, vectors = valid_vectors(frame, column)
    vectors = np.ascontiguousarray(unit(vectors)) if len(vectors) else vectors
    hashes = [xxhash.xxh3_64_intdigest(vector, seed) for vector in vectors]
    return _smallest(np.array(hashes, np.uint64), vectors, count)


def _merge(samples: list[_Sample], count: int) -> _Sample:
    """One sample of several."""
    filled = [each for each in samples if len(each[0])] or samples[:1]
    lengths = {vectors.shape[1] for _, vectors in filled}
    if len(lengths) > 1:
        raise ArgumentError(f"the vectors differ in length: {', '.join(map(str, sorted(lengths)))}")
    hashes, vectors = (np.concatenate(parts) for parts in zip(*filled, strict=True))
    return _smallest(hashes, vectors, count)


def _smallest(hashes: np.ndarray, vectors: np.ndarray, count: int) -> _Sample:
    order = np.argsort(hashes, kind="stable")[:count]
    return hashes[order], vectors[order]


def _nearest(vectors: Any, centers: np.ndarray) -> Any:
    # In float64: the same for a row in whatever partition.
    products = vectors.astype(np.float64) @ beside(centers.astype(np.float64), vectors).T
    return products.argmax(axis=1)
