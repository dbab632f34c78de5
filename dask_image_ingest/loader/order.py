"""The order in which ``iter_batches`` reads a frame, positions in it, and shares of it.

A share is the part of a frame that a rank or a DataLoader worker reads.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dask_image_ingest.arguments import whole_number
from dask_image_ingest.errors import ArgumentError


def parse_shard(shard: Any, format: str) -> tuple[int, int]:
    """Parse the argument ``shard=``: (rank, world).

    Raises
    ------
    ArgumentError
    """
    if shard is None:
        return 0, 1
    if isinstance(shard, str) and shard == "auto":
        return torch_worker(torch_rank() if format == "torch" else (0, 1))
    try:
        rank, world = map(operator.index, shard)
    except (TypeError, ValueError):
        rank, world = 0, 0
    if not 0 <= rank < world:
        raise ArgumentError(
            f"shard={shard!r}; pass (rank, world), a rank from 0 below world, or 'auto', or None"
        )
    return rank, world


def torch_rank() -> tuple[int, int]:
    """Rank and world size of this process in ``torch.distributed``; (0, 1) outside of it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return 0, 1
    group = torch.distributed
    if group.is_available() and group.is_initialized():
        return group.get_rank(), group.get_world_size()
    if torch.utils.data.get_worker_info() is not None and "WORLD_SIZE" in os.environ:
        # A spawned DataLoader worker has no process group, but inherits torchrun's variables.
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def torch_worker(shard: tuple[int, int]) -> tuple[int, int]:
    """The part of ``shard`` for this worker of a torch ``DataLoader``; else ``shard`` itself."""
    torch = sys.modules.get("torch")
    worker = None if torch is None else torch.utils.data.get_worker_info()
    if worker is None:
        return shard
    rank, world = shard
    return rank * worker.num_workers + worker.id, world * worker.num_workers


# Purposes of random numbers: part of their seed, so that each draws a sequence of its own.
_ORDER, _SPLIT, _MIX = range(3)

# Partitions in the shuffle buffer, unless its number of rows is given.
_LEAST_MIXED, _MOST_MIXED = 2, 16


class Position(NamedTuple):
    """Position in an iteration: step and row, to be stored in a model's checkpoint."""

    partition: int
    row: int

    def rows_to_skip(self, count: int) -> int:
        """The row, checked against the ``count`` rows of its step.

        Raises
        ------
        ArgumentError
            If there is no such row: the position is that of another iteration.
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
    """Size of the shuffle buffer: in rows; or in bytes of pixels, with 2 to 16 partitions."""

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
        """True if decoded partitions of this size would exceed the buffer's bytes."""
        mixed = _MOST_MIXED if self.rows is None else -(-self.rows // max(1, size.rows))
        return min(mixed, partitions) * size.nbytes > self.nbytes

    def describe(self, partitions: int) -> str:
        """The size in words, for a frame of so many ``partitions``."""
        if self.rows is not None:
            return f"{self.rows:,} rows"
        return f"up to {min(_MOST_MIXED, partitions)} partitions"


class Order:
    """Sequential order: the partitions of one shard, as they come in the frame.

    Attributes
    ----------
    partitions : list of int
        Numbers of the partitions to read, in this order.
    end : Position
        The position after the last row.
    """

    def __init__(self, partitions: int, shard: tuple[int, int]) -> None:
        rank, world = shard
        self.partitions = self._order(partitions)[rank::world]
        self.end = Position(len(self.partitions), 0)

    def describe(self) -> list[str]:
        """Phrases for the ``repr``."""
        return []

    def _order(self, partitions: int) -> list[int]:
        return list(range(partitions))


class Shuffle(Order):
    """Repeatable shuffle: partitions in random order, rows mixed across a buffer of partitions.

    Step s fills the buffer with partitions from s on, and yields a share of the rows of each. The
    rows of a partition are divided evenly, at random, among the steps from the one in which it
    enters the buffer to the step of its own number. The step that reads the last partition yields
    all remaining rows. All shards draw one common order of partitions, of which each takes every
    world-th. "Numbers" of partitions here are their positions in ``partitions``.
    """

    def __init__(self, seed: int, partitions: int, shard: tuple[int, int], buffer: Buffer) -> None:
        self.seed = seed
        self.buffer = buffer
        super().__init__(partitions, shard)

    def history(self, step: int, size: Callable[[int], Size]) -> dict[int, Size]:
        """Sizes of the partitions before a step that decide what was in the buffer then.

        A resumed iteration needs them: `_entry` of later partitions looks so far back.
        """
        sizes: dict[int, Size] = {}
        while step and not self.buffer.is_full([*sizes.values()]):
            step -= 1
            sizes[step] = size(self.partitions[step])
        return sizes

    def steps(
        self, first: int, sizes: dict[int, Size], read: Callable[[int], Size]
    ) -> Iterator[tuple[int, dict[int, slice]]]:
        """Steps from ``first`` on: each with the slice it yields of each partition's shuffled rows.

        Parameters
        ----------
        first
            The first step.
        sizes
            Its `history`; the sizes of partitions that are read are added.
        read
            Called with the number of each partition that enters the buffer.
        """
        count, upcoming = len(self.partitions), first
        entered: dict[int, int] = {}
        for step in range(first, count):
            while upcoming < count and self._entry(upcoming, sizes) <= step:
                entered[upcoming] = self._entry(upcoming, sizes)
                sizes[upcoming] = read(upcoming)
                upcoming += 1
            is_last = upcoming == count
            if is_last and step > entered[count - 1]:
                return  # the step that read the last partition has yielded all rows
            yield (
                step,
                {
                    number: _share(sizes[number].rows, entered[number], step, number, is_last)
                    for number in range(step, upcoming)
                },
            )

    def rows(self, number: int, count: int) -> np.ndarray:
        """A permutation of a partition's rows, of which each step yields a slice."""
        return self._generator(_SPLIT, number).permutation(count)

    def mix(self, step: int, count: int) -> np.ndarray:
        """A permutation of the rows of one step."""
        return self._generator(_MIX, step).permutation(count)

    def _entry(self, number: int, sizes: Mapping[int, Size]) -> int:
        """The first step that has a partition in the buffer."""
        between: list[Size] = []
        for step in reversed(range(number)):
            between.append(sizes[step])
            if self.buffer.is_full(between):
                return step + 1
        return 0

    def describe(self) -> list[str]:
        """Phrases for the ``repr``: seed and buffer."""
        return [f"shuffle={self.seed}, mixing {self.buffer.describe(len(self.partitions))}"]

    def _order(self, partitions: int) -> list[int]:
        order: list[int] = self._generator(_ORDER, 0).permutation(partitions).tolist()
        return order

    def _generator(self, purpose: int, step: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, purpose, step])


def _share(rows: int, entered: int, step: int, leaves: int, is_last: bool) -> slice:
    """Slice that ``step`` yields of a partition in the buffer from ``entered`` to ``leaves``."""
    steps = leaves - entered + 1
    start, stop = (rows * edge // steps for edge in (step - entered, step - entered + 1))
    return slice(start, rows if is_last else stop)


def parse_start(start: Any, end: Position) -> int | Position:
    """Parse the argument ``start=``: a number of batches, or a position up to ``end``.

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
            f"start={start!r} is not a position in this iteration, which ends at {tuple(end)!r}: "
            "it belongs to another frame, shuffle= or shard="
        )
    return position
