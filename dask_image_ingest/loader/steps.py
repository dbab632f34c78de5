"""The rows of a frame in the order of the batches, in portions of about a partition.

Variables are deleted before the next partition is read, which would else be in memory together with
this one. For the same reason no loop uses ``enumerate``, which keeps its last item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dask_image_ingest.frames import Backend
from dask_image_ingest.loader.order import Order, Position, Shuffle, Size
from dask_image_ingest.loader.rows import Rows

__all__ = ["portions"]


def portions(
    order: Order,
    begin: Position,
    partitions: Iterator[Rows],
    sizes: dict[int, Size],
    fill: Callable[[], None],
    backend: Backend,
) -> Iterator[tuple[Position, Rows]]:
    """Portions of rows from ``begin`` on, and where each begins.

    Parameters
    ----------
    order
        In order, or shuffled.
    begin
        Where to begin.
    partitions
        Those of ``order.partitions``, from that of ``begin`` on.
    sizes
        Those of partitions before ``begin`` that a shuffle depends on.
    fill
        Reads ahead; called by a shuffle, which takes many partitions before its first portion.
    backend
        Of the frame.
    """
    if isinstance(order, Shuffle):
        return _shuffled(order, begin, partitions, sizes, fill, backend)
    return _in_order(begin, partitions)


def _in_order(begin: Position, partitions: Iterator[Rows]) -> Iterator[tuple[Position, Rows]]:
    step = begin.partition
    for rows in partitions:
        yield _from(begin, step, rows)
        del rows
        step += 1


def _shuffled(
    order: Shuffle,
    begin: Position,
    partitions: Iterator[Rows],
    sizes: dict[int, Size],
    fill: Callable[[], None],
    backend: Backend,
) -> Iterator[tuple[Position, Rows]]:
    """Shares of the partitions in the buffer, mixed."""
    held: dict[int, Rows] = {}

    def read(number: int) -> Size:
        held[number] = next(partitions)
        fill()
        return held[number].size

    for step, shares in order.steps(begin.partition, sizes, read):
        parts = [
            held[number].take(order.rows(number, len(held[number]))[share])
            for number, share in shares.items()
        ]
        held.pop(step)
        rows = Rows.of(parts, backend)
        del parts
        rows = rows.take(order.mix(step, len(rows)))
        yield _from(begin, step, rows)
        del rows


def _from(begin: Position, step: int, rows: Rows) -> tuple[Position, Rows]:
    """The rows of a step without those before ``begin``, and where they begin."""
    skip = begin.rows_to_skip(len(rows)) if step == begin.partition else 0
    return Position(step, skip), rows.take(range(skip, len(rows)))
