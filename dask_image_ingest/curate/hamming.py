"""Near-duplicates among millions of 256-bit hashes: which rows are kept, and the nearest of them.

`hash_tables` connects near rows. Rows that are connected, directly or by way of others, are
compared with each other here, in the order of the rows: so a pair that the tables miss is found if
others lead from one to the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dask_image_ingest.curate.hash_tables import (
    MEMORY,
    NONE,
    compare_all,
    hamming,
    near_pairs,
    nearest_matches,
    pack,
    unpack,
)

_SMALL = 32  # rows of a group that is compared at once with others of its size
_PAIRS = 1 << 16  # distances of such groups at once
_MOVED = 1 << 16  # rows that are moved at once
_BLOCK = 256  # rows of a large group that are decided at once

Nearest = tuple[np.ndarray, np.ndarray]  # rows (-1: none) and distances, int64 (n,)


def first_equal(hashes: np.ndarray) -> np.ndarray:
    """Row of the first equal hash for each of ``hashes``, uint64 (n, words); -1 if it is itself."""
    first = np.full(len(hashes), -1, np.int64)
    # Sort by 32 bits of a checksum first, which is three times as fast as to sort by all words.
    checksum = np.zeros(len(hashes), np.uint64)
    for word in range(hashes.shape[1]):
        checksum ^= hashes[:, word]
        checksum *= np.uint64(0x9E37_79B9_7F4A_7C15)
        checksum ^= checksum >> np.uint64(29)
    checksum &= np.uint64(0xFFFF_FFFF_0000_0000)
    checksum |= np.arange(len(hashes), dtype=np.uint64)
    checksum.sort()
    is_equal = np.zeros(len(hashes) + 1, bool)
    high = checksum >> np.uint64(32)
    np.equal(high[1:], high[:-1], out=is_equal[1:-1])
    rows = (checksum[is_equal[1:] | is_equal[:-1]] & np.uint64(0xFFFF_FFFF)).astype(np.int64)
    rows.sort()
    some = hashes[rows]
    order = np.lexsort(some.T)
    ordered = some[order]
    begins = np.ones(len(some), bool)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    # The sort is stable: a run of equal hashes begins with the lowest row.
    start = np.maximum.accumulate(np.where(begins, np.arange(len(some)), 0))
    first[rows[order]] = np.where(begins, -1, rows[order[start]])
    return first


def nearest_kept(
    hashes: np.ndarray,
    distance: int,
    gone: np.ndarray | None = None,
    memory: int = MEMORY,
    *,
    is_exact: np.ndarray | None = None,
    overwrite_hashes: bool = False,
) -> Nearest:
    """Greedy deduplication: keep a row unless a kept row before it is within ``distance``.

    Parameters
    ----------
    hashes
        uint64 (n, variants, 4): the hash of each row, then those of the same image mirrored or
        turned. A later row is near an earlier one if any of its hashes is near the first hash of
        that one.
    distance
        The most bits in which near hashes differ.
    gone
        bool (n,): rows that are not kept in any case. Default: none.
    memory
        Bytes that the search may use, beside the hashes.
    is_exact
        bool (n,): rows that are near equal ones alone. Default: none.
    overwrite_hashes
        Whether ``hashes`` may be used as scratch space, which saves a copy.

    Returns
    -------
    The nearest kept row of each, ties to the lowest (-1: the row itself is kept, or ``gone`` and
    near none), and the bits of difference to it (0).
    """
    gone = np.zeros(len(hashes), bool) if gone is None else gone
    equal = first_equal(hashes.reshape(len(hashes), hashes.shape[1] * hashes.shape[2]))
    again = np.flatnonzero(equal >= 0)
    of = equal[again]
    is_searched = equal < 0
    del equal
    if is_exact is not None:
        is_searched &= ~is_exact
    # Numbers of all rows are made as late as can be: the search needs most of the memory.
    unique = None if is_searched.all() else np.flatnonzero(is_searched)
    some, is_gone = hashes, gone
    if unique is not None:
        some, is_gone = _rows_of(hashes, unique, overwrite_hashes), gone[unique]
    pairs = near_pairs(some, distance, memory)
    best = np.full(len(hashes), NONE)
    # Equal rows are gone together: the first of them stays for any.
    for rows, nearest in _decided(some, pairs, distance, is_gone):
        if unique is None:
            best[rows] = nearest
            continue
        keeper, bits = unpack(nearest)
        best[unique[rows]] = np.where(keeper < 0, NONE, pack(bits, unique[keeper]))
    stays = (best[of] == NONE) & ~gone[of]
    best[again] = np.where(stays, pack(0, of), best[of])
    return unpack(best)


def _rows_of(hashes: np.ndarray, rows: np.ndarray, overwrite: bool) -> np.ndarray:
    """The hashes of ascending rows; moved to the front if they may be overwritten."""
    if not overwrite:
        return hashes[rows]
    for start in range(0, len(rows), _MOVED):
        moved = rows[start : start + _MOVED]
        hashes[start : start + len(moved)] = hashes[moved]
    return hashes[: len(rows)]


def nearest(hashes: np.ndarray, others: np.ndarray, distance: int, memory: int = MEMORY) -> Nearest:
    """Nearest of ``others``, uint64 (m, 4), within ``distance`` of each of ``hashes``.

    Shapes and sentinels are those of `nearest_kept`.
    """
    best = np.full(len(hashes), NONE)
    for variant in range(hashes.shape[1]):
        of_variant = np.ascontiguousarray(hashes[:, variant])
        equal = first_equal(of_variant)
        unique = np.flatnonzero(equal < 0)
        found = np.full(len(hashes), NONE)
        found[unique] = nearest_matches(of_variant[unique], others, distance, memory)
        best = np.minimum(best, np.where(equal < 0, found, found[equal]))
    return unpack(best)


def _decided(
    hashes: np.ndarray, pairs: np.ndarray, distance: int, gone: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows of each tree of ``pairs``, and the nearest kept one for each, packed uint64."""
    rows = np.unique(pairs)
    root = rows.copy()
    root[np.searchsorted(rows, pairs[:, 1])] = pairs[:, 0]
    rows = rows[np.argsort(root, kind="stable")]
    _, sizes = np.unique(root, return_counts=True)
    starts = sizes.cumsum() - sizes
    for size in np.unique(sizes):
        of_size = starts[sizes == size]
        if size > _SMALL:
            for start in of_size:
                tree = rows[start : start + size]
                nearest = _greedy(hashes[tree], distance, gone[tree])
                keeper, bits = unpack(nearest)
                yield tree, np.where(keeper < 0, NONE, pack(bits, tree[keeper]))
            continue
        step = max(1, _PAIRS // int(size) ** 2)
        for first in range(0, len(of_size), step):
            trees = rows[of_size[first : first + step, None] + np.arange(size)]
            nearest = _greedy_at_once(hashes[trees], trees, distance, gone[trees])
            yield trees.ravel(), nearest.ravel()


def _greedy_at_once(
    hashes: np.ndarray, rows: np.ndarray, distance: int, gone: np.ndarray
) -> np.ndarray:
    """Greedy deduplication in groups of one size: uint64 (groups, size, variants, 4) → packed."""
    apart = _distances(hashes, hashes)
    kept = ~gone
    for row in range(1, rows.shape[1]):
        kept[:, row] &= ~((apart[:, row, :row] <= distance) & kept[:, :row]).any(axis=1)
    near = (apart <= distance) & kept[:, None]
    best = np.where(near, pack(apart, rows[:, None]), NONE).min(axis=2)
    return np.where(kept, NONE, best)


def _greedy(hashes: np.ndarray, distance: int, gone: np.ndarray) -> np.ndarray:
    """Greedy deduplication of rows that are all compared: packed uint64 (n,)."""
    count, kept = 0, np.empty(len(hashes), np.int64)
    words = np.empty((4, len(hashes)), np.uint64)
    is_kept = np.zeros(len(hashes), bool)
    for start in range(0, len(hashes), _BLOCK):
        block = np.flatnonzero(~gone[start : start + _BLOCK]) + start
        block = block[_nearest(hashes[block], words[:, :count], distance) == NONE]
        apart = _distances(hashes[None, block], hashes[None, block])[0]
        stays = np.zeros(len(block), bool)
        for number, near in enumerate(apart <= distance):
            stays[number] = not (near[:number] & stays[:number]).any()
        block = block[stays]
        kept[count : count + len(block)] = block
        words[:, count : count + len(block)] = hashes[block, 0].T
        count += len(block)
        is_kept[block] = True
    # Rows went for any row kept before them. Look for the nearest, which may have come later.
    best = np.full(len(hashes), NONE)
    nearest, bits = unpack(_nearest(hashes[~is_kept], words[:, :count], distance))
    best[~is_kept] = np.where(nearest < 0, NONE, pack(bits, kept[nearest]))
    return best


def _nearest(hashes: np.ndarray, words: np.ndarray, distance: int) -> np.ndarray:
    """The nearest of ``words``, uint64 (4, m), to any hash of a row: packed uint64 (n,)."""
    variants = [compare_all(hashes[:, v], words, distance) for v in range(hashes.shape[1])]
    return np.minimum.reduce(variants)


def _distances(hashes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Of any hash of a row to the first one of another: (groups, rows, others)."""
    first = others[:, None, :, 0]
    variants = [hamming(hashes[:, :, None, v], first) for v in range(hashes.shape[2])]
    return np.minimum.reduce(variants)
