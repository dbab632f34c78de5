"""K-means of vectors of length one, by cosine."""

from __future__ import annotations

import numpy as np

__all__ = ["SAMPLED", "k_means"]

#: Vectors for each center, from which centers are found that need not be exact.
SAMPLED = 64

_ROUNDS = 8

# Rows whose products with all centers fit in memory.
_BLOCK = 2048


def k_means(vectors: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """Centers of clusters, float32 (count, d), each of length one.

    Parameters
    ----------
    vectors
        float32 (n, d), each of length one, of which there are at least ``count``.
    count
        How many centers there are.
    random
        Draws those of the first round among the vectors.
    """
    centers = vectors[random.permutation(len(vectors))[:count]]
    blocks = [slice(start, start + _BLOCK) for start in range(0, len(vectors), _BLOCK)]
    for _ in range(_ROUNDS):
        own = np.concatenate([(vectors[block] @ centers.T).argmax(axis=1) for block in blocks])
        order = np.argsort(own, kind="stable")
        filled, starts = np.unique(own[order], return_index=True)
        sums = np.add.reduceat(vectors[order], starts, axis=0)
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        # One that has no vectors, or whose vectors cancel out, stays where it was.
        centers[filled] = np.where(lengths > 0, sums / np.maximum(lengths, 1e-12), centers[filled])
    return centers
