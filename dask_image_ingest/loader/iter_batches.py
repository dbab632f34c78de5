"""``iter_batches``: a frame as a stream of batches, with a few partitions in memory at a time.

Partitions are read ahead (`ReadAhead`) and yield portions of rows, in order or shuffled
(`portions`). These are cut into batches, and converted to arrays or tensors (``batch_format``). A
shuffle mixes rows of decoded partitions; or it mixes references, and decodes them afterwards.

Variables are deleted before the next partition is read, so that not both are in memory. For the
same reason no loop of `portions` uses ``enumerate``, which keeps a reference to its last item.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, TypeVar

from dask.dataframe.dispatch import concat
from dask.utils import format_bytes

from dask_image_ingest.arguments import check_flag, number_of_bytes, shown, whole_number
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend, backend_of
from dask_image_ingest.loader.batch_format import (
    BatchRows,
    Format,
    batch_of,
    converter,
    parse_normalize,
    rows_of,
)
from dask_image_ingest.loader.order import Buffer, Order, Position, Shuffle, Size, parse_start
from dask_image_ingest.loader.source import ReferenceSource, Source

# Mixed references are decoded in pieces of at most so many encoded bytes (their pixels take about
# ten times as many) and rows.
_PIECE_BYTES, _PIECE_ROWS = 16 << 20, 1024

# Partitions to mix, below which a warning says that the shuffle is poor.
_MIN_MIXED = 4

Item = TypeVar("Item")


class Batches:
    """Iterator of batches, from :meth:`~pandas.DataFrame.images.iter_batches`.

    A new loop over a finished iterator starts again, with the same batches. A new loop over one
    that was left early, closed or failed continues where it stopped.
    """

    def __init__(
        self,
        source: Source,
        meta: Any,
        image: str,
        *,
        shape: str | None,
        batch_size: int,
        format: Format,
        normalize: Any,
        shuffle: int | None,
        shuffle_buffer: int | str | None,
        drop_last: bool,
        prefetch: int | None,
        start: int | Sequence[int],
        shard: tuple[int, int],
    ) -> None:
        self._source = source
        self._image = image
        self._shape = shape
        self._format = format
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
        # Batches still to skip before the position is known; 0 if start= was a position.
        self._skip = 0 if isinstance(begin, Position) else begin
        self._position = begin if isinstance(begin, Position) else Position(0, 0)
        if not self._order.partitions and shard[1] > 1:
            _warn_of_empty_shard(source.partitions, shard)
        self._stream = self._batches(convert=True)

    @property
    def position(self) -> Position:
        """Position of the next batch.

        Pass it as ``start=`` to resume there; partitions before it are not read again.
        """
        if self._skip:
            skip, self._skip = self._skip, 0
            skipped = self._batches(convert=False)
            deque(itertools.islice(skipped, min(skip, sys.maxsize)), maxlen=0)
            skipped.close()
        return self._position

    def __repr__(self) -> str:
        shape = "" if self._shape is None else f", {self._shape}"
        format = f"{self._format}, normalized" if self._normalize else self._format
        parts = [
            f"batches of {self._size} rows",
            f"{len(self._order.partitions)} partitions",
            *self._order.describe(),
            self._place_text(),
            f"images {self._image!r}{shape}, {format}",
        ]
        if others := [repr(name) for name in self._columns if name != self._image]:
            parts.append(f"columns {', '.join(others)}")
        return f"<{'; '.join(parts)}>"

    def _place_text(self) -> str:
        if self._skip:
            return f"after {self._skip} batches"
        if self._position >= self._order.end:
            return "at the end"
        return f"at partition {self._position.partition}, row {self._position.row}"

    def __iter__(self) -> Batches:
        if inspect.getgeneratorstate(self._stream) == inspect.GEN_CLOSED:
            if self._position >= self._order.end:
                self._position = Position(0, 0)
            self._stream = self._batches(convert=True)
        return self

    def __next__(self) -> dict[str, Any]:
        self._source.check_process()
        return next(self._stream)

    def close(self) -> None:
        """Stop reading ahead and free what was read, as the end of the iteration does."""
        self._stream.close()

    def _batches(self, convert: bool) -> Generator[dict[str, Any], None, None]:
        """Cut portions of rows into batches; rows left of a portion begin the next batch."""
        begin = self.position
        source = self._source_to_read()
        depth = source.prefetch() if self._prefetch is None else self._prefetch
        carried: BatchRows | None = None
        with source:
            ahead, stream = portions(self._order, begin, source, depth, self._image, self._backend)
            try:
                ahead.fill()
                for portion in stream:
                    rows, used = portion.rows, 0
                    if carried is not None:
                        used = min(self._size - len(carried), len(rows))
                        carried = BatchRows.of([carried, rows.take(range(used))], self._backend)
                        if len(carried) < self._size:
                            del portion, rows
                            continue
                        self._position = portion.position(used)
                        batch, carried = self._batch(carried, convert), None
                        yield batch
                        del batch
                        ahead.fill()
                    while len(rows) - used >= self._size:
                        used += self._size
                        self._position = portion.position(used)
                        yield self._batch(rows.take(range(used - self._size, used)), convert)
                        ahead.fill()
                    if used < len(rows):
                        # A copy: a view would keep the whole partition in memory.
                        carried = rows.take(range(used, len(rows))).copied()
                    del portion, rows  # before the next partition is read
            finally:
                stream.close()
                ahead.clear()
        self._position = self._order.end
        if carried is not None and not self._drop_last:
            yield self._batch(carried, convert)

    def _source_to_read(self) -> Source:
        """The source to read: references if a buffer of decoded partitions would be too large."""
        order = self._order
        references = self._source.references() if isinstance(order, Shuffle) else None
        if isinstance(order, Shuffle) and references is not None:
            for number in order.partitions:
                size = references.decoded_size(number)
                if size is None or size.nbytes:
                    large = size and order.buffer.overflows(size, len(order.partitions))
                    return references if large else self._source
        return self._source

    def _batch(self, rows: BatchRows, convert: bool) -> dict[str, Any]:
        if not convert:
            return {}
        return batch_of(rows, self._image, self._backend, self._convert, self._normalize)


def _order(partitions: int, shard: tuple[int, int], shuffle: Any, shuffle_buffer: Any) -> Order:
    if shuffle is None:
        if shuffle_buffer is not None:
            raise ArgumentError(
                f"shuffle_buffer={shown(shuffle_buffer)} is for a shuffle: pass a seed as shuffle="
            )
        return Order(partitions, shard)
    seed = whole_number("shuffle", shuffle, 0, "pass a seed, a number from 0, or None")
    return Shuffle(seed, partitions, shard, _buffer(shuffle_buffer))


def _buffer(shuffle_buffer: Any) -> Buffer:
    if shuffle_buffer is None:
        return Buffer()
    advice = "pass how many rows to mix, or bytes such as '2 GiB', or None"
    if isinstance(shuffle_buffer, str):
        nbytes = number_of_bytes(shuffle_buffer)
        if nbytes is None:
            raise ArgumentError(f"shuffle_buffer={shown(shuffle_buffer)}: {advice}")
        return Buffer(None, nbytes)
    return Buffer(whole_number("shuffle_buffer", shuffle_buffer, 1, advice))


def _warn_of_empty_shard(partitions: int, shard: tuple[int, int]) -> None:
    rank, world = shard
    warnings.warn(
        f"iter_batches: {world} processes share {partitions} partitions, and there is none for "
        f"this one, number {rank}: take fewer, or smaller partitions (partition_size=)",
        stacklevel=4,
    )


class Portion(NamedTuple):
    """Rows of one step of an order."""

    rows: BatchRows
    step: int
    numbers: Sequence[int]  # of each row within the step
    end: Position  # after the last row

    def position(self, row: int) -> Position:
        """The position of a row of the portion, or of its end."""
        return Position(self.step, int(self.numbers[row])) if row < len(self.rows) else self.end


def portions(
    order: Order, begin: Position, source: Source, depth: int, image: str, backend: Backend
) -> tuple[ReadAhead[Any], Generator[Portion, None, None]]:
    """The read-ahead, which the caller has to fill, and the portions of rows from ``begin`` on."""
    numbers = order.partitions[begin.partition :]
    ahead = ReadAhead(((number, source.read(number)) for number in numbers), depth)
    if not isinstance(order, Shuffle):
        return ahead, _in_order(begin, ahead, image, backend)
    sizes = order.history(begin.partition, source.size) if begin.partition else {}
    if not isinstance(source, ReferenceSource):
        return ahead, _shuffled(order, begin, ahead, sizes, image, backend)
    decodes = ReadAhead(_start_decodes(order, begin, ahead, sizes, source), depth)
    return decodes, _decoded(decodes, image, backend)


def _in_order(
    begin: Position, ahead: ReadAhead[int], image: str, backend: Backend
) -> Generator[Portion, None, None]:
    step = begin.partition
    for _, future in ahead:
        rows, _ = rows_of(future.result(), image, backend)
        del future
        yield _portion_from(begin, step, rows)
        del rows
        step += 1


def _shuffled(
    order: Shuffle,
    begin: Position,
    ahead: ReadAhead[int],
    sizes: dict[int, Size],
    image: str,
    backend: Backend,
) -> Generator[Portion, None, None]:
    """Portions of mixed rows, from a buffer of decoded partitions."""
    buffer: dict[int, BatchRows] = {}

    def read(number: int) -> Size:
        _, future = next(ahead)
        buffer[number], _ = rows_of(future.result(), image, backend)
        ahead.fill()
        return buffer[number].size

    for step, shares in order.steps(begin.partition, sizes, read):
        if step == begin.partition:
            _warn_of_poor_shuffle(order, step, len(shares))
        parts = [
            buffer[number].take(order.rows(number, len(buffer[number]))[share])
            for number, share in shares.items()
        ]
        buffer.pop(step)
        rows = BatchRows.of(parts, backend)
        del parts
        rows = rows.take(order.mix(step, len(rows)))
        yield _portion_from(begin, step, rows)
        del rows


def _warn_of_poor_shuffle(order: Shuffle, step: int, mixed: int) -> None:
    partitions = len(order.partitions)
    if order.buffer.rows is None and mixed < _MIN_MIXED and step + mixed < partitions:
        nbytes = format_bytes(order.buffer.nbytes)
        warnings.warn(
            f"iter_batches: shuffle= mixes {mixed} of {partitions} partitions at a time, since "
            f"more would be over {nbytes} of pixels. Allow more, shuffle_buffer='4 GiB', or read "
            "smaller partitions (partition_size=)",
            stacklevel=5,
        )


def _portion_from(begin: Position, step: int, rows: BatchRows) -> Portion:
    """Portion of a step's rows, without those before ``begin``."""
    skip = begin.rows_to_skip(len(rows)) if step == begin.partition else 0
    numbers = range(skip, len(rows))
    return Portion(rows.take(numbers), step, numbers, Position(step + 1, 0))


