"""Reads rows of a frame by their numbers, and holds the partitions that are in use."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from dask_image_ingest.loader.batch_format import PendingRows, RowsOf
from dask_image_ingest.loader.order import CHUNK, Rows
from dask_image_ingest.loader.source import FrameSource, check_count

# Encoded bytes of neighbouring rows that are fetched together, if a row has not more.
_CHUNK_BYTES = 4 << 20

# Partitions of references that are held for rows whose batches come at any time.
_MOST_HELD = 256


class Reader:
    """Reads rows of a source that is open.

    Parameters
    ----------
    source
        Source of the rows.
    counts
        Rows of each partition: int64 (partitions,).
    rows_of
        Takes the rows that have images from a frame.
    first
        Number of the first row.
    """

    def __init__(
        self, source: FrameSource, counts: np.ndarray, rows_of: RowsOf, first: int = 0
    ) -> None:
        self.fetches_ahead = source.fetches_ahead
        self._source = source
        self._rows_of = rows_of
        self._ends = first + np.cumsum(counts)
        self._starts = self._ends - counts
        self._partitions: dict[int, Any] = {}
        # Numbers of the rows that are being fetched and were not started, in order.
        self._fetched = np.empty(0, np.int64)

    def start(self, rows: Rows, shape: tuple[int, int] | None) -> PendingRows:
        """Start to read rows.

        ``shape`` is the height and width to which they are decoded; None for that of the read.
        """
        parts, order = self._by_partition(rows.numbers)
        self._fetched = np.setdiff1d(self._fetched, rows.numbers)
        return self._source.take(parts, order, rows.draws, shape, self._rows_of)

    def row_bytes(self) -> float:
        """Decoded bytes of a row, on average."""
        first = self._first_partition
        return self._source.row_bytes(first, lambda: self._held(first))

    def keep(self, rows: np.ndarray | None) -> None:
        """Drop all partitions but those of some rows; None for all but the latest."""
        if rows is None:
            while len(self._partitions) > _MOST_HELD:
                self._partitions.pop(next(iter(self._partitions)))
            return
        numbers = set(self._partition_of(rows).tolist())
        self._partitions = {
            number: held for number, held in self._partitions.items() if number in numbers
        }

    def expect(self, soon: np.ndarray, later: np.ndarray) -> None:
        """Start fetching rows that come soon, and those of their chunks that come later.

        Parameters
        ----------
        soon, later
            Numbers of rows that this process starts to read next, and after that: int64.
        """
        new = np.setdiff1d(soon, self._fetched)
        if not len(new):
            return
        rows = np.setdiff1d(np.union1d(new, later), self._fetched)
        chunk = self._chunk_of(rows)
        is_wanted = np.isin(chunk, self._chunk_of(new))
        rows, chunk = rows[is_wanted], chunk[is_wanted]
        # The chunk whose row comes first is fetched first.
        place = {number: place for place, number in enumerate(soon.tolist())}
        groups = np.split(rows, np.flatnonzero(np.diff(chunk)) + 1)
        groups.sort(key=lambda group: min(place.get(row, len(soon)) for row in group.tolist()))
        for group in groups:
            partition = int(self._partition_of(group[:1])[0])
            self._source.fetch(self._held(partition), group - self._starts[partition])
        self._fetched = np.union1d(self._fetched, rows)

    def _chunk_of(self, numbers: np.ndarray) -> np.ndarray:
        """The first row of each row's chunk."""
        place = numbers - self._starts[self._partition_of(numbers)]
        chunk: np.ndarray = numbers - place % self._chunk
        return chunk

    @functools.cached_property
    def _chunk(self) -> int:
        """Rows of a chunk that are fetched together."""
        mean = self._source.encoded_bytes(self._held(self._first_partition))
        return int(np.clip(_CHUNK_BYTES // max(1.0, mean), 1, CHUNK))

    @property
    def _first_partition(self) -> int:
        """The first partition with rows."""
        return int(np.argmax(self._ends > self._starts))

    def _partition_of(self, rows: np.ndarray) -> np.ndarray:
        """The number of each row's partition."""
        return np.searchsorted(self._ends, rows, "right")

    def _by_partition(self, rows: np.ndarray) -> tuple[list[tuple[Any, np.ndarray]], np.ndarray]:
        """Each partition with its rows to take, and the order of all these rows.

        Without rows, as a rank may be in the last step, no row of the first partition.
        """
        if not len(rows):
            return [(self._held(0), rows)], rows
        partition = self._partition_of(rows)
        by_partition = np.argsort(partition, kind="stable")
        order = np.empty(len(rows), np.int64)
        order[by_partition] = np.arange(len(rows))
        distinct, begins = np.unique(partition[by_partition], return_index=True)
        parts = [
            (self._held(number), rows[places] - self._starts[number])
            for number, places in zip(
                distinct.tolist(), np.split(by_partition, begins[1:]), strict=True
            )
        ]
        return parts, order

    def _held(self, number: int) -> Any:
        """A partition, which is read when it is first asked for."""
        if number not in self._partitions:
            future = self._source.read(number)
            counted = int(self._ends[number] - self._starts[number])
            describe = functools.partial(self._source.describe, number)
            self._partitions[number] = self._source.hold(
                lambda: check_count(future.result(), counted, describe), self._rows_of
            )
        return self._partitions[number]
