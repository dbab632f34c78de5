"""``iter_batches``: an epoch of a frame as a stream of batches, a few of them in memory at a time.

A plan (``order``) says which rows each step has. If only row-wise steps follow the last decode, the
rows of a few steps are decoded together, from references; otherwise they are taken from partitions
that are computed whole. In the order of the frame, and for one process, partitions are read one
after the other, and nothing is counted before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from dask.dataframe.dispatch import concat

from dask_image_ingest.arguments import check_choice, check_flag, whole_number
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of
from dask_image_ingest.loader.batch_format import (
    BatchRows,
    Format,
    PendingRows,
    batch_of,
    converter,
    parse_normalize,
    rows_of,
)
from dask_image_ingest.loader.order import (
    CHUNK,
    FOREVER,
    PLACES,
    BucketedEpoch,
    Epoch,
    Mix,
    Rows,
    Stream,
    draws_of,
)
from dask_image_ingest.loader.position import Position, Share, parse_start
from dask_image_ingest.loader.reader import Reader
from dask_image_ingest.loader.sampling import Buckets, Sampling
from dask_image_ingest.loader.source import (
    Facts,
    FrameSource,
    ReferenceSource,
    check_count,
    once,
    source_of,
)
from dask_image_ingest.typedefs import AnyFrame, PerChannel

# Rows that are decoded together, and the bytes of their pixels, if a step has not more. The workers
# of a DataLoader, of which each has its own, take half as many. A GPU takes several batches, so
# that it decodes one while the host prepares the next.
_PIECE_ROWS, _PIECE_BYTES = 256, 64 << 20
_GPU_BATCHES = 4

# Of a server, images of so many times the steps done so far are fetched ahead, until these are all
# of a chunk: the first step waits for its own images alone.
_AHEAD = 4

_NO_DATASET = (
    "batches come in order, have no numbers, and can't be pickled: iterate over them. A torch "
    "DataLoader takes mix_batches(..., format='torch'); of one frame, images.dataloader() makes it"
)

# Pixels of the partitions that a shuffle holds, if it can't decode the rows of a step alone.
_HELD_BYTES = 1 << 30
_LEAST_HELD = 2

Item = TypeVar("Item")


@dataclass(frozen=True)
class Schedule:
    """The rows of an epoch and their order: arguments of ``iter_batches``.

    Attributes
    ----------
    shuffle : int or None
        Seed.
    epoch : int or None
        None for that of the position, or 0.
    steps : int or None
        Steps of an epoch; None for one pass.
    repeat : bool
        Whether the epoch never ends.
    sampling : Sampling or None
        Rows that are drawn by a column.
    buckets : Buckets or None
        Rows that come together.
    frame_weights : float64 array, shape (frames,), or None
        Relative probability that a row comes from each of several frames; None for all rows once.
    stop : str or None
        Where an epoch by ``frame_weights`` ends: with the "first" frame that ends, or "all". None
        is the first.
    """

    shuffle: int | None = None
    epoch: int | None = None
    steps: int | None = None
    repeat: bool = False
    sampling: Sampling | None = None
    buckets: Buckets | None = None
    frame_weights: np.ndarray | None = None
    stop: Literal["first", "all"] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.shuffle, bool):
            object.__setattr__(self, "shuffle", 0 if self.shuffle else None)
        for name, least, advice in (
            ("shuffle", 0, "pass True, False, or a seed, a number from 0"),
            ("epoch", 0, "pass the number of the epoch"),
            ("steps", 1, "pass the number of batches of an epoch, or None for all rows once"),
        ):
            value = getattr(self, name)
            if value is not None:
                value = whole_number(name, value, least, advice, most=2**63 - 1)
                object.__setattr__(self, name, value)
        check_flag("repeat", self.repeat)
        ends = [name for name in ("stop", "steps", "repeat") if getattr(self, name)]
        if len(ends) > 1:
            raise ArgumentError(
                f"{ends[0]}= and {ends[1]}= both tell where an epoch ends: pass one of them"
            )
        if self.stop is not None:
            check_choice("stop", self.stop, ("first", "all"))
            if self.frame_weights is None:
                raise ArgumentError(
                    "stop= tells where an epoch by weights= ends, and without them each row comes "
                    "once: pass weights= too, or leave stop= out"
                )
        if self.repeat and self.buckets is not None:
            raise ArgumentError("buckets= plans a whole epoch: pass steps= instead of repeat=True")

    @property
    def is_plain(self) -> bool:
        """True if the epoch of a single frame is its rows, in order."""
        options = (self.shuffle, self.steps, self.sampling, self.buckets)
        return not self.repeat and all(option is None for option in options)


def make_batches(
    frames: Sequence[AnyFrame],
    columns: Sequence[str] | None,
    schedule: Schedule,
    *,
    image: str | None = None,
    epoch: int | None,
    **options: Any,
) -> Batches:
    """Make the batches of an epoch of one or several frames.

    ``image`` is the name of the image column, None for the default; ``options`` are further
    arguments of `Batches`.
    """
    sources = [source_of(frame, columns, image) for frame in frames]
    first, *others = [(list(source.meta.columns), source.image) for source in sources]
    for other in others:
        if {*other[0]} != {*first[0]} or other[1] != first[1]:
            ours, theirs = (", ".join(map(repr, names)) for names, _ in (first, other))
            raise ArgumentError(
                f"mix_batches: the batches of one frame have {ours}, those of another {theirs}: "
                "pass columns= that all have, and rename the column of images if it has another "
                "name"
            )
    return Batches(sources, schedule=dataclasses.replace(schedule, epoch=epoch), **options)


class Batches:
    """Iterator of batches, from :meth:`~pandas.DataFrame.images.iter_batches`.

    A new loop over a finished iterator starts again, with the same batches. A new loop over one
    that was left early, closed or failed continues where it stopped.
    """

    def __init__(
        self,
        sources: Sequence[FrameSource],
        *,
        batch_size: int,
        format: Format,
        normalize: tuple[PerChannel, PerChannel] | None,
        channels_first: bool | None,
        schedule: Schedule,
        drop_last: bool,
        prefetch: int | None,
        start: int | Sequence[Any],
        share: Share,
        collate_fn: Callable[[list[dict[str, Any]]], Any] | None = None,
        facts: Facts | None = None,
    ) -> None:
        first = sources[0]
        self._sources = sources
        self._columns = list(first.meta.columns)
        self._image = first.image
        self._shape = first.shape if len({source.shape for source in sources}) == 1 else None
        self._format = format
        self._backend = backend_of(first.meta)
        # Rows of several frames have one dtype.
        metas = [source.meta for source in sources]
        self._meta = concat(metas) if len(metas) > 1 else metas[0]
        self._rows_of = functools.partial(
            rows_of, image=self._image, backend=self._backend, meta=self._meta
        )
        self._size = whole_number("batch_size", batch_size, 1, "pass a positive number of images")
        check_flag("drop_last", drop_last)
        self._drop_last = drop_last
        self._prefetch = prefetch
        if prefetch is not None:
            advice = "pass how many pieces to read ahead"
            self._prefetch = whole_number("prefetch", prefetch, 0, advice)
        self._collate = collate_fn
        self._convert = converter("numpy" if collate_fn else format, self._backend)
        self._normalize = parse_normalize(normalize)
        if channels_first is not None:
            check_flag("channels_first", channels_first)
        self._channels_first = channels_first
        self._share = share
        # What is known of the rows; a loader has it for all its iterators and workers.
        self._facts: Facts = {} if facts is None else facts
        self._start = parse_start(start)
        begin = self._start if isinstance(self._start, Position) else None
        self._schedule = schedule
        default = 0 if begin is None else begin.epoch
        self._epoch = default if schedule.epoch is None else schedule.epoch
        # True if partitions can be read one after the other.
        self._is_sequential = schedule.is_plain and len(sources) == 1 and share == Share()
        if begin is not None:
            Position(self._epoch, 0, schedule.shuffle).check(begin)
            if not self._is_sequential:
                self._position_at(0).check(begin)
        # Rows of the epoch before the next step of this process, over all ranks; None before the
        # start is known.
        self._row: int | None = None
        self._finished = False
        # True when a row with an image was found, or none is to be.
        self._has_images = self._image is None
        self._stream = self._batches()

    def __len__(self) -> int:
        """Steps of the epoch, from its beginning; the same for each rank.

        The rows are counted, from indexes and headers where nothing depends on pixels.

        Raises
        ------
        TypeError
            If the epoch never ends.
        """
        if self._schedule.repeat:
            raise TypeError("an epoch with repeat=True never ends: it has no length")
        return self._plan.count(self._drop_last)

    @property
    def position(self) -> Position:
        """Position of the next batch.

        Pass it as ``start=`` to resume there, with any number of ranks and workers; what comes
        before it is not read again.
        """
        if self._is_sequential:  # nothing was counted
            return Position(self._epoch, self._next_row)
        return self._position_at(self._next_row)

    def _position_at(self, row: int) -> Position:
        rows = None if self._schedule.repeat else self._plan.length
        return Position(self._epoch, row, self._schedule.shuffle, rows, self._digest)

    @functools.cached_property
    def _digest(self) -> str:
        """Digest of the plan; once, as it reads the bucket of each row."""
        return self._plan.digest()

    def position_after(self, steps: int) -> Position:
        """Position after so many batches of each rank, counted from ``start=``.

        Use it where worker processes read ahead, so that nobody knows their place.

        Parameters
        ----------
        steps
            Batches that this rank has used.

        Returns
        -------
        Position
        """
        steps = whole_number("steps", steps, 0, "pass the number of batches")
        return self._position_at(self._plan.after(self._first_row, steps))

    @property
    def is_on_gpu(self) -> bool:
        """True if images are decoded on a GPU, or lie there."""
        return self._backend.device == "gpu"

    @property
    def decodes(self) -> bool:
        """True if images are decoded by the process that iterates, or by its cluster."""
        return any(source.decodes for source in self._sources)

    @property
    def differs_by_epoch(self) -> bool:
        """True if another epoch has another order or other random augmentations."""
        shuffled = self._schedule.shuffle is not None
        return shuffled or any(source.is_augmented for source in self._sources)

    @property
    def is_at_end(self) -> bool:
        """True if no step of the epoch begins at ``start=``."""
        return self._is_end(self._first_row)

    @property
    def _first_row(self) -> int:
        """The row of the epoch at which the first iteration begins."""
        if isinstance(self._start, Position):
            return self._start.row
        return self._after(0, self._start)

    @property
    def _next_row(self) -> int:
        """The row of the next step of this process."""
        if self._row is None:
            self._row = self._after(self._first_row, self._share.worker)
        return self._row

    def _after(self, row: int, steps: int) -> int:
        """Rows before the step that comes so many steps after the one at ``row``."""
        return row + steps * self._size if self._is_sequential else self._plan.after(row, steps)

    def _is_end(self, row: int) -> bool:
        """True if no step of a plan begins at ``row``."""
        plan = self._plan
        is_short = self._drop_last and plan.after(row, 1) - row < plan.size
        return row >= plan.length or is_short

    def prepare(self) -> None:
        """Find the facts that the order needs, so that workers need not."""
        if not self._is_sequential:
            self._plan  # noqa: B018

    @functools.cached_property
    def _counts(self) -> list[np.ndarray]:
        """Rows of each partition of the frames."""
        return [
            once(self._facts, ("rows", number), source.counts)
            for number, source in enumerate(self._sources)
        ]

    @functools.cached_property
    def _plan(self) -> Epoch:
        schedule, size = self._schedule, self._size * self._share.world
        stream = self._order
        if schedule.repeat:
            return Epoch(stream, 0, size, FOREVER if stream.length else 0)
        length = stream.length
        if schedule.steps is not None and length:
            length = schedule.steps * size
        begin = self._epoch * length
        if schedule.buckets is None:
            return Epoch(stream, begin, size, length)
        numbers = range(len(self._sources))
        columns = [
            pd.concat([self._column(name, number) for number in numbers], ignore_index=True)
            for name in schedule.buckets.columns
        ]
        return BucketedEpoch(stream, begin, size, length, *schedule.buckets.of_rows(columns))

    @functools.cached_property
    def _order(self) -> Stream | Mix:
        """The rows of all epochs."""
        schedule, is_mix = self._schedule, len(self._sources) > 1
        # A pass draws as many rows as an epoch has; of several frames, as many as each has.
        length = None
        if schedule.steps is not None and not is_mix:
            length = schedule.steps * self._size * self._share.world
        streams = []
        for number, counts in enumerate(self._counts):
            weights = None
            if schedule.sampling is not None:
                values = self._column(schedule.sampling.column, number)
                weights = schedule.sampling.weights(values, length)
            places = PLACES if schedule.shuffle is None else self._places(number)
            first = int(self._firsts[number])
            streams.append(Stream(counts, schedule.shuffle, places, weights, number, first))
        if not is_mix:
            return streams[0]
        is_endless = schedule.repeat or schedule.steps is not None
        stop = None if is_endless else schedule.stop or "first"
        return Mix(streams, schedule.frame_weights, stop, schedule.shuffle or 0)

    @functools.cached_property
    def _firsts(self) -> np.ndarray:
        """The number of each frame's first row; rows are counted over all frames."""
        return np.cumsum([0, *(counts.sum() for counts in self._counts[:-1])])

    def _by_frame(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Positions of the rows of each frame."""
        frame = np.searchsorted(self._firsts, numbers, "right") - 1
        return [np.flatnonzero(frame == number) for number in range(len(self._firsts))]

    def _column(self, name: str, number: int) -> pd.Series:
        """A column of all rows of a frame."""
        source = self._sources[number]
        return once(self._facts, ("column", (number, name)), lambda: source.column(name))

    def _places(self, number: int) -> int:
        """Number of places from which a shuffle reads: fewer if each holds a decoded partition."""
        counts, source = self._counts[number], self._sources[number]
        if not counts.any() or isinstance(self._sources_to_read[number], ReferenceSource):
            return PLACES
        first = int(np.argmax(counts > 0))
        row_bytes = source.known_row_bytes or once(
            self._facts, ("bytes of a row", number), lambda: source.row_bytes(first)
        )
        partition = row_bytes * counts.sum() / np.count_nonzero(counts)
        return int(np.clip(_HELD_BYTES // partition, _LEAST_HELD, PLACES))

    @functools.cached_property
    def _sources_to_read(self) -> list[FrameSource]:
        """The sources to read: references, if the last step is a decode of files."""
        return [self._source_to_read(*numbered) for numbered in enumerate(self._sources)]

    def _source_to_read(self, number: int, source: FrameSource) -> FrameSource:
        references = None if self._is_sequential else source.references()
        if references is not None:
            return references
        first = np.zeros(1, np.int64)
        draw = draws_of(self._schedule.shuffle or 0, self._epoch, first, number)
        return source.with_draw(int(draw[0]))

    def __repr__(self) -> str:
        shuffle = self._schedule.shuffle
        parts = [f"batches of {self._size} rows", f"epoch {self._epoch}"]
        if shuffle is not None:
            parts.append(f"shuffle={shuffle}")
        if self._row is not None:
            parts.append("at the end" if self._is_over else f"at row {self._row:,}")
        parts.append(f"{self._format} of columns {', '.join(map(repr, self._columns))}")
        return f"<{'; '.join(parts)}>"

    @property
    def _is_over(self) -> bool:
        return self._finished if self._is_sequential else self._is_end(self._next_row)

    def __iter__(self) -> Batches:
        if inspect.getgeneratorstate(self._stream) == inspect.GEN_CLOSED:
            if self._is_over:
                self._row = self._after(0, self._share.worker)
            self._finished = False
            self._stream = self._batches()
        return self

    def __getitem__(self, item: object) -> Any:
        """Refuse what a ``DataLoader`` asks of data that are no ``IterableDataset``."""
        raise ArgumentError(_NO_DATASET)

    def __getstate__(self) -> Any:
        raise ArgumentError(_NO_DATASET)

    def __next__(self) -> Any:
        for source in (*self._sources, *self._sources_to_read):
            source.check_process()
        return next(self._stream)

    def close(self) -> None:
        """Stop reading ahead and free what was read, as the end of the iteration does."""
        self._stream.close()

    def _batches(self) -> Generator[Any, None, None]:
        return self._in_order() if self._is_sequential else self._planned()

    def _batch(self, parts: Sequence[BatchRows], bucket: tuple[Any, ...] | None = None) -> Any:
        """The batch of some rows, which may be of a bucket."""
        rows = BatchRows.of(parts, self._backend)
        if self._collate is not None and not len(rows):
            return None
        shape, buckets = self._shape, self._schedule.buckets
        if buckets is not None and bucket is not None:
            if buckets.sizes is None:
                shapes = dict(zip(buckets.columns, bucket, strict=True))
                rows = rows.stacked(shapes, self._meta, self._backend)
            else:
                shape = (*bucket, None if shape is None else shape[2])
        batch = batch_of(
            rows,
            self._image,
            self._backend,
            self._convert,
            self._normalize,
            self._channels_first,
            shape,
        )
        if self._collate is None:
            return batch
        names = list(batch)
        return self._collate(
            [dict(zip(names, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        )

    def _check_images(self, rows: int, with_image: int) -> None:
        """Raise if all rows lack an image, as the first ones that are read do."""
        if self._has_images or not rows:
            return
        if not with_image and all(source.lacks_images() for source in self._sources):
            raise ArgumentError(
                f"iter_batches: no row has an image in {self._image!r}, and batches leave out rows "
                "without one. If the shards have none, as those of latents or captions, read them "
                "with decode=False; else name the images' extension, image="
            )
        self._has_images = True

    def _in_order(self) -> Generator[Any, None, None]:
        """Batches of one partition after the other."""
        (source,) = self._sources_to_read
        row = self._next_row
        first, skip = 0, 0
        counts = self._counts[0] if row else self._facts.get(("rows", 0))
        if counts is not None:
            ends = np.cumsum(counts)
            first = int(np.searchsorted(ends, row, "right"))
            skip = row - int(ends[first - 1]) if first else row
        depth = source.default_prefetch() if self._prefetch is None else self._prefetch
        numbers = range(first, source.partitions)
        parts: list[BatchRows] = []  # of the next batch
        missing = self._size
        with source:
            ahead = PrefetchQueue(((number, source.read(number)) for number in numbers), depth)
            try:
                ahead.fill()
                for number, future in ahead:
                    frame = future.result()
                    del future
                    at, length = skip, len(frame)
                    skip = 0
                    if counts is not None:
                        partition = functools.partial(source.describe, number)
                        check_count(frame, int(counts[number]), partition)
                    rows, present = self._rows_of(frame)
                    self._check_images(length, len(rows))
                    del frame
                    while at < length:
                        stop = min(length, at + missing)
                        some = _rows_between(rows, present, at, stop)
                        row, missing, at = row + stop - at, missing - (stop - at), stop
                        if missing:
                            # A copy: a view would keep the whole partition in memory.
                            parts.append(some.copied())
                            continue
                        batch = self._batch([*parts, some])
                        parts, missing = [], self._size
                        del some
                        self._row = row
                        yield batch
                        del batch
                        ahead.fill()
                    del rows
            finally:
                ahead.clear()
        self._row, self._finished = row, True
        if parts and not self._drop_last:
            batch = self._batch(parts)
            del parts
            yield batch

    def _planned(self) -> Generator[Any, None, None]:
        """Batches of the steps of a plan."""
        if self._is_over:
            return
        with contextlib.ExitStack() as stack:
            readers = [
                Reader(stack.enter_context(source), counts, self._rows_of, first)
                for source, counts, first in zip(
                    self._sources_to_read, self._counts, self._firsts.tolist(), strict=True
                )
            ]
            depth = self._prefetch
            if depth is None:
                depth = max(source.default_prefetch() for source in self._sources_to_read)
            ahead = PrefetchQueue(self._pieces(readers), depth)
            try:
                for steps, results in ahead:
                    parts = [result() for result in results]
                    del results
                    self._check_images(
                        sum(len(rows.numbers) for step in steps for rows in step.rows),
                        sum(len(rows) for rows, _ in parts),
                    )
                    begins = [0] * len(parts)
                    for step in steps:
                        ends = [
                            begin + len(rows.numbers)
                            for begin, rows in zip(begins, step.rows, strict=True)
                        ]
                        # Also without a row: ranks and workers have the steps of `len`.
                        batch = self._batch(
                            [
                                _rows_between(*part, begin, end)
                                for part, begin, end in zip(parts, begins, ends, strict=True)
                            ],
                            step.bucket,
                        )
                        begins = ends
                        # Before the batch is used: the next ones are decoded meanwhile. If that
                        # fails, this one comes again.
                        ahead.fill()
                        self._row = step.next_row
                        yield batch
                        del batch
                    del parts
            finally:
                ahead.clear()

    def _pieces(self, readers: Sequence[Reader]) -> Iterator[tuple[list[_Step], list[PendingRows]]]:
        """Start to read a few steps at a time; the first alone, so that it comes early."""
        coming, buckets = _Coming(self._steps()), self._schedule.buckets
        count, done, most = 1, 0, None
        while steps := coming.take(count):
            following = 0 if most is None else min(2 * count, most)
            shape = None if buckets is None or buckets.sizes is None else steps[0].bucket
            next_row = steps[-1].next_row
            in_use = None if self._is_end(next_row) else self._plan.in_use_at(next_row)
            positions = [] if in_use is None else self._by_frame(in_use)
            results = []
            for frame, reader in enumerate(readers):
                held = None if in_use is None else in_use[positions[frame]]
                if reader.fetches_ahead:
                    soon = _rows_of_frame([*steps, *coming.look(following)], frame).numbers
                    far = coming.look(min(self._horizon + len(steps) + following, _AHEAD * done))
                    reader.expect(soon, _rows_of_frame(far, frame).numbers)
                    held = None if held is None else np.concatenate([held, soon])
                results.append(reader.start(_rows_of_frame(steps, frame), shape))
                reader.keep(held)
            yield steps, results
            done += len(steps)
            if most is None:
                most = self._most_steps(readers)
            count = min(2 * count, most)

    @property
    def _horizon(self) -> int:
        """Steps of this process in which the rows of a chunk come."""
        return math.ceil(PLACES * CHUNK / self._plan.size / self._share.workers)

    def _steps(self) -> Iterator[_Step]:
        """The next steps of this process."""
        row = self._next_row
        while not self._is_end(row):
            rows, bucket = self._plan.step(row), self._plan.bucket(row)
            by_frame = [rows.take(positions) for positions in self._by_frame(rows.numbers)]
            row = self._plan.after(row, self._share.workers)
            yield _Step(self._share.of(by_frame), bucket, row)

    def _most_steps(self, readers: Sequence[Reader]) -> int:
        row_bytes = max(
            source.known_row_bytes or reader.row_bytes()
            for source, reader in zip(self._sources, readers, strict=True)
        )
        rows = min(_PIECE_ROWS, _PIECE_BYTES / row_bytes) / min(2, self._share.workers)
        if self.is_on_gpu:
            rows *= _GPU_BATCHES
        return max(1, int(rows // self._size))


def _rows_between(rows: BatchRows, present: np.ndarray, start: int, stop: int) -> BatchRows:
    """Those of ``rows`` whose places, ``present`` in order, are from ``start`` to ``stop``."""
    first, last = np.searchsorted(present, [start, stop]).tolist()
    return rows.take(range(first, last))


class _Step(NamedTuple):
    """The part of a step that this process reads."""

    rows: list[Rows]  # of each frame
    bucket: tuple[Any, ...] | None  # what its rows have in common; None without buckets
    next_row: int  # of the epoch, before the following step of this process


class _Coming:
    """The coming steps, of which some are looked at before they are taken."""

    def __init__(self, steps: Iterator[_Step]) -> None:
        self._steps = steps
        self._seen: deque[_Step] = deque()

    def look(self, count: int) -> list[_Step]:
        """The next steps, at most ``count``."""
        self._seen.extend(itertools.islice(self._steps, max(0, count - len(self._seen))))
        return list(itertools.islice(self._seen, count))

    def take(self, count: int) -> list[_Step]:
        """Take the next steps, at most ``count``, as long as they are of one bucket."""
        steps = self.look(count)
        taken = list(itertools.takewhile(lambda step: step.bucket == steps[0].bucket, steps))
        for _ in taken:
            self._seen.popleft()
        return taken


def _rows_of_frame(steps: Sequence[_Step], frame: int) -> Rows:
    return Rows.joined(step.rows[frame] for step in steps)


class PrefetchQueue(Generic[Item]):
    """Reads that were started and not used yet: at most ``depth``; with 0, none is started ahead.

    Advancing the iterator ``started`` starts a read.
    """

    def __init__(self, started: Iterator[Item], depth: int) -> None:
        self._started = started
        self._depth = depth
        self._queue: deque[Item] = deque()

    def __iter__(self) -> Iterator[Item]:
        while True:
            if not self._queue:
                started = next(self._started, None)
                if started is None:
                    return
                self._queue.append(started)
                del started
            yield self._queue.popleft()

    def fill(self) -> None:
        """Start reading until the queue is full.

        Of partitions, callers do so after each batch, not before the first batch of one: then the
        user still holds the previous batch, and with it the memory of the previous partition.
        """
        missing = max(0, self._depth - len(self._queue))
        self._queue.extend(itertools.islice(self._started, missing))

    def clear(self) -> None:
        """Drop all reads that were not used."""
        self._queue.clear()
