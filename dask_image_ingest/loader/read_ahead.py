"""Reading partitions before they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from dask_image_ingest.frames import Backend
from dask_image_ingest.loader.rows import Rows, rows_of
from dask_image_ingest.loader.source import Source

__all__ = ["ReadAhead"]


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
