"""Reads rows of a frame by their numbers: from references, or from partitions computed whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend
from dask_image_ingest.loader.batch_format import BatchRows
from dask_image_ingest.loader.order import CHUNK, Rows
from dask_image_ingest.loader.source import FrameSource, Reading, ReferenceSource, check_count

# Encoded bytes of neighbouring rows that are fetched together, if a row has not more.
_CHUNK_BYTES = 4 << 20

# Partitions of references that are held for rows whose batches come at any time.
_MOST_HELD = 256

# Takes rows with images from a partition: `rows_of` with some of its arguments.
RowsOf = Callable[[Any], tuple[BatchRows, np.ndarray]]

# Waits for rows: those that have an image, and the places of these among all.
Result = Callable[[], tuple[BatchRows, np.ndarray]]

AnySource = TypeVar("AnySource", bound=FrameSource)
Part = TypeVar("Part")


def open_reader(
    source: FrameSource, counts: np.ndarray, rows_of: RowsOf, backend: Backend
) -> Reader[Any, Any]:
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
    if isinstance(source, ReferenceSource):
        return _ReferenceReader(source, counts, rows_of, backend)
    return _PartitionReader(source, counts, rows_of, backend)


def rows_between(rows: BatchRows, present: np.ndarray, start: int, stop: int) -> BatchRows:
    """Those of ``rows`` whose places, ``present`` in order, are from ``start`` to ``stop``."""
    first, last = np.searchsorted(present, [start, stop]).tolist()
    return rows.take(range(first, last))


class Reader(Generic[AnySource, Part]):
    """Reads rows of a frame by their numbers, and holds the partitions that are in use."""

    #: Whether `expect` does something: images are fetched from a server.
    fetches_ahead = False

    def __init__(
        self, source: AnySource, counts: np.ndarray, rows_of: RowsOf, backend: Backend
    ) -> None:
        self._source = source
        self._rows_of = rows_of
        self._backend = backend
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        self._partitions: dict[int, Part] = {}

    def start(self, rows: Rows, shape: tuple[int, int] | None) -> Result:
        """Start to read rows.

        ``shape`` is the height and width to which they are decoded; None for that of the read.
        """
        raise NotImplementedError

    def expect(self, soon: np.ndarray, later: np.ndarray) -> None:
        """Start fetching rows that come soon, and those of their chunks that come later.

        Parameters
        ----------
        soon, later
            Numbers of rows that this process starts to read next, and after that: int64.
        """

    def row_bytes(self) -> float:
        """Decoded bytes of a row, on average."""
        return self._source.row_bytes(int(np.argmax(self._ends > self._starts)))

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

    def _partition_of(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._ends, rows, "right")

    def _parts(self, rows: np.ndarray) -> tuple[list[tuple[Part, np.ndarray]], np.ndarray]:
        """Each partition with its rows to take, and the order of all these rows.

        Without rows, as a rank may be in the last step, no row of the first partition.
        """
        if not len(rows):
            return [(self._part(0), rows)], rows
        partition = self._partition_of(rows)
        by_partition = np.argsort(partition, kind="stable")
        order = np.empty(len(rows), np.int64)
        order[by_partition] = np.arange(len(rows))
        distinct, begins = np.unique(partition[by_partition], return_index=True)
        parts = [
            (self._part(number), rows[places] - self._starts[number])
            for number, places in zip(
                distinct.tolist(), np.split(by_partition, begins[1:]), strict=True
            )
        ]
        return parts, order

    def _part(self, number: int) -> Part:
        if number not in self._partitions:
            future = self._source.read(number)
            counted = int(self._ends[number] - self._starts[number])
            describe = functools.partial(self._source.describe, number)
            self._partitions[number] = self._read(
                number, lambda: check_count(future.result(), counted, describe)
            )
        return self._partitions[number]

    def _read(self, number: int, reading: Reading) -> Part:
        """A partition that is being read, as it is held."""
        raise NotImplementedError


class _ReferenceReader(Reader[ReferenceSource, Reading]):
    """Decodes rows of references."""

    def __init__(
        self, source: ReferenceSource, counts: np.ndarray, rows_of: RowsOf, backend: Backend
    ) -> None:
        super().__init__(source, counts, rows_of, backend)
        self.fetches_ahead = source.fetches_ahead
        # Numbers of the rows that are being fetched and were not started, in order.
        self._fetched = np.empty(0, np.int64)

    def _read(self, number: int, reading: Reading) -> Reading:
        return reading

    def start(self, rows: Rows, shape: tuple[int, int] | None) -> Result:
        """Start to decode rows."""
        numbers = rows.numbers
        parts, order = self._parts(numbers)
        self._fetched = np.setdiff1d(self._fetched, numbers)
        future = self._source.decode(parts, order, rows.draws, shape)

        def result() -> tuple[BatchRows, np.ndarray]:
            frame = future.result()
            place = frame.index.to_numpy()
            batch, present = self._rows_of(frame)
            return batch, place[present]

        return result

    def expect(self, soon: np.ndarray, later: np.ndarray) -> None:
        """Start fetching rows that come soon, and those of their chunks that come later."""
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
            self._source.fetch(self._part(partition), group - self._starts[partition])
        self._fetched = np.union1d(self._fetched, rows)

    def _chunk_of(self, numbers: np.ndarray) -> np.ndarray:
        """The first row of each row's chunk."""
        chunk: np.ndarray = numbers - (numbers - self._starts[self._partition_of(numbers)]) % (
            self._chunk
        )
        return chunk

    @functools.cached_property
    def _chunk(self) -> int:
        """Rows of a chunk that are fetched together."""
        partition = int(np.argmax(self._ends > self._starts))
        mean = self._source.encoded_bytes(self._part(partition))
        return int(np.clip(_CHUNK_BYTES // max(1.0, mean), 1, CHUNK))


class _PartitionReader(Reader[FrameSource, "_Partition"]):
    """Takes rows from partitions that are computed whole."""

    def _read(self, number: int, reading: Reading) -> _Partition:
        return _Partition(reading, self._rows_of)

    def start(self, rows: Rows, shape: tuple[int, int] | None) -> Result:
        """Start to compute the partitions of rows."""
        if shape is not None:
            raise ArgumentError(
                "buckets= decides the size of a decode, and this query does not end with one: take "
                "the frame as it was read, or rows of references, with dii.decode_images"
            )
        parts, order = self._parts(rows.numbers)
        return functools.partial(self._taken, parts, order)

    def _taken(
        self, parts: list[tuple[_Partition, np.ndarray]], order: np.ndarray
    ) -> tuple[BatchRows, np.ndarray]:
        taken, has_image = [], []
        for partition, numbers in parts:
            rows, places = partition.rows_and_places
            place = places[numbers]
            has_image.append(place >= 0)
            taken.append(rows.take(place[place >= 0]))
        joined = BatchRows.of(taken, self._backend)
        if not len(order):
            return joined, order
        # The position of each row among all; of the joined ones among themselves.
        present = np.concatenate(has_image)
        joined_place = np.cumsum(present) - 1
        here = np.flatnonzero(present[order])
        return joined.take(joined_place[order[here]]), here


class _Partition:
    """A computed partition; its rows are taken when they are first asked for."""

    def __init__(self, reading: Reading, rows_of: RowsOf) -> None:
        self._reading: Reading | None = reading
        self._rows_of = rows_of

    @functools.cached_property
    def rows_and_places(self) -> tuple[BatchRows, np.ndarray]:
        """The rows that have an image, and the number of each row of all among them, else -1."""
        assert self._reading is not None
        frame, self._reading = self._reading(), None
        rows, present = self._rows_of(frame)
        places = np.full(len(frame), -1)
        places[present] = np.arange(len(present))
        return rows, places
