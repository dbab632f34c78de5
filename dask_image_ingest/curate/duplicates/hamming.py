"""Near hashes among many millions: found by bands, so that few of all pairs are compared.

A hash of 256 bits is cut into 16 bands of 16 bits. Two hashes that differ in at most 15 bits have a
band in common; of random pairs that differ in 24 bits 99.1 % have, in 31 bits 91.3 %. Hashes with a
common band are compared: of random pairs one in 4,096. Where hashes crowd around one value, as of
pages that look alike, so many pairs have a common band that all of these hashes are compared, block
by block.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

_BANDS = 16
_VALUES = 1 << 16

# Hashes that are looked up together, and candidates for them that fit a core's cache.
_BLOCK = 4096
_CANDIDATES = 1 << 18

# A hash that shares bands with so large a part of the others is compared with all, block by block:
# a pair costs 2 ns there, and 8 to 110 ns where it is looked up.
_CROWDED = 1 / 16
_QUERIES, _ROWS = 32, 4096

# Distance and row as one number, of which the least is the nearest, then the first.
_NONE = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_ROW_BITS = np.uint64(40)
_ROW = np.uint64((1 << 40) - 1)

Nearest = tuple[np.ndarray, np.ndarray]


def equal_to_first(hashes: np.ndarray) -> np.ndarray:
    """The first row with the same hash; -1 for that row itself.

    Parameters
    ----------
    hashes
        uint64 (n, words).
    """
    order = np.lexsort(hashes.T)
    ordered = hashes[order]
    begins = np.ones(len(hashes), bool)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    # The sort is stable: a run of equal hashes begins with the first of them.
    first = np.empty(len(hashes), np.int64)
    first[order] = order[np.maximum.accumulate(np.where(begins, np.arange(len(hashes)), 0))]
    return np.where(first == np.arange(len(hashes)), -1, first)


def near_to_first(hashes: np.ndarray, distance: int) -> Nearest:
    """Rows that stay if each takes away the near ones after it, and the rows others are near to.

    Rows are taken in their order, and stay unless one that stays is near: so no row goes for the
    sake of one that goes itself.

    Parameters
    ----------
    hashes
        uint64 (n, variants, 4): the hash of each row first, then those of the same image mirrored
        or turned. Row b is near to row a, of those before it, if any hash of b is near to the first
        one of a.
    distance
        The most bits that near hashes differ in.

    Returns
    -------
    of : array, shape (n,), int64
        The nearest row that stays, of equally near ones the first; -1 where a row stays.
    distance : array, shape (n,), int64
        Bits of difference to it; 0 where a row stays.
    """
    found = np.full(len(hashes), _NONE)
    index = BandIndex(hashes[:, 0])
    for start in range(0, len(hashes), _BLOCK):
        block = np.arange(start, min(start + _BLOCK, len(hashes)))
        found[block] = index.nearest(hashes[block], distance)
        left = block[found[block] == _NONE]
        found[left] = _among(hashes, left, distance)
        index.add(left[found[left] == _NONE])
    # Of those that stay, one that was not known yet may be nearer.
    gone = np.flatnonzero(found != _NONE)
    found[gone] = np.minimum(found[gone], _in_blocks(index, hashes[gone], distance))
    return _parts(found)


def nearest(hashes: np.ndarray, others: np.ndarray, distance: int) -> Nearest:
    """The nearest of ``others``, uint64 (m, 4), for each of ``hashes``; as `near_to_first`."""
    index = BandIndex(others)
    index.add(np.arange(len(others)))
    return _parts(_in_blocks(index, hashes, distance))


def _in_blocks(index: BandIndex, hashes: np.ndarray, distance: int) -> np.ndarray:
    found = np.full(len(hashes), _NONE)
    for start in range(0, len(hashes), _BLOCK):
        block = slice(start, start + _BLOCK)
        found[block] = index.nearest(hashes[block], distance)
    return found


class BandIndex:
    """Rows by the bands of their hashes; rows are added, and asked for, many at a time."""

    def __init__(self, hashes: np.ndarray) -> None:
        self._hashes = hashes
        # Each more than twice as large as the next: a row is sorted anew only as they double.
        self._levels: list[_Level] = []

    def add(self, rows: np.ndarray) -> None:
        """Add rows."""
        while self._levels and len(self._levels[-1].rows) <= 2 * len(rows):
            rows = np.concatenate([self._levels.pop().rows, rows])
        if len(rows):
            self._levels.append(_Level.of(rows, self._hashes))

    def nearest(self, queries: np.ndarray, distance: int) -> np.ndarray:
        """Distance and row of the nearest, uint64 (n,), for ``queries`` (n, variants, 4)."""
        found = np.full(len(queries), _NONE)
        for variant in range(queries.shape[1]):
            asked = np.ascontiguousarray(queries[:, variant])
            for level in self._levels:
                for query, row in level.candidates(asked, distance):
                    bits = _bits(self._hashes[row], asked[query])
                    near = bits <= distance
                    np.minimum.at(found, query[near], _pack(bits[near], row[near]))
        return found

    def pairs(self, queries: np.ndarray, distance: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Numbers of queries, and rows that may be near to them, some of them several times."""
        for variant in range(queries.shape[1]):
            asked = np.ascontiguousarray(queries[:, variant])
            for level in self._levels:
                yield from level.candidates(asked, distance)


