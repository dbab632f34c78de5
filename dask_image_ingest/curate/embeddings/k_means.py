"""Spherical k-means: clusters of unit vectors by cosine."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from dask_image_ingest.curate.embeddings.vectors import on_host, to_device_of

#: Vectors to sample for each center: enough for centers that need not be exact.
SAMPLED = 64

_ROUNDS = 8

# Rows whose products with all centers fit in memory.
_BLOCK = 2048


def k_means(vectors: Any, count: int, random: np.random.Generator) -> Any:
    """Find centers of clusters: unit vectors, float32 (count, d), in the memory of ``vectors``.

    Parameters
    ----------
    vectors
        float32 (n, d), NumPy or CuPy, each of length one; n is at least ``count``.
    count
        Number of centers.
    random
        Draws the initial centers from the vectors.
    """
    drawn = random.permutation(len(vectors))[:count]
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
