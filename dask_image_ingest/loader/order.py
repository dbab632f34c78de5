"""The order in which ``iter_batches`` goes through a frame, and positions in it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dask_image_ingest.arguments import whole_number
from dask_image_ingest.errors import ArgumentError

_ORDER, _SPLIT, _MIX = range(3)

# Partitions that a shuffle mixes, where no number of rows is given.
_LEAST_MIXED, _MOST_MIXED = 2, 16


class Position(NamedTuple):
    """Position in an iteration: two numbers, to be stored with the state of a model."""

    partition: int
    row: int

    def rows_to_skip(self, count: int) -> int:
        """The row, checked against the number of rows of its partition.

        Raises
        ------
        ArgumentError
            If the partition has no such row, and the position is that of another iteration.
        """
        if self.row > count:
            raise ArgumentError(
                f"start={tuple(self)!r}: step {self.partition} of this iteration has {count} "
                "rows: the position is of another frame, shuffle=, shuffle_buffer= or shard="
            )
        return self.row


class Size(NamedTuple):
    """Rows of a partition, and bytes of its decoded images."""

    rows: int
    nbytes: int


class Buffer(NamedTuple):
    """Shuffle buffer: partitions that have ``rows`` rows together, or at most ``nbytes`` of pixels.

    By bytes it has never fewer than two partitions, nor more than 16.
    """

    rows: int | None = None
    nbytes: int = 2**30

    def is_full(self, sizes: Sequence[Size]) -> bool:
        """True if partitions of these sizes fill it."""
        if self.rows is not None:
            return sum(size.rows for size in sizes) >= self.rows
        if len(sizes) < _LEAST_MIXED:
            return False
        return len(sizes) >= _MOST_MIXED or sum(size.nbytes for size in sizes) >= self.nbytes

    def overflows(self, size: Size, partitions: int) -> bool:
        """True if it would hold more bytes than it should with partitions of this size."""
        wanted = _MOST_MIXED if self.rows is None else -(-self.rows // max(1, size.rows))
        return min(wanted, partitions) * size.nbytes > self.nbytes

    def told(self, partitions: int) -> str:
        """A phrase for the most that is mixed, of so many partitions."""
        if self.rows is not None:
            return f"{self.rows:,} rows"
        return f"up to {min(_MOST_MIXED, partitions)} partitions"


class Order:
    """Partitions one after the other: those of one shard, in the frame's order.

    Attributes
    ----------
    partitions : list of int
        What is read, in this order.
    end : Position
        The position after the last row.
    """

    def __init__(self, partitions: int, shard: tuple[int, int]) -> None:
        rank, world = shard
        self.partitions = self._all(partitions)[rank::world]
        self.end = Position(len(self.partitions), 0)

    def told(self) -> list[str]:
        """Phrases about it, beside the number of partitions."""
        return []

    def _all(self, partitions: int) -> list[int]:
        return list(range(partitions))


class Shuffle(Order):
    """A repeatable order: partitions in another order, rows mixed with those of the next ones.

    Step s reads partitions from s on until the buffer is full, and gives a share of the rows of
    each. The rows of a partition are spread evenly, at random, over the steps from the first one
    that has it in the buffer to the one of its own number. The step that reads the last partition
    gives all that is left. The order of the partitions is that of all shards together, of which
    each has its share.
    """

    def __init__(self, seed: int, partitions: int, shard: tuple[int, int], buffer: Buffer) -> None:
        self.seed = seed
        self.buffer = buffer
        super().__init__(partitions, shard)

    def history(self, step: int, size: Callable[[int], Size]) -> dict[int, Size]:
        """Sizes of the partitions before a step, as far back as it depends on them."""
        known: dict[int, Size] = {}
        while step and not self.buffer.is_full([*known.values()]):
            step -= 1
            known[step] = size(self.partitions[step])
        return known

    def steps(
        self, first: int, sizes: dict[int, Size], read: Callable[[int], Size]
    ) -> Iterator[tuple[int, dict[int, slice]]]:
        """Each step from ``first`` on, and which of the shuffled rows of partitions it gives.

        Parameters
        ----------
        first
            The step.
        sizes
            The `history` of it; those of the partitions that are read are added.
        read
            Called with the number of each partition when it comes into the buffer.
        """
        count, upcoming = len(self.partitions), first
        entered: dict[int, int] = {}
        for step in range(first, count):
            while upcoming < count and self._entry(upcoming, sizes) <= step:
                entered[upcoming] = self._entry(upcoming, sizes)
                sizes[upcoming] = read(upcoming)
                upcoming += 1
            last = upcoming == count
            if last and step > entered[count - 1]:
                return
            yield (
                step,
                {
                    number: _share(sizes[number].rows, entered[number], step, number, last)
                    for number in range(step, upcoming)
                },
            )

    def rows(self, number: int, count: int) -> np.ndarray:
        """The shuffled rows of a partition, of which each step gives a share."""
        return self._generator(_SPLIT, number).permutation(count)

    def mix(self, step: int, count: int) -> np.ndarray:
        """The order of the rows of one step."""
        return self._generator(_MIX, step).permutation(count)

    def _entry(self, number: int, sizes: Mapping[int, Size]) -> int:
        """The first step that has a partition in the buffer."""
        between: list[Size] = []
        for step in reversed(range(number)):
            between.append(sizes[step])
            if self.buffer.is_full(between):
                return step + 1
        return 0

    def told(self) -> list[str]:
        """The seed, and what is mixed."""
        return [f"shuffle={self.seed}, mixing {self.buffer.told(len(self.partitions))}"]

    def _all(self, partitions: int) -> list[int]:
        order: list[int] = self._generator(_ORDER, 0).permutation(partitions).tolist()
        return order

    def _generator(self, purpose: int, step: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, purpose, step])


def _share(rows: int, entered: int, step: int, left: int, is_last: bool) -> slice:
    """The share of a step in the rows of a partition that is there from one step to another."""
    steps = left - entered + 1
    start, stop = (rows * edge // steps for edge in (step - entered, step - entered + 1))
    return slice(start, rows if is_last else stop)


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
