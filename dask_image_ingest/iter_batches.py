"""``iter_batches``: a frame as a stream of batches, of which a few partitions are in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import numpy as np

from dask_image_ingest.batch_order import Position, Shuffle
from dask_image_ingest.batch_rows import Rows, rows_of
from dask_image_ingest.batch_source import Source
from dask_image_ingest.batches import check_batch_size
from dask_image_ingest.errors import ArgumentError, MissingDependencyError
from dask_image_ingest.frames import Backend, backend_of
from dask_image_ingest.frames.joined import joined

Format = Literal["numpy", "cupy", "torch"]


class Batches:
    """An iterator of batches that knows its place; its arguments are those of ``iter_batches``.

    Raises
    ------
    ArgumentError, MissingDependencyError

    Attributes
    ----------
    position : Position
        Where the batch after the last one begins. Give it to ``start=`` to go on from there: no
        partition before it is read again.
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
    ) -> None:
        check_batch_size(batch_size)
        if prefetch is not None and prefetch < 0:
            raise ArgumentError(f"prefetch={prefetch}; pass how many partitions to read ahead")
        if shuffle is not None and (isinstance(shuffle, bool) or shuffle < 0):
            raise ArgumentError(f"shuffle={shuffle!r}; pass a seed, a number from 0, or None")
        if isinstance(start, int) and start < 0:
            raise ArgumentError(f"start={start}; pass how many batches to skip, or a position")
        self._source = source
        self._image = image
        self._backend = backend_of(meta)
        self._size = batch_size
        self._drop_last = drop_last
        self._prefetch = prefetch
        self._convert = _converter(format, self._backend)
        self._shuffle = None if shuffle is None else Shuffle(shuffle, source.partitions)
        skip = batch_size * start if isinstance(start, int) else 0
        self.position = Position(0, 0) if isinstance(start, int) else Position(*start)
        self._waiting: deque[tuple[int, Future]] = deque()
        self._upcoming: Iterator[int] = iter(())
        self._depth = 0
        self._stream = self._batches(skip)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> dict[str, Any]:
        return next(self._stream)

    def close(self) -> None:
        """Stop reading ahead and let go of what was read; the end of the loop does so too."""
        self._stream.close()

    def _batches(self, skip: int) -> Generator[dict[str, Any], None, None]:
        if skip:
            self.position = self._find(skip)
        carried: Rows | None = None
        for place, rows in self._steps():
            at = 0
            if carried is not None:
                at = min(self._size - len(carried), len(rows))
                carried = Rows.of([carried, rows.take(range(at))], self._backend)
                if len(carried) < self._size:
                    continue
                self.position = place.after(at, of=len(rows))
                batch, carried = self._converted(carried), None
                yield batch
                del batch
                self._read_on()
            while len(rows) - at >= self._size:
                at += self._size
                self.position = place.after(at, of=len(rows))
                yield self._converted(rows.take(range(at - self._size, at)))
                self._read_on()
            if at < len(rows):
                carried = rows.take(range(at, len(rows))).copied()
            # Before the next partition is asked for.
            del rows
        self.position = Position(self._source.partitions + (self._shuffle is not None), 0)
        if carried is not None and not self._drop_last:
            yield self._converted(carried)

    def _steps(self) -> Iterator[tuple[Position, Rows]]:
        """The rows in order, in portions of about a partition, from the position on."""
        first, skip = self.position
        if self._shuffle is None:
            for number, frame in self._ahead(range(first, self._source.partitions), 0):
                rows = self._rows(frame)
                del frame
                at, skip = min(skip, len(rows)), 0
                yield Position(number, at), rows.take(range(at, len(rows)))
                del rows
            return
        # The rows that were put back are of the partition before.
        order = self._shuffle.order[max(0, first - 1) :]
        step = max(0, first - 1)
        buffered: Rows | None = None
        # The buffer counts as a partition.
        for _, frame in self._ahead(order, 1):
            rows = self._rows(frame)
            del frame
            now, later = self._shuffle.split(step, len(rows))
            if step >= first:
                mixed = self._mixed(step, [buffered, rows.take(now)])
                at, skip = min(skip, len(mixed)), 0
                yield Position(step, at), mixed.take(range(at, len(mixed)))
                del mixed
            buffered = None  # before the next one takes memory
            buffered = rows.take(later).copied()
            del rows
            step += 1
        if buffered is not None:
            mixed = self._mixed(step, [buffered])
            yield Position(step, skip), mixed.take(range(min(skip, len(mixed)), len(mixed)))

    def _mixed(self, step: int, parts: list[Rows | None]) -> Rows:
        rows = Rows.of([part for part in parts if part is not None], self._backend)
        assert self._shuffle is not None
        return rows.take(self._shuffle.mix(step, len(rows)))

    def _ahead(self, numbers: Sequence[int], less: int) -> Iterator[tuple[int, Any]]:
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
                    yield self._taken()
        finally:
            self._waiting.clear()

    def _taken(self) -> tuple[int, Any]:
        number, future = self._waiting.popleft()
        return number, future.result()

    def _read_on(self, at_least: int = 0) -> None:
        """Begin to read the next partitions, as far ahead as we may.

        Not before the first batch of a partition is handed out: until then the caller still has the
        last batch of the partition before, and with it that partition's memory.
        """
        while len(self._waiting) < max(self._depth, at_least):
            number = next(self._upcoming, None)
            if number is None:
                return
            self._waiting.append((number, self._source.read(number)))

    def _rows(self, frame: Any) -> Rows:
        return rows_of(frame, self._image, self._backend)

    def _find(self, skip: int) -> Position:
        """The position after so many images, found by counting those of each partition."""
        order = range(self._source.partitions) if self._shuffle is None else self._shuffle.order
        buffered = 0
        with self._source as source:
            for step, number in enumerate(order):
                count = source.count(number)
                now = count
                if self._shuffle is not None:
                    now = buffered + len(self._shuffle.split(step, count)[0])
                    buffered = buffered + count - now
                if skip < now:
                    return Position(step, skip)
                skip -= now
        return Position(len(order), skip)

    def _converted(self, rows: Rows) -> dict[str, Any]:
        images = joined(rows.images, self._backend)
        pixels = [self._convert(i) for i in images] if isinstance(images, list) else None
        columns = {name: self._convert(values) for name, values in rows.columns.items()}
        return {self._image: self._convert(images) if pixels is None else pixels, **columns}


def _converter(format: Format, backend: Backend) -> Callable[[Any], Any]:
    """What turns an array of the backend into what the caller wants; objects stay objects."""
    if format == "numpy":
        return lambda array: array if isinstance(array, np.ndarray) else backend.host(array)
    if format not in ("cupy", "torch"):
        raise ArgumentError(f"format={format!r}; choose 'numpy', 'cupy' or 'torch'")
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
