"""Near ones among millions of unit vectors, by k-means and inverted lists (an IVF index).

Unit vectors with a cosine of at least t are at most d = sqrt(2 - 2 t) apart. A vector can be that
near to one of another cluster only if it is within d of the border between both: the plane equally
far from their centers. Clusters whose border is within d / 2 are searched too; in many dimensions
the way from one vector to another rarely leads straight to the border, so few pairs are missed.

Rows are numbered by their rank. Tasks order their vectors by cluster, so that a cluster is one
contiguous read, and search clusters. What they give each other is in memory if it is small, else in
files of a folder that all workers share. They return a few bytes a row, never pairs.

Products are computed where ``asarray`` puts vectors, on the GPU for a cuDF frame. Row numbers stay
on the host.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import dask
import numpy as np
from dask import delayed

from dask_image_ingest.client import client_that_computes, worker_memory
from dask_image_ingest.computing import SEARCHED, compute, count, on_workers
from dask_image_ingest.curate.vectors import on_host, to_device_of
from dask_image_ingest.errors import ClusterError, DaskImageIngestError
from dask_image_ingest.typedefs import Array

# Up to so many vectors are one cluster: all pairs are compared.
_BRUTE_FORCE_MAX = 4096

# Rows that are compared at once, and with how many: all pairs fit in memory.
_BLOCK, _OTHERS = 2048, 4096

# Rows of a task, at most; a multiple of `_BLOCK`, so that products do not depend on it.
_ROWS = 32_768

# Borders within this share of d are crossed.
_REACH = 0.5

# Tolerance for float32 products: a cosine equal to the threshold counts as near.
_ROUNDING = 1e-6

# Vectors to sample for each center: enough for centers that need not be exact.
SAMPLED = 64

_ROUNDS = 8  # of k-means

# Vectors for each center that spread ones are drawn from.
_DRAWN = 8

# What is known of a row.
_UNDECIDED, _KEPT, _DROPPED = 0, 1, 2


@dataclass(frozen=True)
class Scratch:
    """A place for vectors of tasks: in their result up to ``share`` bytes, else in files.

    ``memory`` is what a search may use in each process, beside a few bytes a row.
    """

    folder: str
    memory: int
    share: int

    def for_tasks(self, number: int) -> Scratch:
        """The same folder for so many tasks; a quarter of the memory holds what they return."""
        return replace(self, share=min(self.memory, worker_memory()) // 4 // max(number, 1))

    def rows_of_task(self, length: int) -> int:
        """Rows that a task has at once, of vectors of this length."""
        rows = self.memory // 2 // (os.cpu_count() or 1) // (12 * max(length, 1))
        return min(max(rows // _BLOCK, 1) * _BLOCK, _ROWS)

    def put(self, vectors: np.ndarray) -> np.ndarray | str:
        """The vectors, or the file where they are now."""
        if vectors.nbytes <= self.share:
            return vectors
        try:
            os.makedirs(self.folder, exist_ok=True)  # a worker may not share the client's disk
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                vectors.tofile(file)
        except OSError as error:
            raise DaskImageIngestError(
                f"vectors can't be stored in {self.folder}: {error}. Set temporary-directory in "
                "Dask's configuration to a folder of a larger disk, or pass a larger memory="
            ) from error
        return file.name


@contextlib.contextmanager
def scratch_folder(memory: int) -> Iterator[Scratch]:
    """A folder for vectors in Dask's ``temporary-directory``, removed at the end."""
    parent = dask.config.get("temporary-directory", None)
    with tempfile.TemporaryDirectory("-vectors", "image-ingest-", parent) as folder:
        try:
            yield Scratch(folder, memory, 0)
        finally:
            client = client_that_computes()
            if client is not None:  # workers may have a folder of this name on a disk of their own
                with contextlib.suppress(OSError, ValueError):
                    client.run(shutil.rmtree, folder, ignore_errors=True, on_error="ignore")