def _start_decodes(
    order: Shuffle,
    begin: Position,
    ahead: ReadAhead[int],
    sizes: dict[int, Size],
    source: ReferenceSource,
) -> Iterator[tuple[tuple[int, Position], Future[Any]]]:
    """Mix references and start to decode them, piece by piece: (step, end) and future of each.

    The index of the decoded rows is their number in the step.
    """
    buffer: dict[int, Any] = {}

    def read(number: int) -> Size:
        _, future = next(ahead)
        buffer[number] = future.result()
        ahead.fill()
        return Size(len(buffer[number]), 0)

    ahead.fill()
    for step, shares in order.steps(begin.partition, sizes, read):
        parts = [
            buffer[number].iloc[order.rows(number, len(buffer[number]))[share]]
            for number, share in shares.items()
        ]
        buffer.pop(step)
        rows = concat(parts)
        rows = rows.iloc[order.mix(step, len(rows))].reset_index(drop=True)
        skip = begin.rows_to_skip(len(rows)) if step == begin.partition else 0
        if skip == len(rows):
            continue
        for piece in source.pieces(rows.iloc[skip:], _PIECE_BYTES, _PIECE_ROWS):
            start, stop = skip + piece.start, skip + piece.stop
            end = Position(step + 1, 0) if stop == len(rows) else Position(step, stop)
            yield (step, end), source.decode(rows.iloc[start:stop])


