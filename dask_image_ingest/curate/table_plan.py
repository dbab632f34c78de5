"""Plans of tables: over how many bits, and how many of them, to find near hashes.

Locality-sensitive hashing by bit sampling. A table groups hashes by ``bits`` of their 256 bits, and
only hashes of one group are compared, in full. So ``tables`` tables find about

    recall = 1 - (1 - C(256 - d, bits) / C(256, bits)) ** tables

of the pairs that differ in d bits; `missed` has the exact value. A table takes its bits from one of
the four words of a hash, and the tables of a word share no bit, as long as there are bits left.
About log2(rows) bits make groups of constant size: the work grows as rows × tables.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

#: Share of the pairs at the distance searched for that tables find; nearer pairs are found more
#: often. Up to `EXACT` rows no pair is missed.
RECALL = 0.999
EXACT = 1 << 17

#: Words of a hash, and the most bits that a table samples.
HASH_WORDS = 4
MAX_BITS = 32

_WORD, _MAX_TABLES = 64, 4096  # bits of a word

# Nominal costs, in ns: of a row in a table, of comparing two hashes of a group, of comparing two of
# blocks, of testing whether a row is in any group of others, of comparing two hashes by their
# numbers; and of a table.
_ROW, _PAIR, _ALL, _TEST, _LOOKUP, _TABLE = 100, 8, 3, 10, 40, 3e6

_CROWD = 1024  # rows in a group that are compared with each other, at least
_ALIKE = 72  # bits: unrelated photographs differ in more
_SAMPLED = 1 << 16  # pairs of rows whose distances tell how large groups become


def missed(bits: int, tables: int, distance: int) -> float:
    """Share of the pairs at a distance, in random bits, that so many tables miss.

    With e of the differing bits in a word, and m = 64 // bits disjoint tables of it, a pair is in
    no group of these with the chance

        miss(e) = sum((-1)**j * C(m, j) * C(64 - j * bits, e) for j in 0..m) / C(64, e)

    Further tables of the word take another permutation of its bits, whose chance is independent.
    The share is the mean of the four words' product over all ways in which the bits fall into them.

    Examples
    --------
    >>> round(1 - missed(16, 26, 24), 4)
    0.9991
    >>> missed(9, 28, 24)
    0.0
    """
    ways = np.ones(1)
    for word in range(HASH_WORDS):
        of_word = len(range(word, tables, HASH_WORDS))
        permutations, rest = divmod(of_word, _WORD // bits)
        chance = _missed_by_blocks(bits, _WORD // bits) ** permutations
        chance = chance * _missed_by_blocks(bits, rest)
        ways = np.convolve(ways, (chance * _WAYS)[: distance + 1])
    return float(ways[distance] / math.comb(HASH_WORDS * _WORD, distance))


_WAYS = np.array([math.comb(_WORD, differing) for differing in range(_WORD + 1)], float)


@functools.cache
def _missed_by_blocks(bits: int, blocks: int) -> np.ndarray:
    """Chance that each of ``blocks`` disjoint blocks has one of 0 to 64 differing bits."""
    chances = []
    for differing in range(_WORD + 1):
        ways = sum(
            (-1) ** j * math.comb(blocks, j) * math.comb(_WORD - j * bits, differing)
            for j in range(blocks + 1)
        )
        chances.append(ways / math.comb(_WORD, differing))
    return np.array(chances)


@functools.cache
def _tables_needed(bits: int, distance: int, share: float) -> int | None:
    """The fewest tables that miss at most this share at the distance; None: too many."""
    numbers = range(1, _MAX_TABLES + 1)
    tables = bisect_left(numbers, True, key=lambda n: missed(bits, n, distance) <= share) + 1
    return tables if tables <= _MAX_TABLES else None


@dataclass(frozen=True)
class TablePlan:
    """Tables to search rows by; none if all rows are compared with all."""

    bits: int  # that a table samples
    tables: int
    crowd: int  # rows of the largest group that is compared
    level: int = 0  # how often the rows were among too many; it chooses the bits

    def key(self, table: int) -> tuple[int, np.uint64, np.uint64]:
        """Word of the table, mask of its bits, and a factor that spreads them over 64 bits."""
        word, blocks = table % HASH_WORDS, _WORD // self.bits
        permutation, block = divmod(table // HASH_WORDS, blocks)
        random = np.random.default_rng([256, self.level, word, permutation])
        chosen = random.permutation(_WORD)[block * self.bits : (block + 1) * self.bits]
        mask = np.bitwise_or.reduce(np.uint64(1) << chosen.astype(np.uint64))
        factor = np.random.default_rng([257, table]).integers(0, 1 << 64, dtype=np.uint64)
        return word, mask, factor | np.uint64(1)

    def rows_of_matches(self, queries: int, others: int) -> int:
        """About how many rows of both sides a table holds: of the larger one those that may match.

        For the plans of `plan_matches`.
        """
        few, many = sorted((queries, others))
        return few + min(many, 16 * few * many * self.crowd // _CROWD // 2**self.bits)


def plan_pairs(hashes: np.ndarray, distance: int, level: int = 0) -> TablePlan:
    """The cheapest plan to find the near pairs of ``hashes``, uint64 (n, 4)."""
    n = len(hashes)
    same = _same_group(hashes, hashes, level)
    costs = {0: n * n / 2 * _ALL}
    for bits, tables in _choices(distance, n):
        costs[bits] = tables * (_TABLE + n * (_ROW + n / 2 * same[bits] * _PAIR))
    return _cheapest(costs, distance, n, same, level)


def plan_matches(
    queries: np.ndarray, others: np.ndarray, distance: int, level: int = 0
) -> TablePlan:
    """The cheapest plan to find the near pairs of ``queries`` and ``others``, uint64 (n, 4)."""
    few, many = sorted((len(queries), len(others)))
    same = _same_group(queries, others, level)
    costs: dict[int, float] = {0: few * many * _ALL}
    for bits, tables in _choices(distance, few + many):
        found = min(1, few * same[bits]) * many * _ROW + few * many * same[bits] * _LOOKUP
        costs[bits] = tables * (_TABLE + many * _TEST + few * _ROW + found)
    plan = _cheapest(costs, distance, many, same, level)
    # Pairs are looked up one by one here, which costs more than in a block.
    return replace(plan, crowd=plan.crowd // 8)


def _choices(distance: int, rows: int) -> Iterator[tuple[int, int]]:
    """Numbers of bits that a table may sample, with the tables that are needed."""
    share = 0.0 if rows <= EXACT else 1 - RECALL
    for bits in range(1, MAX_BITS + 1):
        tables = _tables_needed(bits, distance, share)
        if tables is not None:
            yield bits, tables


def _cheapest(
    costs: dict[int, float], distance: int, rows: int, same: np.ndarray, level: int
) -> TablePlan:
    bits = min(costs, key=lambda bits: (costs[bits], bits))
    if not bits:
        return TablePlan(0, 0, rows, level)
    tables = dict(_choices(distance, rows))[bits]
    return TablePlan(bits, tables, max(_CROWD, math.ceil(4 * rows * same[bits])), level)


def _same_group(one: np.ndarray, other: np.ndarray, level: int) -> np.ndarray:
    """Share of pairs in one group of a table, by the bits it samples: (MAX_BITS + 1,).

    Estimated from random pairs. So real hashes, whose bits are not independent, get more bits.
    Pairs that are alike are left out if they are the fewer ones: crowds are searched once more.
    """
    random = np.random.default_rng([level, len(one), len(other)])
    rows = [random.integers(0, max(len(h), 1), _SAMPLED) for h in (one, other)]
    if not len(one) or not len(other):
        return np.zeros(MAX_BITS + 1)
    apart = np.bitwise_count(one[rows[0]] ^ other[rows[1]])
    is_alike = apart.sum(axis=1, dtype=np.int64) < _ALIKE
    chosen = ~is_alike if is_alike.mean() < 0.5 else apart.any(axis=1)
    counts = np.bincount(apart[chosen].ravel(), minlength=_WORD + 1)
    counts = counts / max(counts.sum(), 1)
    numbers = np.arange(MAX_BITS + 1)
    chances = [_missed_by_blocks(bits, 1) for bits in numbers[1:].tolist()]
    return np.maximum([1, *(1 - np.array(chances)) @ counts], 0.5**numbers)
