"""``find_semantic_duplicates`` and ``find_clusters``, by k-means of a model's embeddings.

The search for duplicates among unit vectors is by k-means, then cosines within clusters and near
borders. Unit vectors with a cosine of at least t are at most d = sqrt(2 - 2 t) apart. A vector can
be that near to one of another cluster only if it is within d of the border between both: the plane
equally far from their centers. Clusters whose border is within d / 2 are searched too; in many
dimensions the way from one vector to another rarely leads straight to the border, so few pairs are
missed.

Vectors may be on the GPU: their products are computed and compared there. Row numbers stay on the
host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import xxhash

from dask_image_ingest.arguments import shown, whole_number
from dask_image_ingest.curate.ranking import (
    Ranked,
    RowsToRank,
    columns_to_join,
    group_columns,
    join_columns,
    merge_ranked,
    of_partitions,
    partition_table,
    resolve_identity,
    row_ids,
    sort_keys,
    with_ranking_columns,
)
from dask_image_ingest.curate.vectors import (
    check_vectors,
    map_vectors,
    on_host,
    to_device_of,
    unit,
    valid_vectors,
)
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import Frame
from dask_image_ingest.dataset.plan import select_columns
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of, without
from dask_image_ingest.image_counts import reduce_partitions
from dask_image_ingest.typedefs import AnyFrame, Array, DataFrame

# Up to so many vectors are one cluster: all pairs are compared.
_BRUTE_FORCE_MAX = 4096

# Rows per batch: all pairs of two batches fit in memory, even if all vectors are equal.
_BLOCK = 2048

# Borders within this share of d are crossed.
_REACH = 0.5

# Tolerance for float32 products: a cosine equal to the threshold counts as near.
_ROUNDING = 1e-6

# Vectors to sample for each center: enough for centers that need not be exact.
_SAMPLED = 64

_ROUNDS = 8  # of k-means

# Vectors for each center that spread ones are drawn from.
_DRAWN = 8

_Sample = tuple[np.ndarray, np.ndarray]  # hashes, uint64 (n,), and vectors, float32 (n, d)


def find_semantic_duplicates(
    frame: Frame,
    threshold: float = 0.95,
    *,
    column: str = "embedding",
    keep: Literal["best", "largest", "first"] | str = "best",
    identity: str | None = None,
) -> Frame:
    """Find images with near embeddings, and choose which of each group to keep.

    Computes at once: gathers the embeddings in this process, at 4 bytes a number and briefly twice
    that (a million of 768 numbers: 3 GB, then 6), then finds the groups, on this process's GPU for
    a cuDF frame. The result is lazy if the frame is, and looks each row up by its URL, key and
    offset. Embeddings that are not stored are then computed again, from images decoded again.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with the columns ``__url__``, ``__key__`` and ``offset`` of
        :func:`dask_image_ingest.read_webdataset_images`, and a column of vectors.
    threshold
        The least cosine of two near vectors, x·y / (‖x‖ ‖y‖): above 0, up to 1.
    column
        The column of vectors, lists of d numbers, as from ``embed``.
    keep, identity
        Which image of a group to keep, and what identifies a row, as for :func:`find_duplicates`;
        ``"best"`` asks the signals of quality that the frame has.

    Returns
    -------
    dataframe
        ``frame`` with these columns, the same whatever the partitions are:

        ``semantic.keep``
            bool: whether to keep the row. Never null.
        ``semantic.group``
            int64: the number of the row's group, of which one row is kept; null if the row has no
            duplicate.
        ``semantic.of``
            string: the key of the row that is kept instead; null in rows that are kept.
        ``semantic.similarity``
            float32: the cosine with that row; null in rows that are kept.

    Raises
    ------
    ArgumentError
        For arguments out of range, if a column is missing, or the vectors differ in length.

    Notes
    -----
    Deduplication is greedy, in the order of ``keep``: a row is kept unless a kept row before it is
    near; there are no chains. Each row that is not kept has a cosine of at least ``threshold``
    (less 1e-6, for float32) with the one in ``semantic.of``.

    Up to 4,096 vectors are compared in all pairs. More are divided into √n clusters by k-means of a
    sample with a fixed seed; a vector is compared with those of its own cluster, and of others
    whose border is nearer than √(2 - 2 ``threshold``) / 2. Of the rows that a search of all pairs
    finds, at least 99 % are found, in the measurements of the guide. Rows without an embedding, or
    with one that is zero or not finite, are kept.

    Examples
    --------
    >>> found = curate.find_semantic_duplicates(frame, threshold=0.999)
    >>> found[found["semantic.keep"]].shape[0] < len(frame)
    True
    """
    check_vectors(frame, column)
    id_columns = resolve_identity(frame, identity)
    check_threshold(threshold)
    ranked, vectors = rank_vectors(frame, column, keep, id_columns)
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    keeper, similarity = nearest_kept_vectors(
        backend_of(meta).numpy.asarray(vectors), float(threshold)
    )
    columns, grouped = group_columns(ranked, keeper, "semantic")
    columns["semantic.similarity"] = pa.array(similarity[grouped], mask=keeper[grouped] < 0)
    verdicts = columns_to_join(id_columns, ranked.ids[grouped], columns, {"semantic.keep": True})
    return join_columns(frame, verdicts)


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
    count = _SAMPLED * k
    sample = functools.partial(_sample, column=column, count=count, seed=seed)
    merge = functools.partial(_merge, count=count)
    _, sampled = reduce_partitions(select_columns(frame, [column]), sample, merge)
    if len(sampled) < k:
        raise ArgumentError(f"k={k}: the column {column!r} has {len(sampled)} vectors")
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    sampled = backend_of(meta).numpy.asarray(sampled)
    centers = on_host(k_means(sampled, k, np.random.default_rng(seed), spread=True))
    nearest = functools.partial(_nearest, centers=centers)
    return map_vectors(
        frame, [column], {"cluster": "int32"}, nearest,
        length=centers.shape[1], directed=True, called_by="find_clusters", writes=False,
    )  # fmt: skip


def _sample(frame: DataFrame, column: str, count: int, seed: int) -> _Sample:
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


def _nearest(vectors: Array, centers: np.ndarray) -> Array:
    # In float64, so that the result of a row does not depend on its partition.
    products = vectors.astype(np.float64) @ to_device_of(centers.astype(np.float64), vectors).T
    return products.argmax(axis=1)


def check_threshold(threshold: object) -> None:
    """Raise ``ArgumentError`` if this is no cosine, above 0 and up to 1."""
    # Written as a range, which rejects NaN.
    if not (isinstance(threshold, (int, float, np.number)) and 0 < threshold <= 1):
        raise ArgumentError(f"threshold={shown(threshold)}: pass a cosine, above 0 and up to 1")


def rank_vectors(
    frame: AnyFrame, column: str, keep: str, identity: tuple[str, ...]
) -> tuple[Ranked, np.ndarray]:
    """Rows that have a vector, best first, and their unit vectors, float32 (n, d)."""
    frame, rank_by = with_ranking_columns(frame, keep, None)
    frame = select_columns(frame, dict.fromkeys([*identity, column, *rank_by]))
    parts = of_partitions(frame, _rows_to_rank, column, keep, identity)
    lengths = {vectors.shape[1] for _, vectors in parts if len(vectors)}
    if len(lengths) > 1:
        raise ArgumentError(
            f"the vectors of {column!r} differ in length from partition to partition: "
            f"{', '.join(map(str, sorted(lengths)))}"
        )
    starts = np.cumsum([0, *(len(vectors) for _, vectors in parts)])
    # There are no hashes here: their field carries each row's number before ranking.
    numbered = [
        replace(rows, hashes=np.arange(start, start + len(vectors)))
        for (rows, vectors), start in zip(parts, starts[:-1], strict=True)
    ]
    ranked = merge_ranked(numbered)
    rank = np.full(starts[-1], -1)  # by row number; -1 for a repetition of a row
    rank[ranked.hashes] = np.arange(len(ranked.hashes))
    ranked_vectors = np.empty((len(ranked.hashes), max(lengths, default=0)), np.float32)
    for number, start in enumerate(starts[:-1]):
        rows, vectors = parts[number]
        ranks = rank[start : start + len(vectors)]
        if len(vectors):  # an empty partition's vectors may have another length
            ranked_vectors[ranks[ranks >= 0]] = vectors[ranks >= 0]
        parts[number] = (rows, vectors[:0])  # free the memory
    for start in range(0, len(ranked_vectors), 4096):
        block = slice(start, start + 4096)
        ranked_vectors[block] = unit(ranked_vectors[block])
    return ranked, ranked_vectors


def _rows_to_rank(
    frame: DataFrame, column: str, keep: str, identity: tuple[str, ...]
) -> tuple[RowsToRank, np.ndarray]:
    rows, vectors = valid_vectors(frame, column)
    table = partition_table(without(frame, [column])).take(pa.array(rows))
    keys = sort_keys(table, keep, identity)
    no_hashes, is_exact = np.empty(0, np.int64), np.zeros(len(rows), bool)
    return RowsToRank(row_ids(table, identity), no_hashes, is_exact, keys), vectors


def nearest_kept_vectors(vectors: Array, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Greedy deduplication: keep a row unless a kept row before it is near.

    ``vectors`` is float32 (n, d), NumPy or CuPy, each of length one; ``threshold`` is the least
    cosine of near ones. Of each row the nearest kept row, ties to the lowest (-1: the row itself is
    kept), and the cosine with it (0).
    """
    min_cosine = np.float32(threshold - _ROUNDING)
    keeper = np.full(len(vectors), -1, np.int64)
    similarity = np.full(len(vectors), -np.inf, np.float32)
    kept = Clusters(vectors, threshold)
    for block in _blocks(np.arange(len(vectors))):
        visits = kept.visits(block)
        best, row = kept.nearest(block, visits)
        near = best >= min_cosine
        similarity[block[near]], keeper[block[near]] = best[near], row[near]
        undecided = np.flatnonzero(~near)
        dropped, first = _deduplicate_block(undecided, *kept.pairs(block, visits, min_cosine))
        keeper[block[dropped]] = block[first]
        similarity[block[dropped]] = kept.cosines(block[dropped], block[first])
        kept.add(block[undecided[~np.isin(undecided, dropped)]])
    # Rows were dropped for the nearest row kept so far. A row kept later may be nearer.
    for block in _blocks(np.flatnonzero(keeper >= 0)):
        best, row = kept.nearest(block, kept.visits(block))
        nearer = best > similarity[block]
        similarity[block[nearer]], keeper[block[nearer]] = best[nearer], row[nearer]
    return keeper, np.where(keeper < 0, np.float32(0), similarity)