@dataclass(frozen=True)
class _Level:
    """Some rows, sorted by each band."""

    rows: np.ndarray
    hashes: np.ndarray  # of all rows
    starts: list[np.ndarray]  # of each band: where rows of a value begin
    sorted_rows: list[np.ndarray]
    words: list[np.ndarray]  # a word of these rows' hashes, which does not have the band

    @classmethod
    def of(cls, rows: np.ndarray, hashes: np.ndarray) -> _Level:
        starts, sorted_rows, words = [], [], []
        for band in range(_BANDS):
            values = _band(hashes, band)[rows]
            counts = np.bincount(values, minlength=_VALUES)
            starts.append(np.concatenate([[0], counts.cumsum()]))
            ordered = rows[np.argsort(values, kind="stable")].astype(np.uint32)
            sorted_rows.append(ordered)
            words.append(hashes[ordered, _other_word(band)])
        return cls(rows, hashes, starts, sorted_rows, words)

    def candidates(
        self, queries: np.ndarray, distance: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Numbers of queries, uint64 (n, 4), and rows with a common band that may be near."""
        places = [self._places(queries, band) for band in range(_BANDS)]
        crowded = np.sum([counts for _, counts in places], axis=0) > _CROWDED * len(self.rows)
        if crowded.any():
            numbers = np.flatnonzero(crowded)
            for query, place in _compared(queries[numbers], self._by_word, distance):
                yield numbers[query], self.rows[place]
        for band, (first, counts) in enumerate(places):
            counts[crowded] = 0
            asked = queries[:, _other_word(band)]
            for part in _parts_of(counts):
                count = counts[part]
                before = count.cumsum() - count
                place = np.repeat(first[part] - before, count)
                place += np.arange(len(place))
                differ = np.repeat(asked[part], count)
                differ ^= self.words[band][place]
                # Of random hashes one word tells nearly all apart.
                likely = np.flatnonzero(np.bitwise_count(differ) <= distance)
                if len(likely):
                    query = np.searchsorted(before, likely, "right") - 1 + part.start
                    yield query, self.sorted_rows[band][place[likely]]

    def _places(self, queries: np.ndarray, band: int) -> tuple[np.ndarray, np.ndarray]:
        """Start and number of the rows that have each query's value of a band."""
        values = _band(queries, band).astype(np.int64)
        first = self.starts[band][values]
        return first, self.starts[band][values + 1] - first

    @functools.cached_property
    def _by_word(self) -> np.ndarray:
        """The rows' hashes, (4, n)."""
        return np.ascontiguousarray(self.hashes[self.rows].T)


def _compared(
    queries: np.ndarray, words: np.ndarray, distance: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Numbers of queries, uint64 (n, 4), and of hashes (4, m) that may be near."""
    for start in range(0, len(queries), _QUERIES):
        asked = np.ascontiguousarray(queries[start : start + _QUERIES].T)[:, :, None]
        for first in range(0, words.shape[1], _ROWS):
            others = words[:, first : first + _ROWS]
            bits = np.bitwise_count(asked[0] ^ others[0])
            for word in (1, 2):
                bits += np.bitwise_count(asked[word] ^ others[word])
            likely = np.flatnonzero(bits <= distance)
            if len(likely):
                query, row = np.divmod(likely, others.shape[1])
                yield query + start, row + first


def _among(hashes: np.ndarray, rows: np.ndarray, distance: int) -> np.ndarray:
    """`near_to_first` of a block's rows, as one number each."""
    found = np.full(len(rows), _NONE)
    index = BandIndex(hashes[rows, 0])
    index.add(np.arange(len(rows)))
    has_near = np.zeros(len(rows), bool)
    for query, row in index.pairs(hashes[rows], distance):
        # Where both are known to have some, no other pair of theirs has to be looked at.
        new = (query != row) & ~(has_near[query] & has_near[row])
        query, row = query[new], row[new]
        near = (_bits(hashes[rows[query]], hashes[rows[row], 0][:, None]) <= distance).any(axis=1)
        has_near[query[near]] = has_near[row[near]] = True
        if has_near.all():
            break
    involved = np.flatnonzero(has_near)
    stay = np.empty((len(involved), 4), np.uint64)
    stay_rows = np.empty(len(involved), np.int64)
    count = 0
    for number in involved:
        row = rows[number]
        if count:
            bits = _bits(stay[:count, None], hashes[row]).min(axis=1)
            first = int(bits.argmin())
            if bits[first] <= distance:
                found[number] = _pack(bits[first], stay_rows[first])
                continue
        stay[count], stay_rows[count] = hashes[row, 0], row
        count += 1
    return found


def _parts_of(counts: np.ndarray) -> Iterator[slice]:
    """Queries in turn, with about as many candidates as are compared at once."""
    ends = counts.cumsum()
    start = 0
    while start < len(counts):
        done = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, done + _CANDIDATES, "right")), start + 1)
        yield slice(start, stop)
        start = stop


def _band(hashes: np.ndarray, band: int) -> np.ndarray:
    return hashes.view(np.uint16)[:, band]


def _other_word(band: int) -> int:
    return (band // 4 + 1) % 4


def _bits(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """In how many bits hashes (..., 4) differ."""
    return np.bitwise_count(one ^ other).sum(axis=-1, dtype=np.int64)


def _pack(bits: Any, rows: Any) -> Any:
    return np.asarray(bits).astype(np.uint64) << _ROW_BITS | np.asarray(rows).astype(np.uint64)


def _parts(found: np.ndarray) -> Nearest:
    none = found == _NONE
    rows = np.where(none, -1, (found & _ROW).astype(np.int64))
    return rows, np.where(none, 0, (found >> _ROW_BITS).astype(np.int64))
