"""Near pairs among millions of 256-bit hashes, by tables over sampled bits.

Hashes in one group of a table, which have some bits in common, are compared in full; `table_plan`
says how many tables and bits that takes.

Groups too large for that, of hashes that are alike, are not compared there. Their rows are searched
again by tables of their own, over more bits, or compared with all of them.

Tables connect near rows. `nearest_kept` compares all rows that are connected, directly or by way of
others, in their order: so a pair that the tables miss is found if others lead from one to the
other.

Pairs that are less near are `SecondLook`'s to judge. The same tables find them, twice as many of
them; of such pairs there is a list, of few earlier rows for each row.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from dask import delayed

from dask_image_ingest.computing import SEARCHED, compute, count, on_workers
from dask_image_ingest.curate.table_plan import (
    HASH_WORDS,
    MAX_BITS,
    TablePlan,
    plan_matches,
    plan_pairs,
)

#: The most memory of the tables, by default.
MEMORY = 4 << 30

_OFTEN = 16  # rows in too large a group in one of so many tables are searched once more

# Rows of which keys are computed, and pairs that are compared, at once: they fit a core's cache.
_BLOCK = 1 << 15

_EDGES = 1 << 22  # pairs found by a task before they are reduced to a forest
_MERGED = 8  # tasks whose results are reduced together: each may have a pair for every row
_BYTES = 28  # of a task, per row
_QUERIES, _FIRST = 16, 32  # queries of `compare_all` at once; hashes they are compared with first

_LOW = np.uint64(0xFFFF_FFFF)
_HIGH = np.uint64(0xFFFF_FFFF_0000_0000)
_32 = np.uint64(32)

# Packed: distance in the high 24 bits, row in the low 40; min = nearest, ties to the lowest row.
NONE = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_ROW_BITS = np.uint64(40)
_ROW_MASK = np.uint64((1 << 40) - 1)

_SMALL = 32  # rows of a group that is deduplicated at once with others of its size
_DISTANCES = 1 << 16  # distances of such groups at once
_MOVED = 1 << 16  # rows that are moved at once
_DECIDED = 256  # rows of a large group that are decided at once

# Rows before a row that a second look compares it with, at most: the first ones.
_LOOKS = 16


@dataclass(frozen=True)
class SecondLook:
    """A rule for rows that are farther apart than near ones, but not by much."""

    distance: int  # bits: pairs within it are looked at
    #: Rows, rows they may be like, and the variant of the first ones that is: bool (pairs,)
    are_same: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]

    def of_rows(self, rows: np.ndarray, others: np.ndarray) -> SecondLook:
        """The second look at some of the rows, and of those they may be like, by their numbers."""
        return replace(
            self, are_same=lambda one, other, v: self.are_same(rows[one], others[other], v)
        )


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
    checksum &= _HIGH
    checksum |= np.arange(len(hashes), dtype=np.uint64)
    checksum.sort()
    is_equal = np.zeros(len(hashes) + 1, bool)
    high = checksum >> _32
    np.equal(high[1:], high[:-1], out=is_equal[1:-1])
    rows = (checksum[is_equal[1:] | is_equal[:-1]] & _LOW).astype(np.int64)
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
    look: SecondLook | None = None,
) -> Nearest:
    """Greedy deduplication: keep a row unless a kept row before it is near.

    Rows within ``distance`` are near, and those that a second look finds the same.

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
    look
        The second look; default: none. It compares a row with the first 16 rows before it that are
        within its distance.

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
    pairs, far = near_pairs(some, distance, memory, look.distance if look else 0)
    looked = np.empty((0, 2), np.int64)
    if look is not None:
        looked = _looked(some, far[~is_gone[far].any(axis=1)], distance, unique, look)
        pairs = forest(np.concatenate([pairs, looked]))
    best = np.full(len(hashes), NONE)
    # Equal rows are gone together: the first of them stays for any.
    for rows, nearest in _decided(some, pairs, distance, is_gone, looked):
        if unique is None:
            best[rows] = nearest
        else:
            best[unique[rows]] = _at_rows(nearest, unique)
    stays = (best[of] == NONE) & ~gone[of]
    best[again] = np.where(stays, pack(0, of), best[of])
    return unpack(best)


