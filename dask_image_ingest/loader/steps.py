"""A frame's rows in the order of the batches, in portions of about a partition.

Memory: a variable that outlives its step would keep a partition while the next one is read. So each
is deleted, and none of these loops uses ``enumerate``, which keeps the last item.
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
    """Of each partition one half, mixed with the other half of the one before, from the buffer."""
    step = order.first_read(begin)
    buffered: Rows | None = None
    for rows in partitions:
        now, later = order.split(step, len(rows))
        if step >= begin.partition:
            mixed = _mixed(order, step, [buffered, rows.take(now)], backend)
            yield _from(begin, step, mixed)
            del mixed
        buffered = None  # before the next one takes memory
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