def nearest_of(
    vectors: np.ndarray,
    others: np.ndarray,
    threshold: float,
    asarray: Callable[[np.ndarray], Array] = np.asarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The nearest of ``others`` (m, d) for each of ``vectors`` (n, d), all of length one.

    Ties to the lowest; -1 where none has a cosine of at least ``threshold``. Then the cosine with
    it; 0 where none is near. ``asarray`` moves vectors to where they are compared.
    """
    nearest = np.full(len(vectors), -1, np.int64)
    similarity = np.zeros(len(vectors), np.float32)
    if not len(vectors) or not len(others):
        return nearest, similarity
    index = Clusters(asarray(np.concatenate([others, vectors])), threshold)
    for block in _blocks(np.arange(len(others))):
        index.visits(block)  # which finds the cluster of each
        index.add(block)
    for block in _blocks(np.arange(len(vectors))):
        rows = block + len(others)
        best, row = index.nearest(rows, index.visits(rows))
        near = best >= np.float32(threshold - _ROUNDING)
        nearest[block[near]], similarity[block[near]] = row[near], best[near]
    return nearest, similarity


def _blocks(rows: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), _BLOCK):
        yield rows[start : start + _BLOCK]


class Clusters:
    """Index of rows by their cluster (an IVF index); add rows and look up queries in batches.

    "Positions" are those of rows in a block of queries.
    """

    def __init__(self, vectors: Array, threshold: float) -> None:
        self._vectors = vectors
        self._centers = _centers(vectors)
        products = on_host(self._centers @ self._centers.T)
        # Distances between centers, (clusters, clusters).
        between = np.sqrt(np.maximum(2 - 2 * products, 1e-12))
        # The largest difference of a row's cosines with two centers at which their border is within
        # reach: the distance to the border is that difference, divided by the centers' distance.
        self._reach = to_device_of(_REACH * np.sqrt(2 - 2 * threshold) * between, vectors)
        # Each row's cluster, (n,), set by `visits`.
        self._own = np.empty(len(vectors), np.int64)
        # The added rows of each cluster.
        self._rows = [_Rows(vectors) for _ in self._centers]

    def _at(self, rows: np.ndarray) -> Any:
        return self._vectors[to_device_of(rows, self._vectors)]

    def cosines(self, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
        """The cosines of pairs of rows."""
        return on_host((self._at(rows) * self._at(others)).sum(axis=1))

    def visits(self, block: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Clusters to search for rows of a block, each with the positions of these rows."""
        cosines = self._at(block) @ self._centers.T
        own = cosines.argmax(axis=1)
        self._own[block] = on_host(own)
        difference = cosines.max(axis=1)[:, None] - cosines
        clusters, positions = np.nonzero(on_host((difference <= self._reach[own]).T))
        starts = np.searchsorted(clusters, np.arange(len(self._centers) + 1))
        return [
            (cluster, positions[start:stop])
            for cluster, (start, stop) in enumerate(pairwise(starts))
            if start < stop
        ]

    def nearest(
        self, block: np.ndarray, visits: list[tuple[int, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Nearest added row for each row of a block: cosine (-inf: none) and row (-1: none)."""
        best = np.full(len(block), -np.inf, np.float32)
        nearest = np.full(len(block), -1, np.int64)
        for cluster, positions in visits:
            rows, vectors = self._rows[cluster].all()
            if not len(rows):
                continue
            cosines = self._at(block[positions]) @ vectors.T
            cosine, row = on_host(cosines.max(axis=1)), rows[on_host(cosines.argmax(axis=1))]
            better = cosine > best[positions]
            better |= (cosine == best[positions]) & (row < nearest[positions])
            best[positions[better]], nearest[positions[better]] = cosine[better], row[better]
        return best, nearest

    def pairs(
        self, block: np.ndarray, visits: list[tuple[int, np.ndarray]], min_cosine: np.float32
    ) -> tuple[np.ndarray, np.ndarray]:
        """Near pairs within a block: positions of the later and of the earlier row."""
        own = self._own[block]
        order = np.argsort(own, kind="stable")
        starts = np.searchsorted(own[order], np.arange(len(self._centers) + 1))
        later, earlier = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for cluster, positions in visits:
            members = order[starts[cluster] : starts[cluster + 1]]
            if not len(members):
                continue
            near = self._at(block[positions]) @ self._at(block[members]).T >= min_cosine
            query, member = np.nonzero(on_host(near))
            query, member = positions[query], members[member]
            later.append(query[member < query])
            earlier.append(member[member < query])
        return np.concatenate(later), np.concatenate(earlier)

    def add(self, rows: np.ndarray) -> None:
        """Add rows that were in a block of ``visits``."""
        order = rows[np.argsort(self._own[rows], kind="stable")]
        clusters, starts = np.unique(self._own[order], return_index=True)
        # Not strict: without rows there are no clusters, but np.split still returns one part.
        for cluster, members in zip(clusters, np.split(order, starts[1:]), strict=False):
            self._rows[cluster].add(members)


class _Rows:
    """Growing arrays of rows and their vectors."""

    def __init__(self, vectors: Array) -> None:
        self._all = vectors
        self._rows = np.empty(0, np.int64)
        self._vectors = vectors[:0]
        self._count = 0

    def all(self) -> tuple[np.ndarray, Any]:
        return self._rows[: self._count], self._vectors[: self._count]

    def add(self, rows: np.ndarray) -> None:
        stop = self._count + len(rows)
        if stop > len(self._rows):
            capacity = max(stop, len(self._rows) * 3 // 2)
            old_rows, old_vectors = self.all()
            self._rows = np.empty(capacity, np.int64)
            shape = (capacity, old_vectors.shape[1])
            self._vectors = to_device_of(np.empty(shape, np.float32), self._all)
            self._rows[: self._count], self._vectors[: self._count] = old_rows, old_vectors
        self._rows[self._count : stop] = rows
        self._vectors[self._count : stop] = self._all[to_device_of(rows, self._all)]
        self._count = stop


def _deduplicate_block(
    undecided: np.ndarray, later: np.ndarray, earlier: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Greedy deduplication by near pairs: dropped positions, and for each the first kept near one.

    Only pairs of two ``undecided`` positions count.
    """
    both = np.isin(later, undecided) & np.isin(earlier, undecided)
    order = np.lexsort((earlier[both], later[both]))
    later, earlier = later[both][order], earlier[both][order]
    keeper: dict[int, int] = {}
    positions, starts = np.unique(later, return_index=True)
    for position, others in zip(positions.tolist(), np.split(earlier, starts[1:]), strict=False):
        kept = next((other for other in others.tolist() if other not in keeper), None)
        if kept is not None:
            keeper[position] = kept
    return np.array([*keeper], np.int64), np.array([*keeper.values()], np.int64)


def _centers(vectors: Array) -> Array:
    """Centers of √n clusters, by k-means of a sample with a fixed seed: float32 (clusters, d)."""
    if len(vectors) <= _BRUTE_FORCE_MAX:
        return to_device_of(np.ones((1, vectors.shape[1]), np.float32), vectors)
    count = int(np.sqrt(len(vectors)))
    random = np.random.default_rng(0)
    sample = np.sort(random.permutation(len(vectors))[: _SAMPLED * count])
    return k_means(vectors[to_device_of(sample, vectors)], count, random)


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
