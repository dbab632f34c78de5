"""The order in which ``iter_batches`` goes through a frame, and a place in it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_ORDER, _SPLIT, _MIX = range(3)


class Position(NamedTuple):
    """Where the next batch begins: plain numbers, to be stored beside a model's state."""

    partition: int
    row: int

    def after(self, rows: int, of: int) -> Position:
        """The position so many rows on, ``of`` those that the partition has left."""
        if rows == of:
            return Position(self.partition + 1, 0)
        return Position(self.partition, self.row + rows)


class Shuffle:
    """A repeatable order: partitions in another order, rows mixed with those of the next one.

    Half the rows of each partition, drawn at random, wait in the buffer and come with half of the
    following one. So a position has to know one partition back, and not the whole past.
    """

    def __init__(self, seed: int, partitions: int) -> None:
        self._seed = seed
        self.order = self._generator(_ORDER, 0).permutation(partitions).tolist()

    def split(self, step: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Which rows of a partition come at once, and which wait in the buffer."""
        rows = self._generator(_SPLIT, step).permutation(count)
        half = count - count // 2
        return rows[:half], np.sort(rows[half:])

    def mix(self, step: int, count: int) -> np.ndarray:
        """The order of the rows that come in one step."""
        return self._generator(_MIX, step).permutation(count)

    def _generator(self, purpose: int, step: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, purpose, step])
