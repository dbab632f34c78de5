"""``iter_batches``: a frame as a stream of batches, with a few partitions in memory at a time.

Partitions are read ahead (`ReadAhead`), give portions of rows in order or shuffled (`portions`),
and these are cut into batches, which are converted to arrays or tensors (``batch_format``).

Variables are deleted before the next partition is read, which would else be in memory together with
this one. For the same reason no loop of `portions` uses ``enumerate``, which keeps its last item.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from dask_image_ingest.arguments import check_flag, whole_number
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend, backend_of
from dask_image_ingest.loader.batch_format import (
    Format,
    Rows,
    batch_of,
    converter,
    parse_normalize,
    rows_of,
)
from dask_image_ingest.loader.order import Buffer, Order, Position, Shuffle, Size, parse_start
from dask_image_ingest.loader.source import Source


class Batches:
    """An iterator of batches with a position; its arguments are those of ``iter_batches``.

    Raises
    ------
    ArgumentError, MissingDependencyError
    """

    def __init__(
        self,
        source: Source,
        meta: Any,
        image: str,
        *,
        batch_size: int,
        format: Format,
        normalize: Any,
        shuffle: int | None,
        shuffle_buffer: int | None,
        drop_last: bool,
        prefetch: int | None,
        start: int | Sequence[int],
        shard: tuple[int, int],
    ) -> None:
        self._source = source
        self._image = image
        self._columns = list(meta.columns)
        self._backend = backend_of(meta)
        self._size = whole_number("batch_size", batch_size, 1, "pass a positive number of images")
        check_flag("drop_last", drop_last)
        self._drop_last = drop_last
        self._prefetch = prefetch
        if prefetch is not None:
            advice = "pass how many partitions to read ahead"
            self._prefetch = whole_number("prefetch", prefetch, 0, advice)
        self._convert = converter(format, self._backend)
        self._normalize = parse_normalize(normalize)
        self._order = _order(source.partitions, shard, shuffle, shuffle_buffer)
        begin = parse_start(start, self._order.end)
        self._skip = 0 if isinstance(begin, Position) else begin * self._size
        self._position = begin if isinstance(begin, Position) else Position(0, 0)
        if not self._order.partitions and shard[1] > 1:
            _warn_of_no_share(source.partitions, shard)
        self._stream = self._batches()

    @property
    def position(self) -> Position:
        """Position of the next batch.

        Give it to ``start=`` to go on from there: no partition before it is read again.
        """
        if self._skip:
            with self._source as source:
                sizes = map(source.size, self._order.partitions)
                self._position, self._skip = self._order.find(self._skip, sizes), 0
        return self._position

    def __repr__(self) -> str:
        columns = ", ".join(repr(name) for name in self._columns if name != self._image)
        if self._skip:
            place = f"after {self._skip} rows"
        elif self._position >= self._order.end:
            place = "at the end"
        else:
            place = f"at {tuple(self._position)}"
        count = len(self._order.partitions)
        return (
            f"<Batches of {self._size} rows from {count} partitions, {place}: "
            f"images {self._image!r}" + (f" and {columns}>" if columns else ">")
        )

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> dict[str, Any]:
        self._source.check_process()
        return next(self._stream)

    def close(self) -> None:
        """Stop reading ahead and free what was read, as the end of the iteration does."""
        self._stream.close()

    def _batches(self) -> Generator[dict[str, Any], None, None]:
        """Cut portions of rows into batches; the rest of one portion begins the next batch."""
        begin, order = self.position, self._order
        depth = self._source.prefetch() if self._prefetch is None else self._prefetch
        sizes = self._history(begin)
        ahead = ReadAhead(self._source, order.partitions[begin.partition :], depth)
        carried: Rows | None = None
        # No variables for the iterators: a traceback would keep them open.
        for place, rows in portions(
            order,
            begin,
            ahead.partitions(self._image, self._backend),
            sizes,
            ahead.fill,
            self._backend,
        ):
            at = 0
            if carried is not None:
                at = min(self._size - len(carried), len(rows))
                carried = Rows.of([carried, rows.take(range(at))], self._backend)
                if len(carried) < self._size:
                    continue
                self._position = place.after(at, of=len(rows))
                batch, carried = self._batch(carried), None
                yield batch
                del batch
                ahead.fill()
            while len(rows) - at >= self._size:
                at += self._size
                self._position = place.after(at, of=len(rows))
                yield self._batch(rows.take(range(at - self._size, at)))
                ahead.fill()
            if at < len(rows):
                carried = rows.take(range(at, len(rows))).copied()
            del rows  # before the next partition is read
        self._position = order.end
        if carried is not None and not self._drop_last:
            yield self._batch(carried)

    def _history(self, begin: Position) -> dict[int, Size]:
        """Sizes of partitions before a position, of which a shuffle depends on some."""
        if not isinstance(self._order, Shuffle) or not begin.partition:
            return {}
        with self._source as source:
            return self._order.history(begin.partition, source.size)

    def _batch(self, rows: Rows) -> dict[str, Any]:
        return batch_of(rows, self._image, self._backend, self._convert, self._normalize)


def _order(partitions: int, shard: tuple[int, int], shuffle: Any, shuffle_buffer: Any) -> Order:
    if shuffle_buffer is not None:
        advice = "pass how many rows to mix, or None"
        shuffle_buffer = whole_number("shuffle_buffer", shuffle_buffer, 1, advice)
        if shuffle is None:
            raise ArgumentError(
                f"shuffle_buffer={shuffle_buffer} is for a shuffle: pass a seed as shuffle= too"
            )
    if shuffle is None:
        return Order(partitions, shard)
    seed = whole_number("shuffle", shuffle, 0, "pass a seed, a number from 0, or None")
    return Shuffle(seed, partitions, shard, Buffer(shuffle_buffer))


def _warn_of_no_share(partitions: int, shard: tuple[int, int]) -> None:
    rank, world = shard
    warnings.warn(
        f"iter_batches: {world} processes share {partitions} partitions, and there is none for "
        f"this one, number {rank}: take fewer, or smaller partitions (partition_size=)",
        stacklevel=4,
    )


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


class ReadAhead:
    """A queue of partitions that are being read or wait to be used.

    Parameters
    ----------
    source
        Where they are read.
    numbers
        Which ones, in order.
    depth
        How many the queue holds at most; with 0 a partition is read when it is asked for.
    """

    def __init__(self, source: Source, numbers: Iterable[int], depth: int) -> None:
        self._source = source
        self._upcoming = iter(numbers)
        self._depth = depth
        self._queue: deque[Future[Any]] = deque()

    def partitions(self, image: str, backend: Backend) -> Iterator[Rows]:
        """The rows of each partition that have an image."""
        try:
            with self._source:
                self.fill()
                while self._queue or self._read_next():
                    # No variable: it would keep the partition in memory while the next is read.
                    yield rows_of(self._queue.popleft().result(), image, backend)
        finally:
            self._queue.clear()

    def fill(self) -> None:
        """Start reading partitions until the queue is full.

        For the caller to do after each batch. Before the first batch of a partition the user still
        holds the last one of the partition before, and so the memory of that partition.
        """
        while len(self._queue) < self._depth and self._read_next():
            pass

    def _read_next(self) -> bool:
        """Start reading one more partition; False if there is none."""
        number = next(self._upcoming, None)
        if number is not None:
            self._queue.append(self._source.read(number))
        return number is not None