@dataclass(frozen=True)
class StoredVectors:
    """Unit vectors, float32 (n, d), in parts: arrays, or the paths of files with their numbers."""

    parts: Sequence[np.ndarray | str]
    starts: np.ndarray  # the row that each part begins with, and the number of all
    length: int  # d

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The vectors of any rows."""
        found = np.empty((len(rows), self.length), np.float32)
        order = np.argsort(rows, kind="stable")
        cuts = np.searchsorted(rows[order], self.starts)
        for part in np.flatnonzero(np.diff(cuts)).tolist():
            places = order[cuts[part] : cuts[part + 1]]
            found[places] = self._of_part(part, rows[places] - self.starts[part])
        return found

    def between(self, start: int, stop: int) -> np.ndarray:
        """The vectors of rows one after the other; not copied if they are in memory."""
        part = int(np.searchsorted(self.starts, start, "right")) - 1
        if stop > self.starts[part + 1]:
            return self.take(np.arange(start, stop))
        vectors, begin = self.parts[part], int(self.starts[part])
        if isinstance(vectors, str):
            return self._of_part(part, np.arange(start - begin, stop - begin))
        return vectors[start - begin : stop - begin]

    def _of_part(self, part: int, rows: np.ndarray) -> np.ndarray:
        """The vectors of ascending rows of a part."""
        vectors = self.parts[part]
        if not isinstance(vectors, str):
            return vectors[rows]
        found = np.empty((len(rows), self.length), np.float32)
        runs = pairwise([0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)])
        try:
            # Not mapped to memory: what is mapped counts as the worker's, which would be ended.
            with open(vectors, "rb") as file:
                for first, stop in runs:
                    file.seek(int(rows[first]) * found[0].nbytes)
                    if file.readinto(found[first:stop].data) < found[first:stop].nbytes:
                        raise FileNotFoundError
        except FileNotFoundError:
            raise ClusterError(
                f"the file {vectors}, which another worker has written, is not here. Set "
                "temporary-directory in the client's configuration of Dask to a folder that all "
                "workers share, or pass a larger memory=, with which no files are needed"
            ) from None
        return found

    def joined(self, others: StoredVectors) -> StoredVectors:
        """These, and others after them."""
        starts = np.concatenate([self.starts[:-1], self.starts[-1] + others.starts])
        length = max(self.length, others.length)
        return StoredVectors([*self.parts, *others.parts], starts, length)


@dataclass(frozen=True)
class InvertedLists:
    """Vectors in the order of their clusters, and in each of their ranks."""

    vectors: StoredVectors
    ranks: np.ndarray  # of each vector, int64 (n,)
    starts: np.ndarray  # the place of each cluster's first vector, and the number of all
    centers: np.ndarray  # float32 (clusters, d)
    threshold: float
    asarray: Callable[[np.ndarray], Array]


def invert(
    vectors: StoredVectors,
    rows: np.ndarray,
    threshold: float,
    scratch: Scratch,
    asarray: Callable[[np.ndarray], Array] = np.asarray,
) -> InvertedLists:
    """Divide vectors into √n clusters, and order them.

    ``rows`` is the number in ``vectors`` of each rank; ``threshold`` the least cosine of near ones.
    ``asarray`` moves vectors to where they are compared.
    """
    ranges = [*_ranges(len(rows), scratch.rows_of_task(vectors.length))]
    stored, numbers = on_workers(vectors), on_workers(rows)
    (centers,) = _run(_centers, [asarray], stored, numbers)
    found = _run(_clusters, ranges, stored, numbers, on_workers(centers), asarray)
    own = np.concatenate([np.empty(0, np.int64), *found])
    ranks = np.argsort(own, kind="stable")
    starts = np.searchsorted(own[ranks], np.arange(len(centers) + 1))
    to = scratch.for_tasks(len(ranges))
    ordered = _run(_ordered, ranges, stored, on_workers(rows[ranks]), to)
    of_parts = np.array([start for start, _ in ranges] + [len(rows)])
    lists = StoredVectors(ordered, of_parts, vectors.length)
    return InvertedLists(lists, ranks, starts, centers, threshold, asarray)


def nearest_kept_vectors(lists: InvertedLists) -> tuple[np.ndarray, np.ndarray]:
    """Greedy deduplication: keep a row unless a kept row before it is near.

    Of each row, by rank, the nearest kept row, ties to the lowest (-1: the row itself is kept), and
    the cosine with it (0).
    """
    status = np.full(len(lists.ranks), _UNDECIDED, np.int8)
    shared = on_workers(lists)
    # Tasks decide all that does not wait for rows of others' clusters: then these are known.
    while (undecided := np.flatnonzero(status == _UNDECIDED)).size:
        groups = _groups(lists.starts, undecided)
        for places, found in _run(_decide, groups, shared, on_workers(status)):
            status[places] = found
    return _nearest(lists, shared, status)


def nearest_of(lists: InvertedLists, others: int) -> tuple[np.ndarray, np.ndarray]:
    """The nearest of the first ``others`` rows for each of those after them.

    Ties to the lowest; -1 where none is near. Then the cosine with it; 0 where none is.
    """
    status = np.where(lists.ranks < others, _KEPT, _DROPPED).astype(np.int8)
    nearest, similarity = (found[others:] for found in _nearest(lists, on_workers(lists), status))
    is_far = similarity < _least(lists.threshold)
    nearest[is_far], similarity[is_far] = -1, 0
    return nearest, similarity


def _nearest(
    lists: InvertedLists, shared: Any, status: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """By rank: the nearest kept row of each that is not (-1: none), and the cosine with it."""
    nearest = np.full(len(status), -1, np.int64)
    similarity = np.zeros(len(status), np.float32)
    groups = _groups(lists.starts, np.flatnonzero(status == _DROPPED))
    for ranks, kept, cosines in _run(_nearest_of_clusters, groups, shared, on_workers(status)):
        nearest[ranks], similarity[ranks] = kept, cosines
    return nearest, similarity


def _run(task: Callable[..., Any], units: Sequence[Any], *arguments: Any) -> list[Any]:
    """Results of a task for each unit of work."""
    return list(compute(*(delayed(task, pure=False)(unit, *arguments) for unit in units)))


def _ranges(rows: int, of_task: int) -> Iterator[tuple[int, int]]:
    for start in range(0, rows, of_task):
        yield start, min(start + of_task, rows)


def _groups(starts: np.ndarray, places: np.ndarray) -> list[np.ndarray]:
    """The clusters of ascending places, as many to a group as have `_ROWS` of them."""
    clusters, first = np.unique(np.searchsorted(starts, places, "right") - 1, return_index=True)
    return np.split(clusters, np.flatnonzero(np.diff(first // _ROWS)) + 1) if len(places) else []


def _least(threshold: float) -> np.float32:
    return np.float32(threshold - _ROUNDING)


# Tasks: the unit of work comes first.


def _centers(
    asarray: Callable[[np.ndarray], Array], vectors: StoredVectors, rows: np.ndarray
) -> np.ndarray:
    """Centers of √n clusters, by k-means of a sample with a fixed seed: float32 (clusters, d)."""
    if len(rows) <= _BRUTE_FORCE_MAX:
        return np.ones((1, vectors.length), np.float32)
    number = int(np.sqrt(len(rows)))
    random = np.random.default_rng(0)
    sample = np.sort(random.permutation(len(rows))[: SAMPLED * number])
    return on_host(k_means(asarray(vectors.take(rows[sample])), number, random))


def _clusters(
    ranks: tuple[int, int],
    vectors: StoredVectors,
    rows: np.ndarray,
    centers: np.ndarray,
    asarray: Callable[[np.ndarray], Array],
) -> np.ndarray:
    """The number of each row's nearest center."""
    taken, there = vectors.take(rows[slice(*ranks)]), asarray(centers)
    blocks = (asarray(taken[slice(*block)]) for block in _ranges(len(taken), _BLOCK))
    return np.concatenate([on_host((block @ there.T).argmax(axis=1)) for block in blocks])


