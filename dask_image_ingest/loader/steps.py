"""The rows of a frame in the order of the batches, in portions of about a partition.

Variables are deleted before the next partition is read, which would else be in memory together with
this one. For the same reason no loop uses ``enumerate``, which keeps its last item.
"""

from __future__ import annotations

from collections.abc import Iterator

from dask_image_ingest.frames import Backend
from dask_image_ingest.loader.order import Order, Position, Shuffle
from dask_image_ingest.loader.rows import Rows

__all__ = ["portions"]


def portions(
    order: Order, begin: Position, partitions: Iterator[Rows], backend: Backend
) -> Iterator[tuple[Position, Rows]]:
    """Portions of rows from ``begin`` on, and where each begins.

    Parameters
    ----------
    order
        In order, or shuffled.
    begin
        Where to begin.
    partitions
        Those of ``order.partitions``, from ``order.first_read(begin)`` on.
    backend
        Of the frame.
    """
    if isinstance(order, Shuffle):
        return _shuffled(order, begin, partitions, backend)
    return _in_order(begin, partitions)


def _in_order(begin: Position, partitions: Iterator[Rows]) -> Iterator[tuple[Position, Rows]]:
    step = begin.partition
    for rows in partitions:
        yield _from(begin, step, rows)
        del rows
        step += 1


def _shuffled(
    order: Shuffle, begin: Position, partitions: Iterator[Rows], backend: Backend
) -> Iterator[tuple[Position, Rows]]:
    """Half of each partition, mixed with the other half of the partition before."""
    step = order.first_read(begin)
    buffered: Rows | None = None
    for rows in partitions:
        now, later = order.split(step, len(rows))
        if step >= begin.partition:
            mixed = _mixed(order, step, [buffered, rows.take(now)], backend)
            yield _from(begin, step, mixed)
            del mixed
        buffered = None  # free its memory before the next buffer is made
        buffered = rows.take(later).copied()
        del rows
        step += 1
    if buffered is not None:
        yield _from(begin, step, _mixed(order, step, [buffered], backend))


def _mixed(order: Shuffle, step: int, parts: list[Rows | None], backend: Backend) -> Rows:
    rows = Rows.of([part for part in parts if part is not None], backend)
    return rows.take(order.mix(step, len(rows)))


def _from(begin: Position, step: int, rows: Rows) -> tuple[Position, Rows]:
    """The rows of a step without those before ``begin``, and where they begin."""
    skip = begin.rows_to_skip(len(rows)) if step == begin.partition else 0
    return Position(step, skip), rows.take(range(skip, len(rows)))
