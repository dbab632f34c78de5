"""``iter_batches``: a frame as a stream of batches, with a few partitions in memory at a time.

A batch comes from a partition (``read_ahead``), as part of a portion of rows in order or shuffled
(``steps``), from which it is cut here, and converted to arrays or tensors (``formats``).
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from typing import Any

from dask_image_ingest.arguments import check_flag, whole_number
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of
from dask_image_ingest.loader.formats import Format, batch_of, converter
from dask_image_ingest.loader.normalize import parse_normalize
from dask_image_ingest.loader.order import Buffer, Order, Position, Shuffle, Size, parse_start
from dask_image_ingest.loader.read_ahead import ReadAhead
from dask_image_ingest.loader.rows import Rows
from dask_image_ingest.loader.source import Source
from dask_image_ingest.loader.steps import portions

__all__ = ["Batches"]


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
        """Where the next batch begins.

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
