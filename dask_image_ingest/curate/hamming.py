"""Near-duplicate search among millions of 256-bit hashes, without comparing all pairs.

A hash is cut into 16 bands of 16 bits; only hashes with a band in common are compared: of random
pairs one in 4,096. Hashes that differ in at most 15 bits always have a common band; of random pairs
that differ in 24 bits 99.1 % have one, in 31 bits 91.3 %. Hashes that share bands with a large part
of all rows, such as pages that look alike, are compared with all rows instead, block by block.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

_BANDS = 16
_VALUES = 1 << 16

# Rows per batch of queries, and candidates per batch of comparisons: these fit a core's cache.
_BLOCK = 4096
_CANDIDATES = 1 << 18

# Share of the rows from which a query's candidates are found by brute force: a pair costs 2 ns
# there, and 8 to 110 ns in the lookup by bands.
_CROWDED = 1 / 16
_QUERIES, _ROWS = 32, 4096  # block of the brute force

# Packed: distance in the high 24 bits, row in the low 40; min = nearest, ties to the lowest row.
_NONE = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_ROW_BITS = np.uint64(40)
_ROW = np.uint64((1 << 40) - 1)

Nearest = tuple[np.ndarray, np.ndarray]  # rows (-1: none) and distances, int64 (n,)


def first_equal(hashes: np.ndarray) -> np.ndarray:
    """Row of the first equal hash for each of ``hashes``, uint64 (n, words); -1 if it is itself."""
    order = np.lexsort(hashes.T)
    ordered = hashes[order]
    begins = np.ones(len(hashes), bool)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    # The sort is stable: a run of equal hashes begins with the lowest row.
    first = np.empty(len(hashes), np.int64)
    first[order] = order[np.maximum.accumulate(np.where(begins, np.arange(len(hashes)), 0))]
    return np.where(first == np.arange(len(hashes)), -1, first)


def nearest_kept(hashes: np.ndarray, distance: int) -> Nearest:
    """Greedy deduplication: keep a row unless a kept row before it is within ``distance``.

    Parameters
    ----------
    hashes
        uint64 (n, variants, 4): the hash of each row, then those of the same image mirrored or
        turned. A later row is near an earlier one if any of its hashes is near the first hash of
        that one.
    distance
        The most bits in which near hashes differ.

    Returns
    -------
    keeper : array, shape (n,), int64
        The nearest kept row, ties to the lowest; -1 where the row itself is kept.
    distance : array, shape (n,), int64
        Bits of difference to it; 0 where the row itself is kept.
    """
    packed = np.full(len(hashes), _NONE)
    kept = BandIndex(hashes[:, 0])
    for start in range(0, len(hashes), _BLOCK):
        block = np.arange(start, min(start + _BLOCK, len(hashes)))
        packed[block] = kept.nearest(hashes[block], distance)
        undecided = block[packed[block] == _NONE]
        packed[undecided] = _deduplicate_block(hashes, undecided, distance)
        kept.add(undecided[packed[undecided] == _NONE])
    # Rows were dropped for the nearest row kept so far. A row kept later may be nearer.
    dropped = np.flatnonzero(packed != _NONE)
    packed[dropped] = np.minimum(packed[dropped], _nearest(kept, hashes[dropped], distance))
    return _unpack(packed)


def nearest(hashes: np.ndarray, others: np.ndarray, distance: int) -> Nearest:
    """Nearest of ``others``, uint64 (m, 4), within ``distance`` of each of ``hashes``.

    Shapes and sentinels are those of `nearest_kept`.
    """
    index = BandIndex(others)
    index.add(np.arange(len(others)))
    return _unpack(_nearest(index, hashes, distance))


def _nearest(index: BandIndex, hashes: np.ndarray, distance: int) -> np.ndarray:
    """`BandIndex.nearest` in blocks, to bound the memory."""
    packed = np.full(len(hashes), _NONE)
    for start in range(0, len(hashes), _BLOCK):
        block = slice(start, start + _BLOCK)
        packed[block] = index.nearest(hashes[block], distance)
    return packed


class BandIndex:
    """Index of rows by the bands of their hashes; add rows and look up queries in batches.

    Parameters
    ----------
    hashes
        uint64 (n, 4), of all rows that may be added.
    """

    def __init__(self, hashes: np.ndarray) -> None:
        self._hashes = hashes
        # Log-structured: each level has more than twice the rows of the next. A row is sorted again
        # O(log n) times.
        self._levels: list[_Level] = []

    def add(self, rows: np.ndarray) -> None:
        """Add rows, merging them with the levels that are not large enough."""
        while self._levels and len(self._levels[-1].rows) <= 2 * len(rows):
            rows = np.concatenate([self._levels.pop().rows, rows])
        if len(rows):
            self._levels.append(_Level.of(rows, self._hashes))

    def nearest(self, queries: np.ndarray, distance: int) -> np.ndarray:
        """Nearest row for each of ``queries``, uint64 (n, variants, 4): packed uint64 (n,)."""
        packed = np.full(len(queries), _NONE)
        for variant in range(queries.shape[1]):
            hashes = np.ascontiguousarray(queries[:, variant])
            for level in self._levels:
                for query, row in level.candidates(hashes, distance):
                    bits = _hamming(self._hashes[row], hashes[query])
                    near = bits <= distance
                    np.minimum.at(packed, query[near], _pack(bits[near], row[near]))
        return packed

    def pairs(self, queries: np.ndarray, distance: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Candidate pairs, as numbers of queries and rows; a pair may come several times."""
        for variant in range(queries.shape[1]):
            hashes = np.ascontiguousarray(queries[:, variant])
            for level in self._levels:
                yield from level.candidates(hashes, distance)


