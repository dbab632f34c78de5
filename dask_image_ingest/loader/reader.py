"""Reads rows of a frame by their numbers: from references, or from partitions computed whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend
from dask_image_ingest.loader.batch_format import BatchRows
from dask_image_ingest.loader.order import CHUNK, Rows
from dask_image_ingest.loader.source import ReferenceSource, Source, check_count

# Encoded bytes of neighbouring rows that are fetched together, if a row has not more.
_CHUNK_BYTES = 4 << 20

# Partitions of references that are held for rows whose batches come at any time.
_MOST_HELD = 256

# Takes rows with images from a partition: `rows_of` with some of its arguments.
RowsOf = Callable[..., tuple[BatchRows, np.ndarray]]


def open_reader(source: Source, counts: np.ndarray, rows_of: RowsOf, backend: Backend) -> Reader:
    """The reader for a source that is open.

    Parameters
    ----------
    source
        Source of the rows.
    counts
        Rows of each partition: int64 (partitions,).
    rows_of
        Takes the rows that have images from a frame.
    backend
        Backend of the frame.
    """
    kind = _ReferenceReader if isinstance(source, ReferenceSource) else _PartitionReader
    return kind(source, counts, rows_of, backend)


def rows_between(rows: BatchRows, present: np.ndarray, start: int, stop: int) -> BatchRows:
    """Those of ``rows`` whose places, ``present`` in order, are from ``start`` to ``stop``."""
    first, last = np.searchsorted(present, [start, stop]).tolist()
    return rows.take(range(first, last))


def row_of(source: Source, partition: int, row: int) -> str:
    """Name of a row in errors."""
    return f"row {row} of {source.describe(partition)}"


class Reader:
    """Reads rows of a frame by their numbers, and holds the partitions that are in use."""

    def __init__(self, source: Any, counts: np.ndarray, rows_of: RowsOf, backend: Backend) -> None:
        self._source = source
        self._rows_of = rows_of
        self._backend = backend
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        self._partitions: dict[int, Any] = {}

    def row_bytes(self) -> float:
        """Decoded bytes of a row, on average."""
        return self._source.row_bytes(int(np.argmax(self._ends > self._starts))) or 1.0

    @property
    def fetches_ahead(self) -> bool:
        """True if `expect` does something."""
        return False

    def expect(self, soon: np.ndarray, later: np.ndarray) -> None:
        """Start fetching rows that come soon, and those near them that come later.

        Parameters
        ----------
        soon, later
            Numbers of rows that this process starts to read next, and after that: int64.
        """

    def keep(self, rows: np.ndarray | None) -> None:
        """Drop all partitions but those of some rows; None for all but the latest."""
        if rows is None:
            while len(self._partitions) > _MOST_HELD:
                self._partitions.pop(next(iter(self._partitions)))
            return
        numbers = set(np.searchsorted(self._ends, rows, "right").tolist())
        self._partitions = {
            number: held for number, held in self._partitions.items() if number in numbers
        }

    def start(
        self, rows: Rows, shape: tuple[int, int] | None
    ) -> Callable[[], tuple[BatchRows, np.ndarray]]:
        """Start to read rows: their result, with the places of those that have an image.

        ``shape`` is the height and width to which they are decoded; None for that of the read.
        """
        raise NotImplementedError

    def _parts(self, numbers: np.ndarray) -> tuple[list[tuple[Any, np.ndarray]], np.ndarray]:
        """Each partition with its rows to take, and the order of all these rows.

        Without rows, as a rank may be in the last step, no row of the first partition.
        """
        if not len(numbers):
            return [(self._read(0), numbers)], numbers
        partition = np.searchsorted(self._ends, numbers, "right")
        by_partition = np.argsort(partition, kind="stable")
        order = np.empty(len(numbers), np.int64)
        order[by_partition] = np.arange(len(numbers))
        parts = []
        distinct, begins = np.unique(partition[by_partition], return_index=True)
        for number, rows in zip(distinct.tolist(), np.split(by_partition, begins[1:]), strict=True):
            parts.append((self._part(number), numbers[rows] - self._starts[number]))
        return parts, order

    def _part(self, number: int) -> Any:
        if number not in self._partitions:
            self._partitions[number] = self._read(number)
        return self._partitions[number]

    def _read(self, number: int) -> Any:
        """The future of a partition."""
        counted = int(self._ends[number] - self._starts[number])
        describe = functools.partial(self._source.describe, number)
        return _Counted(self._source.read(number), counted, describe)

    def _describe(self, number: int) -> str:
        partition = int(np.searchsorted(self._ends, number, "right"))
        return row_of(self._source, partition, number - int(self._starts[partition]))


class _ReferenceReader(Reader):
    """Decodes rows of references."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Numbers of the rows that are being fetched and were not started, in order.
        self._fetched = np.empty(0, np.int64)

    @property
    def fetches_ahead(self) -> bool:
        """True if images are fetched from a server."""
        return bool(self._source.fetches_ahead)

    def expect(self, soon: np.ndarray, later: np.ndarray) -> None:
        """Start fetching rows that come soon, and those of their chunks that come later."""
        new = np.setdiff1d(soon, self._fetched)
        if not len(new):
            return
        chunks = np.unique(self._chunk_of(new))
        rows = np.setdiff1d(np.union1d(new, later), self._fetched)
        chunk = self._chunk_of(rows)
        wanted = np.isin(chunk, chunks)
        rows, chunk = rows[wanted], chunk[wanted]
        edges = np.flatnonzero(np.diff(chunk)) + 1
        groups = np.split(rows, edges)
        # The first that is needed is fetched first.
        place = np.full(len(rows), len(soon))
        _, at, first = np.intersect1d(rows, soon, return_indices=True)
        place[at] = first
        firsts = [int(places.min()) for places in np.split(place, edges)]
        for number in np.argsort(firsts, kind="stable").tolist():
            numbers = groups[number]
            partition = int(np.searchsorted(self._ends, numbers[0], "right"))
            self._source.fetch(self._part(partition), numbers - self._starts[partition])
        self._fetched = np.union1d(self._fetched, rows)

    def _chunk_of(self, numbers: np.ndarray) -> np.ndarray:
        """The first row of each row's chunk."""
        start = self._starts[np.searchsorted(self._ends, numbers, "right")]
        chunk: np.ndarray = numbers - (numbers - start) % self._chunk
        return chunk

    @functools.cached_property
    def _chunk(self) -> int:
        """Rows of a chunk that are fetched together."""
        partition = int(np.argmax(self._ends > self._starts))
        mean = self._source.encoded_bytes(self._part(partition))
        return int(np.clip(_CHUNK_BYTES // max(1.0, mean), 1, CHUNK))

    def start(
        self, rows: Rows, shape: tuple[int, int] | None
    ) -> Callable[[], tuple[BatchRows, np.ndarray]]:
        """Start to decode rows."""
        parts, order = self._parts(rows.numbers)
        self._fetched = np.setdiff1d(self._fetched, rows.numbers)
        future = self._source.decode(parts, order, rows.draws, shape)

        def result() -> tuple[BatchRows, np.ndarray]:
            frame = future.result()
            place = frame.index.to_numpy()
            numbers = rows.numbers[place] if len(rows.numbers) else place
            batch, present = self._rows_of(frame, where=lambda row: self._describe(numbers[row]))
            return batch, place[present]

        return result


class _PartitionReader(Reader):
    """Takes rows from partitions that are computed whole."""

    def start(
        self, rows: Rows, shape: tuple[int, int] | None
    ) -> Callable[[], tuple[BatchRows, np.ndarray]]:
        """Start to compute the partitions of rows."""
        if shape is not None:
            raise ArgumentError(
                "buckets= decides the size of a decode, and this query does not end with one: take "
                "the frame as it was read, or rows of references, with dii.decode_images"
            )
        parts, order = self._parts(rows.numbers)
        return functools.partial(self._taken, parts, order)

    def _read(self, number: int) -> Any:
        describe = functools.partial(row_of, self._source, number)
        return _Partition(super()._read(number), functools.partial(self._rows_of, where=describe))

    def _taken(
        self, parts: list[tuple[_Partition, np.ndarray]], order: np.ndarray
    ) -> tuple[BatchRows, np.ndarray]:
        taken, has_image = [], []
        for partition, numbers in parts:
            place = partition.places[numbers]
            has_image.append(place >= 0)
            taken.append(partition.rows.take(place[place >= 0]))
        joined = BatchRows.of(taken, self._backend)
        if not len(order):
            return joined, order
        # The position of each row among all; of the joined ones among themselves.
        present = np.concatenate(has_image)
        joined_place = np.cumsum(present) - 1
        here = np.flatnonzero(present[order])
        return joined.take(joined_place[order[here]]), here


class _Counted:
    """The future of a partition that must have as many rows as were counted."""

    def __init__(self, future: Future[Any], counted: int, describe: Callable[[], str]) -> None:
        self._future = future
        self._counted = counted
        self._describe = describe

    def result(self) -> Any:
        """The partition."""
        return check_count(self._future.result(), self._counted, self._describe)


class _Partition:
    """A computed partition; its rows are taken when they are first asked for."""

    def __init__(self, future: _Counted, rows_of: RowsOf) -> None:
        self._future: _Counted | None = future
        self._rows_of = rows_of

    @functools.cached_property
    def _rows_and_places(self) -> tuple[BatchRows, np.ndarray]:
        assert self._future is not None
        frame, self._future = self._future.result(), None
        rows, present = self._rows_of(frame)
        places = np.full(len(frame), -1)
        places[present] = np.arange(len(present))
        return rows, places

    @property
    def rows(self) -> BatchRows:
        """The rows that have an image."""
        return self._rows_and_places[0]

    @property
    def places(self) -> np.ndarray:
        """Number of each row of the partition among `rows`; -1 for one without an image."""
        return self._rows_and_places[1]
