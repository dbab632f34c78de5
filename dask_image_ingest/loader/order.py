"""The order in which ``iter_batches`` goes through a frame, and positions in it."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from dask_image_ingest.arguments import whole_number
from dask_image_ingest.errors import ArgumentError

_ORDER, _SPLIT, _MIX = range(3)


class Position(NamedTuple):
    """Where the next batch begins: two numbers, to be stored with the state of a model."""

    partition: int
    row: int

    def after(self, rows: int, of: int) -> Position:
        """The position ``rows`` later, where the partition has ``of`` rows left."""
        if rows == of:
            return Position(self.partition + 1, 0)
        return Position(self.partition, self.row + rows)

    def rows_to_skip(self, count: int) -> int:
        """The row, checked against the number of rows of its partition.

        Raises
        ------
        ArgumentError
            If the partition has no such row, and the position is that of another iteration.
        """
        if self.row > count:
            raise ArgumentError(
                f"start={tuple(self)!r}: partition {self.partition} of this iteration has {count} "
                "images: the position is of another frame, shuffle= or shard="
            )
        return self.row


class Order:
    """Partitions one after the other: those of one shard, in the frame's order.

    Attributes
    ----------
    partitions : list of int
        What is read, in this order.
    end : Position
        The position after the last row.
    buffered : int
        How many partitions wait in a buffer.
    """

    buffered = 0

    def __init__(self, partitions: int, shard: tuple[int, int]) -> None:
        rank, world = shard
        self.partitions = self._all(partitions)[rank::world]
        self.end = Position(len(self.partitions), 0)

    def first_read(self, begin: Position) -> int:
        """The first step whose partition is read to begin at a position."""
        return begin.partition

    def find(self, images: int, counts: Iterable[int]) -> Position:
        """The position after so many images; ``counts`` are those of the partitions, in order."""
        for step, count in enumerate(self._portions(counts)):
            if images < count:
                return Position(step, images)
            images -= count
        return self.end

    def _portions(self, counts: Iterable[int]) -> Iterable[int]:
        """The number of images of each step, of those of each partition."""
        return counts

    def _all(self, partitions: int) -> list[int]:
        return list(range(partitions))


class Shuffle(Order):
    """A repeatable order: partitions in another order, rows mixed with those of the next one.

    A step gives half the rows of its partition, drawn at random, mixed with the other half of the
    partition before, which waited in a buffer. So to begin at a position, one partition before it
    is read, however far in it is. The order of the partitions is that of all shards together, of
    which each has its share.
    """

    buffered = 1

    def __init__(self, seed: int, partitions: int, shard: tuple[int, int]) -> None:
        self._seed = seed
        super().__init__(partitions, shard)
        # One step more, for the rows in the buffer after the last partition.
        self.end = Position(len(self.partitions) + 1, 0)

    def first_read(self, begin: Position) -> int:
        """The step before, whose partition fills the buffer."""
        return max(0, begin.partition - 1)

    def split(self, step: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of a partition that its step gives, and those that wait in the buffer."""
        rows = self._generator(_SPLIT, step).permutation(count)
        now = _now(count)
        return rows[:now], np.sort(rows[now:])

    def mix(self, step: int, count: int) -> np.ndarray:
        """The order of the rows of one step."""
        return self._generator(_MIX, step).permutation(count)

    def _portions(self, counts: Iterable[int]) -> Iterable[int]:
        waiting = 0
        for count in counts:
            yield waiting + _now(count)
            waiting = count - _now(count)
        yield waiting

    def _all(self, partitions: int) -> list[int]:
        order: list[int] = self._generator(_ORDER, 0).permutation(partitions).tolist()
        return order

    def _generator(self, purpose: int, step: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, purpose, step])


def _now(count: int) -> int:
    """How many rows of a partition its own step gives: half of them, rounded up."""
    return count - count // 2


def parse_start(start: Any, end: Position) -> int | Position:
    """The argument ``start=``: a number of batches, or a position in an iteration to ``end``.

    Raises
    ------
    ArgumentError
    """
    advice = "pass how many batches to skip, or the position of an earlier iterator"
    try:
        partition, row = start
    except (TypeError, ValueError):
        return whole_number("start", start, 0, advice)
    try:
        position = Position(operator.index(partition), operator.index(row))
    except TypeError:
        raise ArgumentError(f"start={start!r}; {advice}") from None
    if min(position) < 0 or position > end:
        raise ArgumentError(
            f"start={start!r} is no position of this iteration, which ends at {tuple(end)!r}: it "
            "is of another frame, shuffle= or shard="
        )
    return position


__all__ = ["Order", "Position", "Shuffle", "parse_start"]
