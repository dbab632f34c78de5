"""``iter_batches``: a frame as a stream of batches, of which a few partitions are in memory."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import numpy as np

from dask_image_ingest.arguments import check_flag, whole_number
from dask_image_ingest.errors import MissingDependencyError
from dask_image_ingest.frames import Backend, backend_of, joined
from dask_image_ingest.loader.order import Order, Position, Shuffle, parse_start
from dask_image_ingest.loader.rows import Rows, rows_of
from dask_image_ingest.loader.source import Source

Format = Literal["numpy", "cupy", "torch"]
FORMATS = ("numpy", "cupy", "torch")


class Batches:
    """An iterator of batches that knows its place; its arguments are those of ``iter_batches``.

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
        shuffle: int | None,
        drop_last: bool,
        prefetch: int | None,
        start: int | Sequence[int],
        shard: tuple[int, int],
    ) -> None:
        self._source = source
        self._image = image
        self._backend = backend_of(meta)
        self._size = whole_number("batch_size", batch_size, 1, "pass a positive number of images")
        check_flag("drop_last", drop_last)
        self._drop_last = drop_last
        self._prefetch = prefetch
        if prefetch is not None:
            advice = "pass how many partitions to read ahead"
            self._prefetch = whole_number("prefetch", prefetch, 0, advice)
        self._convert = _converter(format, self._backend)
        self._order = Order(source.partitions, shard)
        if shuffle is not None:
            seed = whole_number("shuffle", shuffle, 0, "pass a seed, a number from 0, or None")
            self._order = Shuffle(seed, source.partitions, shard)
        begin = parse_start(start, self._order.end)
        self._skip = 0 if isinstance(begin, Position) else begin * self._size
        self._position = begin if isinstance(begin, Position) else Position(0, 0)
        if not self._order.partitions and shard[1] > 1:
            _warn_of_no_share(source.partitions, shard)
        self._waiting: deque[Future] = deque()
        self._upcoming: Iterator[int] = iter(())
        self._depth = 0
        self._stream = self._batches()

    @property
    def position(self) -> Position:
        """Where the batch after the last one begins.

        Give it to ``start=`` to go on from there: no partition before it is read again.
        """
        if self._skip:
            self._position, self._skip = self._find(self._skip), 0
        return self._position

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> dict[str, Any]:
        return next(self._stream)

    def close(self) -> None:
        """Stop reading ahead and let go of what was read; the end of the loop does so too."""
        self._stream.close()

    def _batches(self) -> Generator[dict[str, Any], None, None]:
        carried: Rows | None = None
        for place, rows in self._steps():
            at = 0
            if carried is not None:
                at = min(self._size - len(carried), len(rows))
                carried = Rows.of([carried, rows.take(range(at))], self._backend)
                if len(carried) < self._size:
                    continue
                self._position = place.after(at, of=len(rows))
                batch, carried = self._converted(carried), None
                yield batch
                del batch
                self._read_on()
            while len(rows) - at >= self._size:
                at += self._size
                self._position = place.after(at, of=len(rows))
                yield self._converted(rows.take(range(at - self._size, at)))
                self._read_on()
            if at < len(rows):
                carried = rows.take(range(at, len(rows))).copied()
            # Before the next partition is asked for.
            del rows
        self._position = self._order.end
        if carried is not None and not self._drop_last:
            yield self._converted(carried)

    def _steps(self) -> Iterator[tuple[Position, Rows]]:
        """The rows in order, in portions of about a partition, from the position on."""
        begin = self.position
        if isinstance(self._order, Shuffle):
            yield from self._shuffled(begin, self._order)
            return
        step = begin.partition
        for frame in self._ahead(self._order.partitions[step:], 0):
            rows = self._rows(frame)
            del frame
            yield _from(begin, step, rows)
            del rows
            step += 1

    def _shuffled(self, begin: Position, order: Shuffle) -> Iterator[tuple[Position, Rows]]:
        # The rows that were put back are of the partition before.
        step = max(0, begin.partition - 1)
        buffered: Rows | None = None
        # The buffer counts as a partition.
        for frame in self._ahead(order.partitions[step:], 1):
            rows = self._rows(frame)
            del frame
            now, later = order.split(step, len(rows))
            if step >= begin.partition:
                mixed = self._mixed(order, step, [buffered, rows.take(now)])
                yield _from(begin, step, mixed)
                del mixed
            buffered = None  # before the next one takes memory
            buffered = rows.take(later).copied()
            del rows
            step += 1
        if buffered is not None:
            yield _from(begin, step, self._mixed(order, step, [buffered]))

    def _mixed(self, order: Shuffle, step: int, parts: list[Rows | None]) -> Rows:
        rows = Rows.of([part for part in parts if part is not None], self._backend)
        return rows.take(order.mix(step, len(rows)))

    def _ahead(self, numbers: Sequence[int], less: int) -> Iterator[Any]:
        """Partitions in this order, the following ones read meanwhile."""
        prefetch = self._source.prefetch(less) if self._prefetch is None else self._prefetch
        self._depth = max(1, prefetch - less) if prefetch else 0
        self._upcoming = iter(numbers)
        try:
            with self._source:
                self._read_on()
                while True:
                    if not self._waiting:
                        self._read_on(at_least=1)
                    if not self._waiting:
                        return
                    # Not bound to a name, which would keep it.
                    yield self._waiting.popleft().result()
        finally:
            self._waiting.clear()

    def _read_on(self, at_least: int = 0) -> None:
        """Begin to read the next partitions, as far ahead as we may.

        Not before the first batch of a partition is handed out: until then the caller still has the
        last batch of the partition before, and with it that partition's memory.
        """
        while len(self._waiting) < max(self._depth, at_least):
            number = next(self._upcoming, None)
            if number is None:
                return
            self._waiting.append(self._source.read(number))

    def _rows(self, frame: Any) -> Rows:
        return rows_of(frame, self._image, self._backend)

    def _find(self, skip: int) -> Position:
        """The position after so many images, found by counting those of each partition."""
        buffered = 0
        with self._source as source:
            for step, number in enumerate(self._order.partitions):
                count = source.count(number)
                now = count
                if isinstance(self._order, Shuffle):
                    now = buffered + len(self._order.split(step, count)[0])
                    buffered = buffered + count - now
                if skip < now:
                    return Position(step, skip)
                skip -= now
        return Position(len(self._order.partitions), skip) if skip < buffered else self._order.end

    def _converted(self, rows: Rows) -> dict[str, Any]:
        images = joined(rows.images, self._backend)
        pixels = [self._convert(i) for i in images] if isinstance(images, list) else None
        columns = {name: self._convert(values) for name, values in rows.columns.items()}
        return {self._image: self._convert(images) if pixels is None else pixels, **columns}


def _from(begin: Position, step: int, rows: Rows) -> tuple[Position, Rows]:
    """Where these rows of a step begin, and they themselves: without those before ``begin``."""
    skip = begin.rows_to_skip(len(rows)) if step == begin.partition else 0
    return Position(step, skip), rows.take(range(skip, len(rows)))


def _warn_of_no_share(partitions: int, shard: tuple[int, int]) -> None:
    rank, world = shard
    warnings.warn(
        f"iter_batches: {world} processes share {partitions} partitions, and there is none for "
        f"this one, number {rank}: take fewer, or smaller partitions (partition_size=)",
        stacklevel=4,
    )


def _converter(format: Format, backend: Backend) -> Callable[[Any], Any]:
    """What turns an array of the backend into what the caller wants; objects stay objects."""
    if format == "numpy":
        return lambda array: array if isinstance(array, np.ndarray) else backend.host(array)
    try:
        if format == "cupy":
            from cupy import asarray as convert
        else:
            from torch.utils.dlpack import from_dlpack as convert
    except ImportError as error:
        raise MissingDependencyError(
            f"format={format!r} needs {format}, which is not installed: see its web page for the "
            "build that fits this machine"
        ) from error
    return lambda array: array.tolist() if array.dtype == object else convert(array)