@dataclass(frozen=True)
class _Level:
    """Some rows of the index, sorted by each band (a CSR index per band)."""

    rows: np.ndarray
    hashes: np.ndarray  # of all rows of the index, uint64 (n, 4)
    starts: list[np.ndarray]  # per band, (65537,): where the rows of each value begin
    sorted_rows: list[np.ndarray]  # per band, uint32
    words: list[np.ndarray]  # per band: `_prefilter_word` of the sorted rows

    @classmethod
    def of(cls, rows: np.ndarray, hashes: np.ndarray) -> _Level:
        starts, sorted_rows, words = [], [], []
        for band in range(_BANDS):
            values = _band(hashes, band)[rows]
            counts = np.bincount(values, minlength=_VALUES)
            starts.append(np.concatenate([[0], counts.cumsum()]))
            ordered = rows[np.argsort(values, kind="stable")].astype(np.uint32)
            sorted_rows.append(ordered)
            words.append(hashes[ordered, _prefilter_word(band)])
        return cls(rows, hashes, starts, sorted_rows, words)

    def candidates(
        self, queries: np.ndarray, distance: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Batches of candidate pairs: numbers of queries, uint64 (n, 4), and rows.

        All near pairs with a common band are among them, and few others: one or three of the four
        words are compared.
        """
        runs = [self._runs(queries, band) for band in range(_BANDS)]
        crowded = np.sum([counts for _, counts in runs], axis=0) > _CROWDED * len(self.rows)
        if crowded.any():
            numbers = np.flatnonzero(crowded)
            for query, position in _brute_force(queries[numbers], self._by_word, distance):
                yield numbers[query], self.rows[position]
        for band, (starts, counts) in enumerate(runs):
            counts[crowded] = 0
            query_words = queries[:, _prefilter_word(band)]
            for batch in _batches(counts):
                count = counts[batch]
                before = count.cumsum() - count
                # Expand each query's run: position = start of the run + number within the run.
                position = np.repeat(starts[batch] - before, count)
                position += np.arange(len(position))
                differing = np.repeat(query_words[batch], count)
                differing ^= self.words[band][position]
                likely = np.flatnonzero(np.bitwise_count(differing) <= distance)
                if len(likely):
                    query = np.searchsorted(before, likely, "right") - 1 + batch.start
                    yield query, self.sorted_rows[band][position[likely]]

    def _runs(self, queries: np.ndarray, band: int) -> tuple[np.ndarray, np.ndarray]:
        """Start and length of the run of sorted rows that share each query's value of a band."""
        values = _band(queries, band).astype(np.int64)
        start = self.starts[band][values]
        return start, self.starts[band][values + 1] - start

    @functools.cached_property
    def _by_word(self) -> np.ndarray:
        """Hashes of the level's rows, transposed: (4, rows)."""
        return np.ascontiguousarray(self.hashes[self.rows].T)


def _brute_force(
    queries: np.ndarray, words: np.ndarray, distance: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Candidate pairs of all ``queries``, uint64 (n, 4), with all hashes ``words``, (4, m).

    Three of the four words are compared: their sum fits uint8, which 256 bits would overflow, and
    is nearly as selective. The caller compares whole hashes.
    """
    for start in range(0, len(queries), _QUERIES):
        block = np.ascontiguousarray(queries[start : start + _QUERIES].T)[:, :, None]
        for first in range(0, words.shape[1], _ROWS):
            others = words[:, first : first + _ROWS]
            bits = np.bitwise_count(block[0] ^ others[0])
            for word in (1, 2):
                bits += np.bitwise_count(block[word] ^ others[word])
            likely = np.flatnonzero(bits <= distance)
            if len(likely):
                query, row = np.divmod(likely, others.shape[1])
                yield query + start, row + first


def _deduplicate_block(hashes: np.ndarray, rows: np.ndarray, distance: int) -> np.ndarray:
    """Greedy deduplication of ``rows`` alone: for each the nearest kept one, packed uint64."""
    packed = np.full(len(rows), _NONE)
    index = BandIndex(hashes[rows, 0])
    index.add(np.arange(len(rows)))
    # Find the rows that have any near one: usually few, so that the loop over rows below is short.
    has_near = np.zeros(len(rows), bool)
    for query, row in index.pairs(hashes[rows], distance):
        informative = (query != row) & ~(has_near[query] & has_near[row])
        query, row = query[informative], row[informative]
        bits = _hamming(hashes[rows[query]], hashes[rows[row], 0][:, None])
        near = (bits <= distance).any(axis=1)
        has_near[query[near]] = has_near[row[near]] = True
        if has_near.all():
            break
    involved = np.flatnonzero(has_near)
    kept_hashes = np.empty((len(involved), 4), np.uint64)
    kept_rows = np.empty(len(involved), np.int64)
    count = 0
    for number in involved:
        row = rows[number]
        if count:
            bits = _hamming(kept_hashes[:count, None], hashes[row]).min(axis=1)
            closest = int(bits.argmin())
            if bits[closest] <= distance:
                packed[number] = _pack(bits[closest], kept_rows[closest])
                continue
        kept_hashes[count], kept_rows[count] = hashes[row, 0], row
        count += 1
    return packed


def _batches(counts: np.ndarray) -> Iterator[slice]:
    """Slices of consecutive queries with about `_CANDIDATES` candidates each."""
    ends = counts.cumsum()
    start = 0
    while start < len(counts):
        done = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, done + _CANDIDATES, "right")), start + 1)
        yield slice(start, stop)
        start = stop


def _band(hashes: np.ndarray, band: int) -> np.ndarray:
    return hashes.view(np.uint16)[:, band]


def _prefilter_word(band: int) -> int:
    """A word that does not contain the band: candidates with a common band differ there."""
    return (band // 4 + 1) % 4


def _hamming(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Hamming distance of hashes, uint64 (..., 4): int64 (...)."""
    return np.bitwise_count(one ^ other).sum(axis=-1, dtype=np.int64)


def _pack(bits: Any, rows: Any) -> Any:
    return np.asarray(bits).astype(np.uint64) << _ROW_BITS | np.asarray(rows).astype(np.uint64)


def _unpack(packed: np.ndarray) -> Nearest:
    none = packed == _NONE
    rows = np.where(none, -1, (packed & _ROW).astype(np.int64))
    return rows, np.where(none, 0, (packed >> _ROW_BITS).astype(np.int64))