def _decoded(
    ahead: ReadAhead[tuple[int, Position]], image: str, backend: Backend
) -> Generator[Portion, None, None]:
    for (step, end), future in ahead:
        frame = future.result()
        del future
        rows, present = rows_of(frame, image, backend)
        numbers = frame.index.to_numpy()[present]
        del frame
        yield Portion(rows, step, numbers, end)
        del rows


class ReadAhead(Generic[Item]):
    """Queue of reads that were started and not used yet.

    Parameters
    ----------
    started
        Items with the future of their read; advancing the iterator starts a read.
    depth
        Length of the queue; with 0, each item is read when it is needed.
    """

    def __init__(self, started: Iterator[tuple[Item, Future[Any]]], depth: int) -> None:
        self._started = started
        self._depth = depth
        self._queue: deque[tuple[Item, Future[Any]]] = deque()

    def __iter__(self) -> ReadAhead[Item]:
        return self

    def __next__(self) -> tuple[Item, Future[Any]]:
        if not self._queue:
            return next(self._started)
        return self._queue.popleft()

    def fill(self) -> None:
        """Start reading until the queue is full.

        Callers do so after each batch, not before the first batch of a partition: then the user
        still holds the previous batch, and with it the memory of the previous partition.
        """
        while len(self._queue) < self._depth:
            started = next(self._started, None)
            if started is None:
                break
            self._queue.append(started)

    def clear(self) -> None:
        """Drop all reads that were not used."""
        self._queue.clear()
