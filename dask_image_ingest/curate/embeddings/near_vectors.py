"""Near vectors among many: k-means, then cosines inside clusters and those beyond a near border.

Vectors are of length one, so that two with a cosine of at least t are at most sqrt(2 - 2 t) apart.
A vector can be that near to one of another cluster only if it is that near to the border between
the two, the plane in which both centers are equally far. Borders that are nearer than half of it
are crossed: in many dimensions a step rarely leads straight to one.

Vectors may be on the GPU: products of them are made and compared there, numbers of rows stay here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from dask_image_ingest.curate.embeddings.k_means import SAMPLED, k_means
from dask_image_ingest.curate.embeddings.vectors import beside, on_host

# So few are compared with all.
_FEW = 4096

# Rows that are looked up together: no more pairs of them than fit in memory, if all are equal.
_BLOCK = 2048

# How near a border is crossed, of the distance that near vectors have at most.
_REACH = 0.5

# Of float32 products: what is equal to the threshold is not below it.
_ROUNDING = 1e-6


def near_to_first(vectors: Any, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows that stay if each takes away the near ones after it, and the rows others are near to.

    Rows are taken in their order, and stay unless one that stays is near: so no row goes for the
    sake of one that goes itself.

    Parameters
    ----------
    vectors
        float32 (n, d), NumPy or CuPy, each of length one.
    threshold
        The least cosine of near vectors.

    Returns
    -------
    of : array, shape (n,), int64
        The nearest row that stays, of equally near ones the first; -1 where a row stays.
    similarity : array, shape (n,), float32
        The cosine with it; 0 where a row stays.
    """
    least = np.float32(threshold - _ROUNDING)
    of = np.full(len(vectors), -1, np.int64)
    similarity = np.full(len(vectors), -np.inf, np.float32)
    clusters = Clusters(vectors, threshold)
    for block in _blocks(np.arange(len(vectors))):
        visits = clusters.visits(block)
        best, row = clusters.nearest(block, visits)
        near = best >= least
        similarity[block[near]], of[block[near]] = best[near], row[near]
        left = np.flatnonzero(~near)
        gone, first = _taken(left, *clusters.pairs(block, visits, least))
        of[block[gone]] = block[first]
        similarity[block[gone]] = clusters.cosines(block[gone], block[first])
        clusters.add(block[left[~np.isin(left, gone)]])
    # Of those that stay, one that was not known yet may be nearer.
    for block in _blocks(np.flatnonzero(of >= 0)):
        best, row = clusters.nearest(block, clusters.visits(block))
        nearer = best > similarity[block]
        similarity[block[nearer]], of[block[nearer]] = best[nearer], row[nearer]
    return of, np.where(of < 0, np.float32(0), similarity)


def _blocks(rows: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), _BLOCK):
        yield rows[start : start + _BLOCK]