def _ordered(
    places: tuple[int, int], vectors: StoredVectors, rows: np.ndarray, scratch: Scratch
) -> np.ndarray | str:
    start, stop = places
    return scratch.put(vectors.take(rows[start:stop]))


def _decide(
    clusters: np.ndarray, lists: InvertedLists, status: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Places of the undecided rows of some clusters, and what is known of each now."""
    search = _Search(lists, status)
    of_clusters = [np.arange(*lists.starts[cluster : cluster + 2]) for cluster in clusters]
    places = np.concatenate(of_clusters)
    left = places[status[places] == _UNDECIDED]
    undecided = left
    while len(left):
        for cluster in clusters:
            search.decide(cluster)
        before, left = len(left), left[search.status[left] == _UNDECIDED]
        if len(left) == before:
            break
    found = search.status[undecided]
    count(SEARCHED, int((found != _UNDECIDED).sum()))
    return undecided, found


def _nearest_of_clusters(
    clusters: np.ndarray, lists: InvertedLists, status: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ranks of the rows of some clusters that are dropped; the nearest kept row, and the cosine."""
    search = _Search(lists, status)
    found = [
        search.nearest(block, cluster)
        for cluster in clusters
        for block in search.blocks(cluster, _DROPPED)
    ]
    ranks, nearest, cosines = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return ranks, nearest, cosines


class _Search:
    """One task's search in inverted lists; ``places`` are those there."""

    def __init__(self, lists: InvertedLists, status: np.ndarray) -> None:
        self._lists = lists
        self._vectors = lists.vectors
        self._centers = lists.asarray(lists.centers)
        self._least = _least(lists.threshold)
        self.status = status.copy()

    def blocks(self, cluster: int, status: int) -> Iterator[np.ndarray]:
        """Places of the rows of a cluster of which this is known, a block at a time."""
        start, stop = self._lists.starts[cluster : cluster + 2]
        places = start + np.flatnonzero(self.status[start:stop] == status)
        for block in _ranges(len(places), _BLOCK):
            yield places[slice(*block)]

    def decide(self, cluster: int) -> None:
        """Keep or drop the undecided rows of a cluster, if those before them are decided."""
        for block in self.blocks(cluster, _UNDECIDED):
            vectors = self._at(block)
            own = self._living(cluster, block[-1])
            # Blocks before have mostly decided: few rows of this one are left for other clusters.
            drops, waits = self._earlier(block, vectors, own[~np.isin(own, block)])
            left = np.flatnonzero(~drops)
            for other, some in self._visits(vectors[to_device_of(left, vectors)], cluster):
                asking = left[some]
                others = self._living(other)
                found = self._earlier(block[asking], vectors[to_device_of(asking, vectors)], others)
                drops[asking] |= found[0]
                waits[asking] |= found[1]
            self.status[block[drops]] = _DROPPED
            left = np.flatnonzero(~drops)
            if len(left):
                self._decide_block(block[left], vectors[to_device_of(left, vectors)], waits[left])

    def _decide_block(self, block: np.ndarray, vectors: Array, waits: np.ndarray) -> None:
        """Decide rows of a cluster that are near no kept row before the block."""
        is_near = on_host(vectors @ vectors.T >= self._least)
        status = np.where(waits, _UNDECIDED, _KEPT)
        for row in np.flatnonzero(is_near.argmax(axis=1) < np.arange(len(block))):
            before = status[:row][is_near[row, :row]]
            if (before == _KEPT).any():
                status[row] = _DROPPED
            elif (before == _UNDECIDED).any():
                status[row] = _UNDECIDED
        self.status[block] = status

    def nearest(self, block: np.ndarray, cluster: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ranks of a block's rows, the nearest kept row of each (-1: none), and the cosine (0)."""
        vectors = self._at(block)
        best = np.full(len(block), -np.inf, np.float32)
        nearest = np.full(len(block), -1, np.int64)
        everything = np.arange(len(block))
        for other, some in [(cluster, everything), *self._visits(vectors, cluster)]:
            of_cluster = self._living(other)
            kept = of_cluster[self.status[of_cluster] == _KEPT]
            asking = vectors if other == cluster else vectors[to_device_of(some, vectors)]
            for others, cosines in self._cosines(asking, kept):
                # The first of equal ones has the lowest rank.
                rank = self._lists.ranks[others][on_host(cosines.argmax(axis=1))]
                cosine = on_host(cosines.max(axis=1))
                nearer = cosine > best[some]
                nearer |= (cosine == best[some]) & (rank < nearest[some])
                best[some[nearer]], nearest[some[nearer]] = cosine[nearer], rank[nearer]
        return self._lists.ranks[block], nearest, np.where(nearest < 0, np.float32(0), best)

    def _earlier(
        self, block: np.ndarray, vectors: Array, others: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """True for rows that have a near one before them that is kept; then, that is undecided."""
        ranks = self._lists.ranks
        drops, waits = np.zeros((2, len(block)), bool)
        # No later ones, in the order of ranks.
        others = others[ranks[others] < ranks[block].max(initial=-1)]
        for some, cosines in self._cosines(vectors, others):
            is_near = cosines >= self._least
            rows = np.flatnonzero(on_host(is_near.any(axis=1)))
            near = on_host(is_near[to_device_of(rows, vectors)])
            near &= ranks[some] < ranks[block[rows], None]
            is_kept = self.status[some] == _KEPT
            drops[rows] |= near[:, is_kept].any(axis=1)
            waits[rows] |= near[:, ~is_kept].any(axis=1)
        return drops, waits

    def _living(self, cluster: int, stop: int | None = None) -> np.ndarray:
        """Places in a cluster of rows that are not dropped, up to ``stop``."""
        start, end = self._lists.starts[cluster : cluster + 2]
        return start + np.flatnonzero(
            self.status[start : end if stop is None else stop] != _DROPPED
        )

    def _cosines(self, vectors: Array, others: np.ndarray) -> Iterator[tuple[np.ndarray, Array]]:
        """Ascending places, of others or between them, and the cosines with these (else -inf)."""
        for some in _ranges(len(others), _OTHERS):
            places = others[slice(*some)]
            start, stop = int(places[0]), int(places[-1]) + 1
            if stop - start > 2 * len(places):
                yield places, vectors @ self._at(places).T
                continue
            # A product with more vectors costs less than a copy of some.
            every = self._lists.asarray(self._vectors.between(start, stop))
            cosines = vectors @ every.T
            if stop - start > len(places):
                is_gap = np.ones(stop - start, bool)
                is_gap[places - start] = False
                cosines[:, to_device_of(np.flatnonzero(is_gap), vectors)] = -np.inf
            yield np.arange(start, stop), cosines

    def _visits(self, vectors: Array, cluster: int) -> Iterator[tuple[int, np.ndarray]]:
        """Other clusters to search for vectors of a cluster, and the numbers of these vectors."""
        centers, center = self._lists.centers, self._lists.centers[cluster]
        between = np.sqrt(np.maximum(2 - 2 * (centers @ center), 1e-12))
        # The distance to a border is the difference of the cosines with both centers, divided by
        # the distance of these.
        reach = _REACH * np.sqrt(2 - 2 * self._lists.threshold) * between
        reach[cluster] = -np.inf
        cosines = vectors @ self._centers.T
        difference = cosines[:, cluster][:, None] - cosines
        is_near = difference <= to_device_of(reach.astype(np.float32), vectors)
        numbers, clusters = np.nonzero(on_host(is_near))
        numbers = numbers[np.argsort(clusters, kind="stable")]
        others, first = np.unique(clusters, return_counts=True)
        # Not strict: without clusters np.split still returns one part.
        yield from zip(others.tolist(), np.split(numbers, first.cumsum()[:-1]), strict=False)

    def _at(self, places: np.ndarray) -> Array:
        return self._lists.asarray(self._vectors.take(places))


def k_means(
    vectors: Array, count: int, random: np.random.Generator, *, spread: bool = False
) -> Array:
    """Centers of ``count`` clusters: unit vectors, float32 (count, d), where ``vectors`` are.

    ``vectors`` are float32 (n, d), NumPy or CuPy, each of length one, n at least ``count``.
    ``random`` draws the first centers; if they are to ``spread``, far from each other (k-means++),
    which takes as long as ``count`` / 8 rounds.
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


def _spread(vectors: Array, count: int, random: np.random.Generator) -> np.ndarray:
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