def _looked(
    hashes: np.ndarray, far: np.ndarray, distance: int, rows: np.ndarray | None, look: SecondLook
) -> np.ndarray:
    """The pairs of ``far``, (n, 2), that are the same; ``rows`` are the numbers of the hashes."""
    apart = hamming(hashes[far[:, 1]], hashes[far[:, 0], :1])
    variant = apart.argmin(axis=1)
    is_far = apart.min(axis=1) > distance
    far, variant = far[is_far], variant[is_far]
    if rows is not None:
        look = look.of_rows(rows, rows)
    return far[look.are_same(far[:, 1], far[:, 0], variant)]


def _rows_of(hashes: np.ndarray, rows: np.ndarray, overwrite: bool) -> np.ndarray:
    """The hashes of ascending rows; moved to the front if they may be overwritten."""
    if not overwrite:
        return hashes[rows]
    for start in range(0, len(rows), _MOVED):
        moved = rows[start : start + _MOVED]
        hashes[start : start + len(moved)] = hashes[moved]
    return hashes[: len(rows)]


def nearest(
    hashes: np.ndarray,
    others: np.ndarray,
    distance: int,
    memory: int = MEMORY,
    look: SecondLook | None = None,
) -> Nearest:
    """Nearest of ``others``, uint64 (m, 4), that is near each of ``hashes``.

    Shapes and sentinels are those of `nearest_kept`.
    """
    wide = look.distance if look else 0
    equal = np.stack([first_equal(hashes[:, v]) for v in range(hashes.shape[1])])
    found, likely = np.full(equal.shape, NONE), []
    for variant, of_variant in enumerate(found):
        unique = np.flatnonzero(equal[variant] < 0)
        queries = np.ascontiguousarray(hashes[unique, variant])
        of_variant[unique], far = nearest_matches(queries, others, distance, memory, wide)
        far = far[of_variant[unique[far[:, 1]]] == NONE]
        likely.append([far[:, 0], unique[far[:, 1]], np.full(len(far), variant)])
    if look is not None:
        # All variants at once: stored thumbnails are read once.
        pairs = np.concatenate(likely, axis=1)
        other, query, variant = pairs[:, look.are_same(pairs[1], pairs[0], pairs[2])]
        bits = hamming(hashes[query, variant], others[other])
        np.minimum.at(found, (variant, query), pack(bits, other))
    return unpack(np.where(equal < 0, found, np.take_along_axis(found, equal, axis=1)).min(axis=0))


def pack(bits: int | np.ndarray, rows: np.ndarray) -> Any:
    """Distances and rows in one number, whose minimum is the nearest row."""
    return np.asarray(bits).astype(np.uint64) << _ROW_BITS | np.asarray(rows).astype(np.uint64)