class Clusters:
    """Rows that stay, by the cluster they are in; rows are added, and asked for, many at a time."""

    def __init__(self, vectors: Any, threshold: float) -> None:
        self._vectors = vectors
        self._centers = _centers(vectors)
        products = on_host(self._centers @ self._centers.T)
        # How far each center is from each other one: never zero, for the sake of division.
        between = np.sqrt(np.maximum(2 - 2 * products, 1e-12))
        # How far beyond each of its borders a row of each cluster looks.
        self._reach = beside(_REACH * np.sqrt(2 - 2 * threshold) * between, vectors)
        self._own = np.empty(len(vectors), np.int64)
        self._rows = [_Rows(vectors) for _ in self._centers]

    def _at(self, rows: np.ndarray) -> Any:
        return self._vectors[beside(rows, self._vectors)]

    def cosines(self, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
        """The cosine of each row with the other one in its place."""
        return on_host((self._at(rows) * self._at(others)).sum(axis=1))

    def visits(self, block: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Each cluster that some rows of a block have to be compared with, and their places."""
        close = self._at(block) @ self._centers.T
        own = close.argmax(axis=1)
        self._own[block] = on_host(own)
        # The distance to the plane that is equally far from both centers.
        beyond = close.max(axis=1)[:, None] - close
        places, clusters = np.nonzero(on_host((beyond <= self._reach[own]).T))
        starts = np.searchsorted(places, np.arange(len(self._centers) + 1))
        return [
            (cluster, clusters[start:stop])
            for cluster, (start, stop) in enumerate(pairwise(starts))
            if start < stop
        ]

    def nearest(
        self, block: np.ndarray, visits: list[tuple[int, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Cosine and row of the nearest that was added, for each row of a block."""
        best = np.full(len(block), -np.inf, np.float32)
        found = np.full(len(block), -1, np.int64)
        for cluster, places in visits:
            rows, vectors = self._rows[cluster].all()
            if not len(rows):
                continue
            cosines = self._at(block[places]) @ vectors.T
            cosine, row = on_host(cosines.max(axis=1)), rows[on_host(cosines.argmax(axis=1))]
            better = cosine > best[places]
            better |= (cosine == best[places]) & (row < found[places])
            best[places[better]], found[places[better]] = cosine[better], row[better]
        return best, found

    def pairs(
        self, block: np.ndarray, visits: list[tuple[int, np.ndarray]], least: np.float32
    ) -> tuple[np.ndarray, np.ndarray]:
        """Near rows of a block among themselves: places of the later and the earlier one."""
        own = self._own[block]
        order = np.argsort(own, kind="stable")
        starts = np.searchsorted(own[order], np.arange(len(self._centers) + 1))
        later, earlier = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for cluster, places in visits:
            inside = order[starts[cluster] : starts[cluster + 1]]
            if not len(inside):
                continue
            near = self._at(block[places]) @ self._at(block[inside]).T >= least
            visitor, visited = np.nonzero(on_host(near))
            visitor, visited = places[visitor], inside[visited]
            later.append(visitor[visited < visitor])
            earlier.append(visited[visited < visitor])
        return np.concatenate(later), np.concatenate(earlier)

    def add(self, rows: np.ndarray) -> None:
        """Add rows, whose clusters ``visits`` has found."""
        order = rows[np.argsort(self._own[rows], kind="stable")]
        clusters, starts = np.unique(self._own[order], return_index=True)
        # Of no rows a split gives one part.
        for cluster, some in zip(clusters, np.split(order, starts[1:]), strict=False):
            self._rows[cluster].add(some)


class _Rows:
    """Some rows and their vectors, in arrays that grow."""

    def __init__(self, vectors: Any) -> None:
        self._all = vectors
        self._rows = np.empty(0, np.int64)
        self._vectors = vectors[:0]
        self._count = 0

    def all(self) -> tuple[np.ndarray, Any]:
        return self._rows[: self._count], self._vectors[: self._count]

    def add(self, rows: np.ndarray) -> None:
        stop = self._count + len(rows)
        if stop > len(self._rows):
            room = max(stop, len(self._rows) * 3 // 2)
            before, vectors = self.all()
            self._rows = np.empty(room, np.int64)
            self._vectors = beside(np.empty((room, vectors.shape[1]), np.float32), self._all)
            self._rows[: self._count], self._vectors[: self._count] = before, vectors
        self._rows[self._count : stop] = rows
        self._vectors[self._count : stop] = self._all[beside(rows, self._all)]
        self._count = stop


def _taken(
    left: np.ndarray, later: np.ndarray, earlier: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Places that go since an earlier one of them, which stays, is near; and the first such one.

    Of the pairs of places ``later`` and ``earlier`` those count in which both are ``left``.
    """
    both = np.isin(later, left) & np.isin(earlier, left)
    order = np.lexsort((earlier[both], later[both]))
    later, earlier = later[both][order], earlier[both][order]
    first: dict[int, int] = {}
    places, starts = np.unique(later, return_index=True)
    for place, others in zip(places.tolist(), np.split(earlier, starts[1:]), strict=False):
        stays = next((other for other in others.tolist() if other not in first), None)
        if stays is not None:
            first[place] = stays
    return np.array([*first], np.int64), np.array([*first.values()], np.int64)


def _centers(vectors: Any) -> Any:
    """Centers of clusters: k-means of a sample, seeded."""
    if len(vectors) <= _FEW:
        return beside(np.ones((1, vectors.shape[1]), np.float32), vectors)
    count = int(np.sqrt(len(vectors)))
    random = np.random.default_rng(0)
    sample = np.sort(random.permutation(len(vectors))[: SAMPLED * count])
    return k_means(vectors[beside(sample, vectors)], count, random)