def unpack(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows (-1: none) and distances, int64."""
    none = packed == NONE
    rows = np.where(none, -1, (packed & _ROW_MASK).astype(np.int64))
    return rows, np.where(none, 0, (packed >> _ROW_BITS).astype(np.int64))


def hamming(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Hamming distance of hashes, uint64 (..., 4): int64 (...)."""
    return np.bitwise_count(one ^ other).sum(axis=-1, dtype=np.int64)


def near_pairs(
    hashes: np.ndarray, distance: int, memory: int = MEMORY, wide: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of rows (pairs, 2), the lower row first, by which each near pair is connected.

    Then pairs that are farther apart, but within ``wide``: `_first_few` of each row.

    ``hashes`` is uint64 (n, variants, 4), as of `nearest_kept`; no two rows are equal.
    ``memory`` is that of the tables of all tasks that run at once. Rows that are too many to
    compare here are connected without: whoever asks compares all rows that are connected.
    """
    rows, found, far = None, [], [np.empty((0, 2), np.int64)]  # rows: all
    for level in range(MAX_BITS):
        entries, variants = hashes.reshape(-1, HASH_WORDS), hashes.shape[1]
        plan = plan_pairs(entries, distance, level)
        if not plan.bits:
            found.append(_star(np.arange(len(hashes)) if rows is None else rows))
            if wide > distance:
                words = np.ascontiguousarray(hashes[:, 0].T)
                pairs = _far_of_all(entries, words, distance, wide) // [1, variants]
                pairs = pairs[pairs[:, 0] < pairs[:, 1]]
                far.append(pairs if rows is None else rows[pairs])
            break
        if wide > distance:
            plan = replace(plan, tables=2 * plan.tables)
        units = _units(plan, len(entries), memory)
        of_pairs = entries, distance, variants, wide
        results = _run(_pairs_of_table, _merge_pairs, plan, units, *of_pairs)
        found += [pairs if rows is None else rows[pairs] for pairs, *_ in results]
        far += [pairs if rows is None else rows[pairs] for *_, pairs in results]
        crowded = _often([numbers for _, numbers, _ in results], plan)
        if not len(crowded):
            break
        rows = crowded if rows is None else rows[crowded]
        if len(crowded) > len(hashes) // 2:  # of one kind: more bits would not part them
            found.append(_star(rows))
            break
        hashes = hashes[crowded]
    pairs = forest(np.concatenate(found)) if found else np.empty((0, 2), np.int64)
    return pairs, _first_few(np.concatenate(far))


def _first_few(far: np.ndarray) -> np.ndarray:
    """Pairs (n, 2) of a row and a later one, without repetitions: the first of each later row."""
    keys = np.unique(far[:, 1] << 32 | far[:, 0])
    far = np.stack([keys & 0xFFFF_FFFF, keys >> 32], axis=1)
    is_few = np.ones(len(far), bool)
    is_few[_LOOKS:] = far[_LOOKS:, 1] != far[:-_LOOKS, 1]
    return far[is_few]


def _far_of_all(queries: np.ndarray, words: np.ndarray, distance: int, wide: int) -> np.ndarray:
    """Pairs that are within ``wide`` only: a column of ``words``, uint64 (4, m), and a query."""
    compare, found = _Compare(wide), [np.empty((0, 2), np.int64)]
    for start in range(0, len(queries), _QUERIES):
        block = queries[start : start + _QUERIES]
        for first in range(0, words.shape[1], _BLOCK // _QUERIES):
            others = words[:, None, first : first + _BLOCK // _QUERIES]
            query, row = np.divmod(compare.likely(block.T[:, :, None], others), others.shape[2])
            bits = hamming(block[query], words[:, first + row].T)
            is_far = (bits > distance) & (bits <= wide)
            found.append(np.stack([first + row[is_far], start + query[is_far]], axis=1))
    return np.concatenate(found)


def _star(rows: np.ndarray) -> np.ndarray:
    """Pairs that connect all rows with the first."""
    return np.stack([np.full(len(rows), rows[:1].sum()), rows], axis=1)[1:]


def nearest_matches(
    queries: np.ndarray, others: np.ndarray, distance: int, memory: int = MEMORY, wide: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The nearest of ``others`` for each of ``queries``, both uint64 (n, 4): packed uint64 (n,).

    Then pairs of a row of ``others`` and one of ``queries`` beyond ``distance`` and within
    ``wide``: `_first_few` of each query. The larger side is read once for each table, and tested
    for the groups of the smaller one.
    """
    best = np.full(len(queries), NONE)
    numbers, rows = np.arange(len(queries)), np.arange(len(others))
    far, is_final = [np.empty((0, 2), np.int64)], False
    for level in range(MAX_BITS):
        if not len(numbers) or not len(rows):
            break
        one, other = (queries, others) if not level else (queries[numbers], others[rows])
        plan = plan_matches(one, other, distance, level)
        if is_final or not plan.bits:
            words = np.ascontiguousarray(other.T)
            found = _at_rows(compare_all(one, words, distance), rows)
            best[numbers] = np.minimum(best[numbers], found)
            if wide > distance:
                pairs = _far_of_all(one, words, distance, wide)
                far.append(np.stack([rows[pairs[:, 0]], numbers[pairs[:, 1]]], axis=1))
            break
        if wide > distance:
            plan = replace(plan, tables=2 * plan.tables)
        units = _units(plan, plan.rows_of_matches(len(one), len(other)), memory)
        results = _run(_matches_of_table, _merge_matches, plan, units, one, other, distance, wide)
        for *_, pairs in results:
            far.append(np.stack([rows[pairs[:, 0]], numbers[pairs[:, 1]]], axis=1))
        for query, packed, *_ in results:
            found = numbers[query]
            best[found] = np.minimum(best[found], _at_rows(packed, rows))
        crowded = [_often([result[side] for result in results], plan) for side in (2, 3)]
        is_final = len(crowded[0]) * len(crowded[1]) > len(numbers) * len(rows) // 4
        numbers, rows = numbers[crowded[0]], rows[crowded[1]]
    return best, _first_few(np.concatenate(far))


def _often(crowds: list[np.ndarray], plan: TablePlan) -> np.ndarray:
    """Rows that were in too large a group in several of the tables: few are not missed."""
    rows, counts = np.unique(np.concatenate(crowds), return_counts=True)
    return rows[counts * _OFTEN > plan.tables]


def _units(plan: TablePlan, rows: int, memory: int) -> list[tuple[int, int, int]]:
    """The work of each task: a table, and which part of how many of its keys."""
    parts = max(1, math.ceil(_BYTES * rows * (os.cpu_count() or 1) / memory))
    return [(table, part, parts) for table in range(plan.tables) for part in range(parts)]


def _at_rows(packed: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Packed numbers of ``rows`` → packed rows."""
    number, bits = unpack(packed)
    return np.where(number < 0, NONE, pack(bits, rows[number]))


def _run(
    task: Callable[..., Any],
    merge: Callable[..., Any],
    plan: TablePlan,
    units: Sequence[Any],
    *arguments: Any,
) -> list[Any]:
    """Results of a task for each unit of work; `_MERGED` are merged at once."""
    arguments = tuple(on_workers(a) if isinstance(a, np.ndarray) else a for a in arguments)
    tasks = [
        delayed(_counted, pure=False)(number, len(units), task, plan, unit, *arguments)
        for number, unit in enumerate(units)
    ]
    starts = range(0, len(tasks), _MERGED)
    return list(compute(*(delayed(merge)(tasks[start : start + _MERGED]) for start in starts)))


def _counted(
    number: int,
    of: int,
    task: Callable[..., Any],
    plan: TablePlan,
    unit: Any,
    hashes: np.ndarray,
    *arguments: Any,
) -> Any:
    result = task(plan, unit, hashes, *arguments)
    # Of each task a share, so that all together count each row once.
    count(SEARCHED, len(hashes) * (number + 1) // of - len(hashes) * number // of)
    return result


def _pairs_of_table(
    plan: TablePlan,
    part: tuple[int, int, int],
    hashes: np.ndarray,
    distance: int,
    variants: int,
    wide: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Near pairs (pairs, 2) in the groups of a table, and the rows in groups that are too large.

    Then the pairs that are within ``wide`` only.

    ``hashes``, uint64 (n * variants, 4), has all of a row one after the other.
    """
    entries = _sorted_entries(plan, *part, hashes)
    starts, sizes = _groups(entries)
    is_crowd = sizes > min(plan.crowd, 2 * _BLOCK)
    crowded = [
        (entries[start : start + size] & _LOW).astype(np.int64) // variants
        for start, size in zip(starts[is_crowd], sizes[is_crowd], strict=True)
    ]
    found, far, count = [np.empty((0, 2), np.int64)], [np.empty((0, 2), np.int64)], 0
    starts, sizes = starts[~is_crowd], sizes[~is_crowd]
    # Groups of about one size are compared at once, the smaller ones with their last row repeated.
    _, exponent = np.frexp(sizes)
    unit = np.maximum(1, 1 << np.maximum(exponent - 4, 0))
    rounded = -(-sizes // unit) * unit
    compare = _Compare(max(distance, wide), part[0] % HASH_WORDS)
    for size in np.unique(rounded):
        of_size = np.flatnonzero(rounded == size)
        step = max(1, _BLOCK // int(size))
        for first in range(0, len(of_size), step):
            groups = of_size[first : first + step]
            # (size, groups): a row's hash beside those of other groups, so that loops are long.
            positions = np.minimum(np.arange(size)[:, None], sizes[groups] - 1) + starts[groups]
            rows = (entries[positions] & _LOW).astype(np.int64)
            words = np.ascontiguousarray(hashes.take(rows.ravel(), axis=0).T)
            for one, other, group, bits in compare.near(words.reshape(HASH_WORDS, *rows.shape)):
                own = other < sizes[groups][group]
                one, other, group, is_far = one[own], other[own], group[own], bits[own] > distance
                pairs = np.stack([rows[one, group], rows[other, group]], axis=1)
                if variants > 1:
                    # In the order of entries: the first hash of an earlier row, any of a later one.
                    one, other = pairs.T // variants
                    chosen = (pairs[:, 0] % variants == 0) & (one < other)
                    pairs, is_far = pairs[chosen] // variants, is_far[chosen]
                found.append(pairs[~is_far])
                far.append(pairs[is_far])
                count += len(pairs)
            if count > _EDGES:
                found, far = [forest(np.concatenate(found))], [_first_few(np.concatenate(far))]
                count = len(found[0])
    crowd = np.unique(np.concatenate([np.empty(0, int), *crowded]))
    return forest(np.concatenate(found)), crowd, _first_few(np.concatenate(far))


def _merge_pairs(
    results: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    pairs, crowded, far = (np.concatenate(parts) for parts in zip(*results, strict=True))
    return forest(pairs), crowded, _first_few(far)


def _matches_of_table(
    plan: TablePlan,
    unit: tuple[int, int, int],
    queries: np.ndarray,
    others: np.ndarray,
    distance: int,
    wide: int,
) -> tuple[np.ndarray, ...]:
    """Queries with their nearest in the groups of a table, packed; then those that crowd.

    Last, the pairs of a row of ``others`` and a query that are within ``wide`` only.
    """
    if len(queries) > len(others):
        of_others = _sorted_entries(plan, *unit, others)
        of_queries = _sorted_entries(plan, *unit, queries, of_others)
    else:
        of_queries = _sorted_entries(plan, *unit, queries)
        of_others = _sorted_entries(plan, *unit, others, of_queries)
    most, word = max(distance, wide), (unit[0] + 1) % HASH_WORDS
    keys = of_others & _HIGH
    start = np.searchsorted(keys, of_queries & _HIGH)
    counts = np.searchsorted(keys, of_queries & _HIGH, "right") - start
    query = (of_queries & _LOW).astype(np.int64)
    is_crowd = counts > plan.crowd
    runs = np.unique(np.stack([start[is_crowd], counts[is_crowd]], axis=1), axis=0)
    crowd = [(of_others[first : first + size] & _LOW).astype(np.int64) for first, size in runs]
    counts[is_crowd] = 0
    found = [np.empty((3, 0), np.int64)]
    for batch in _batches(counts):
        number = counts[batch]
        before = number.cumsum() - number
        position = np.repeat(start[batch] - before, number)
        position += np.arange(len(position))
        one = np.repeat(query[batch], number)
        other = (of_others[position] & _LOW).astype(np.int64)
        differing = queries[one, word] ^ others[other, word]
        likely = np.flatnonzero(np.bitwise_count(differing) <= most)
        one, other = one[likely], other[likely]
        bits = hamming(queries[one], others[other])
        found.append(np.stack([one, other, bits])[:, bits <= most])
    one, other, bits = np.concatenate(found, axis=1)
    near = bits <= distance
    nearest = _nearest_of_each(one[near], pack(bits[near], other[near]))
    far = _first_few(np.stack([other, one], axis=1)[~near])
    return (*nearest, query[is_crowd], np.concatenate([np.empty(0, np.int64), *crowd]), far)


def _merge_matches(results: list[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    query, packed, *crowds, far = (np.concatenate(parts) for parts in zip(*results, strict=True))
    return (*_nearest_of_each(query, packed), *crowds, _first_few(far))


def _nearest_of_each(query: np.ndarray, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Queries, without repetitions, and the nearest of the ``packed`` rows of each."""
    order = np.lexsort((packed, query))
    query = query[order]
    is_first = np.ones(len(query), bool)
    np.not_equal(query[1:], query[:-1], out=is_first[1:])
    return query[is_first], packed[order[is_first]]


def _sorted_entries(
    plan: TablePlan,
    table: int,
    part: int,
    parts: int,
    hashes: np.ndarray,
    among: np.ndarray | None = None,
) -> np.ndarray:
    """Key of the sampled bits in the high 32 bits and row in the low, sorted: uint64 (n,).

    Only a part of the keys if there are several ``parts``, and without most of those that are none
    of the entries ``among``. ``hashes`` is uint64 (n, 4).
    """
    word, mask, factor = plan.key(table)
    if among is not None:
        # So few bits of a key that the flags of all fit in a core's cache.
        bits = min(max(len(among).bit_length() + 4, 12), 20)
        shift = np.uint64(64 - bits)
        is_known = np.zeros(1 << bits, bool)
        is_known[(among >> shift).view(np.int64)] = True
    kept = [np.empty(0, np.uint64)]
    for start in range(0, len(hashes), _BLOCK):
        keys = hashes[start : start + _BLOCK, word] & mask
        keys *= factor
        if among is None:
            rows = np.arange(start, start + len(keys), dtype=np.uint64)
        else:
            places = np.flatnonzero(is_known[(keys >> shift).view(np.int64)])
            keys, rows = keys[places], (places + start).view(np.uint64)
        keys &= _HIGH
        keys |= rows
        kept.append(keys if parts == 1 else keys[(keys >> _32) * np.uint64(parts) >> _32 == part])
    entries = np.concatenate(kept)
    entries.sort()
    return entries


def _groups(entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and size of the runs of equal keys, of two and more entries."""
    begins = np.ones(len(entries) + 1, bool)
    np.not_equal(entries[1:] >> _32, entries[:-1] >> _32, out=begins[1:-1])
    starts = np.flatnonzero(begins)
    sizes = np.diff(starts)
    several = sizes > 1
    return starts[:-1][several], sizes[several]


class _Compare:
    """Compare blocks of hashes with each other; its buffers serve all blocks of a task."""

    def __init__(self, distance: int | np.ndarray, word: int = 3) -> None:
        """Of ``word`` some bits may be known to be equal, so that it is compared last.

        A distance for each pair is uint8, of a shape that broadcasts to that of the block.
        """
        self.distance = distance
        self._words = [(word + 1 + number) % HASH_WORDS for number in range(HASH_WORDS)]
        # The largest groups are of two blocks.
        self._xor = np.empty(2 * _BLOCK, np.uint64)
        self._bits, self._more = np.empty((2, 2 * _BLOCK), np.uint8)

    def likely(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Positions in the flat block of all near pairs, and of few others.

        Both are uint64 (4, ...), broadcast to at most 2 * `_BLOCK` pairs. Words are compared until
        few pairs are left. All four may differ in 256 bits, which uint8 takes for 0: a pair more.
        """
        shape = np.broadcast_shapes(one.shape[1:], other.shape[1:])
        length = math.prod(shape)
        xor, bits, more = self._xor[:length], self._bits[:length], self._more[:length]
        for number, word in enumerate(self._words):
            np.bitwise_xor(one[word], other[word], out=xor.reshape(shape))
            np.bitwise_count(xor, out=more if number else bits)
            if number:
                bits += more
            is_likely = bits.reshape(shape) <= self.distance
            if np.count_nonzero(is_likely) * 64 <= length:
                break
        return np.flatnonzero(is_likely)

    def near(self, words: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
        """Near pairs in groups of one size: two numbers in a group, the lower first, and the group.

        Last, the bits that differ. ``words`` is uint64 (4, size, groups), of about `_BLOCK` hashes.
        """
        _, size, groups = words.shape
        # Rows beside those that follow by one, by two ...: half way around the group is all pairs.
        around = np.concatenate([words, words[:, : size // 2]], axis=1)
        for step in range(1, size // 2 + 1):
            rows = step if 2 * step == size else size  # half way, each pair is there twice
            likely = self.likely(around[:, :rows], around[:, step : step + rows])
            if len(likely):
                row, group = np.divmod(likely, groups)
                bits = hamming(around[:, row, group].T, around[:, row + step, group].T)
                near = bits <= self.distance
                row, group, bits = row[near], group[near], bits[near]
                other = (row + step) % size
                yield np.minimum(row, other), np.maximum(row, other), group, bits


def compare_all(queries: np.ndarray, words: np.ndarray, distance: int) -> np.ndarray:
    """The nearest of all hashes ``words``, uint64 (4, m), for each of ``queries``: packed (n,).

    ``queries`` is uint64 (n, 4). Hashes are compared in blocks; what is no nearer than the best so
    far is left out early.
    """
    best = np.full(len(queries), NONE)
    compare = _Compare(distance)
    for start in range(0, len(queries), _QUERIES):
        block = queries[start : start + _QUERIES]
        limits = np.full((len(block), 1), distance, np.uint8)
        compare.distance = limits
        nearest = best[start : start + _QUERIES]
        first, columns = 0, _FIRST
        while first < words.shape[1]:
            others = words[:, None, first : first + columns]
            likely = compare.likely(block.T[:, :, None], others)
            if len(likely):
                query, row = np.divmod(likely, others.shape[2])
                bits = hamming(block[query], words[:, first + row].T)
                near = bits <= limits[query, 0]
                np.minimum.at(nearest, query[near], pack(bits[near], first + row[near]))
                # The first of equal ones is kept: later ones have to be nearer.
                found = nearest != NONE
                limits[found, 0] = np.maximum(nearest[found] >> _ROW_BITS, 1) - 1
            first += columns
            columns = min(4 * columns, _BLOCK // _QUERIES)
    return best


def _batches(counts: np.ndarray) -> Iterator[slice]:
    """Slices of consecutive queries with about `_BLOCK` candidates each."""
    ends = counts.cumsum()
    start = 0
    while start < len(counts):
        done = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, done + 4 * _BLOCK, "right")), start + 1)
        if ends[stop - 1] > done:
            yield slice(start, stop)
        start = stop


def forest(pairs: np.ndarray) -> np.ndarray:
    """Pairs (n, 2) that connect the same rows as ``pairs``: each row with the lowest one.

    Rows are in one tree if a path of pairs leads from one to the other.
    """
    rows, numbers = np.unique(pairs, return_inverse=True)
    one, other = numbers.reshape(-1, 2).T
    root = np.arange(len(rows))
    while True:
        low, high = root[one], root[other]
        apart = low != high
        if not apart.any():
            break
        one, other, low, high = one[apart], other[apart], low[apart], high[apart]
        np.minimum.at(root, np.maximum(low, high), np.minimum(low, high))
        while not np.array_equal(shorter := root[root], root):
            root = shorter
    is_root = root == np.arange(len(rows))
    return np.stack([rows[root], rows], axis=1)[~is_root]


def _decided(
    hashes: np.ndarray, pairs: np.ndarray, distance: int, gone: np.ndarray, looked: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows of each tree of ``pairs``, and the nearest kept one for each, packed uint64.

    ``looked``, some of the pairs, (n, 2), are near whatever their distance is.
    """
    rows = np.unique(pairs)
    root = rows.copy()
    root[np.searchsorted(rows, pairs[:, 1])] = pairs[:, 0]
    rows = rows[np.argsort(root, kind="stable")]
    _, sizes = np.unique(root, return_counts=True)
    starts = sizes.cumsum() - sizes
    # Of each pair that was looked at, the start of its tree, and both places there.
    by_row = np.argsort(rows)
    places = by_row[np.searchsorted(rows, looked, sorter=by_row)]
    start_of = starts[np.searchsorted(starts, places[:, 0], "right") - 1]
    places -= start_of[:, None]
    for size in np.unique(sizes):
        of_size = starts[sizes == size]
        if size > _SMALL:
            for start in of_size:
                tree = rows[start : start + size]
                of_tree = places[start_of == start]
                nearest = _greedy(hashes[tree], distance, gone[tree], of_tree)
                yield tree, _at_rows(nearest, tree)
            continue
        step = max(1, _DISTANCES // int(size) ** 2)
        for first in range(0, len(of_size), step):
            some = of_size[first : first + step]
            trees = rows[some[:, None] + np.arange(size)]
            is_near = np.zeros((len(some), size, size), bool)
            here = np.isin(start_of, some)
            one, other = places[here].T
            group = np.searchsorted(some, start_of[here])
            is_near[group, one, other] = is_near[group, other, one] = True
            nearest = _greedy_at_once(hashes[trees], trees, distance, gone[trees], is_near)
            yield trees.ravel(), nearest.ravel()


def _greedy_at_once(
    hashes: np.ndarray, rows: np.ndarray, distance: int, gone: np.ndarray, is_near: np.ndarray
) -> np.ndarray:
    """Greedy deduplication in groups of one size: uint64 (groups, size, variants, 4) → packed.

    ``is_near``, (groups, size, size), are pairs that are near whatever their distance is.
    """
    apart = _distances(hashes, hashes)
    is_near |= apart <= distance
    kept = ~gone
    for row in range(1, rows.shape[1]):
        kept[:, row] &= ~(is_near[:, row, :row] & kept[:, :row]).any(axis=1)
    best = np.where(is_near & kept[:, None], pack(apart, rows[:, None]), NONE).min(axis=2)
    return np.where(kept, NONE, best)


def _greedy(hashes: np.ndarray, distance: int, gone: np.ndarray, looked: np.ndarray) -> np.ndarray:
    """Greedy deduplication of rows that are all compared: packed uint64 (n,).

    ``looked``, (m, 2), are pairs, the earlier row first, that are near whatever their distance is.
    """
    count, kept = 0, np.empty(len(hashes), np.int64)
    words = np.empty((4, len(hashes)), np.uint64)
    is_kept = np.zeros(len(hashes), bool)
    for start in range(0, len(hashes), _DECIDED):
        block = np.flatnonzero(~gone[start : start + _DECIDED]) + start
        block = block[_nearest(hashes[block], words[:, :count], distance) == NONE]
        block = block[~np.isin(block, looked[is_kept[looked[:, 0]], 1])]
        is_near = _distances(hashes[None, block], hashes[None, block])[0] <= distance
        one, other = np.searchsorted(block, looked[np.isin(looked, block).all(axis=1)]).T
        is_near[other, one] = True
        stays = np.zeros(len(block), bool)
        for number, near in enumerate(is_near):
            stays[number] = not (near[:number] & stays[:number]).any()
        block = block[stays]
        kept[count : count + len(block)] = block
        words[:, count : count + len(block)] = hashes[block, 0].T
        count += len(block)
        is_kept[block] = True
    # Rows went for any row kept before them. Look for the nearest, which may have come later.
    best = np.full(len(hashes), NONE)
    best[~is_kept] = _at_rows(_nearest(hashes[~is_kept], words[:, :count], distance), kept)
    for row, keeper in (looked.T[::-1], looked.T):
        chosen = is_kept[keeper] & ~is_kept[row]
        row, keeper = row[chosen], keeper[chosen]
        bits = hamming(hashes[row], hashes[keeper, :1]).min(axis=1)
        np.minimum.at(best, row, pack(bits, keeper))
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
