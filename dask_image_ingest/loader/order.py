"""The order of an epoch: a function of the rows, the seed and the epoch.

Rows are numbered over all partitions, and those of several frames one frame after the other. A pass
brings each row once, in order or shuffled; a stream is pass after pass over one frame; a mix takes
its rows from several streams, and is one itself; an epoch cuts a piece of a stream into steps, the
global batches. So the rows of a step depend neither on ranks and workers nor on partitions read so
far, and are known before anything is decoded.

A shuffle reads from many places of the shuffled partitions. A round takes a row from each place;
what is left of a partition at a place comes by chunks, of neighbouring rows.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np

from dask_image_ingest.loader.sampling import Weights

# Purposes of random numbers: part of their seed, so that each draws a sequence of its own.
_PARTITIONS, _ROWS, _MIX, _SAMPLE, _TURNS = range(5)

# Places of a shuffle's line of shards that are read at the same time; divisible by most numbers of
# ranks.
PLACES = 64

# Neighbouring places, of which one comes in each part of a round.
_NEAR = 4

# Rounds, each of a row from each place, that are computed at once: as long as for a single one.
_ROUNDS_AT_ONCE = 16

# Consecutive rows of a partition that stay together in time: near rows are read at once.
CHUNK = 32

# Rows of an epoch that never ends.
FOREVER = 2**62

# Rows of a mix that have the shares of its frames, to a row of each, in random order.
_MIXED = 1024

# The largest share of a frame; a weight that is smaller by more counts as 1.
_FINEST = 2**32


class Rows(NamedTuple):
    """Rows of a step.

    Attributes
    ----------
    numbers : int64 array, shape (n,)
        Numbers of the rows, counted over all partitions of all frames.
    draws : uint64 array, shape (n,)
        Seeds of random augmentations: one for each row, pass and repetition.
    places : int64 array, shape (n,)
        The place of a shuffle from which each row is read.
    """

    numbers: np.ndarray
    draws: np.ndarray
    places: np.ndarray

    def take(self, rows: slice | np.ndarray) -> Rows:
        """Some of the rows, by position."""
        return Rows(self.numbers[rows], self.draws[rows], self.places[rows])

    @classmethod
    def joined(cls, parts: Iterable[Rows]) -> Rows:
        """The rows of all parts."""
        return cls(*map(np.concatenate, zip(_NO_ROWS, *parts, strict=True)))


_NO_ROWS = Rows(np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0, np.int64))


class _Shuffled:
    """Pass in random order, which reads few partitions at a time.

    The partitions in random order are a line of rows, read from several places that divide it
    evenly: the pass takes a row from each in turn. At a place, the rows of a partition come chunk
    by chunk, in random order, and those of a chunk in random order.
    """

    def __init__(self, counts: np.ndarray, seed: Sequence[int], places: int) -> None:
        self._seed = tuple(seed)
        line = self._generator(_PARTITIONS).permutation(len(counts))
        line = line[counts[line] > 0]
        self._ends = np.cumsum(counts[line])
        self._starts = self._ends - counts[line]
        # The number of a partition's first row, in the line's order.
        self._first = (np.cumsum(counts) - counts)[line]
        total = int(counts.sum())
        self._places = max(1, min(places, total))
        self._edges = np.arange(self._places + 1) * total // self._places
        self._lengths = np.diff(self._edges)
        self._total = total
        self._permuted = functools.lru_cache(4 * self._places)(self._permutation)
        self._block = functools.lru_cache(4)(self._make_block)

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the rows at these positions, and the place from which each is read."""
        size = _ROUNDS_AT_ONCE * self._places
        first = start // size
        blocks = [self._block(number) for number in range(first, -(-stop // size))]
        wanted = slice(start - first * size, stop - first * size)
        numbers, places = (np.concatenate(part) for part in zip(*blocks, strict=True))
        return numbers[wanted], places[wanted]

    def _make_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """`rows` of a few rounds."""
        rounds = np.arange(block * _ROUNDS_AT_ONCE, (block + 1) * _ROUNDS_AT_ONCE)
        turns = [self._turns(number) for number in rounds.tolist()]
        place = np.concatenate(turns)
        at = self._edges[place] + np.repeat(rounds, list(map(len, turns)))
        index = np.searchsorted(self._ends, at, "right")
        begin = np.maximum(self._starts[index], self._edges[place])
        numbers = np.empty(len(at), np.int64)
        # A piece is what a place has of one partition: its rows are permuted once, for all rounds.
        pieces, piece_of = np.unique(np.stack([begin, index, place]), axis=1, return_inverse=True)
        piece_of = piece_of.reshape(-1)
        for number, (first, at_index, at_place) in enumerate(pieces.T.tolist()):
            chosen = piece_of == number
            end = min(int(self._ends[at_index]), int(self._edges[at_place + 1]))
            skipped = first - int(self._starts[at_index])
            order = self._permuted(first, end, skipped % CHUNK)
            numbers[chosen] = self._first[at_index] + skipped + order[at[chosen] - first]
        return numbers, place

    def _turns(self, number: int) -> np.ndarray:
        """The places in the order in which a round takes a row from each.

        Of neighbours one comes in each of a few parts of the round, so that neighbours are dealt to
        one rank in each step; few rows come in any order.
        """
        random = self._generator(_TURNS, number)
        places = np.flatnonzero(self._lengths > number)
        if self._total <= PLACES:
            return random.permutation(places)
        groups = np.split(places, np.arange(_NEAR, len(places), _NEAR))
        part = np.concatenate([random.permutation(len(group)) for group in groups])
        return places[np.lexsort([random.random(len(places)), part])]

    def in_use_at(self, position: int) -> np.ndarray:
        """Numbers of rows whose partitions are in use at a position: one of each place."""
        at = np.minimum(self._edges[:-1] + position // self._places, self._edges[1:] - 1)
        index = np.searchsorted(self._ends, at, "right")
        row: np.ndarray = self._first[index] + at - self._starts[index]
        return row

    def _permutation(self, start: int, stop: int, begun: int) -> np.ndarray:
        """Order of the rows from ``start`` to ``stop`` of the line, which one partition has.

        ``begun`` rows before them are in the first one's chunk: chunks are those of the partition.
        """
        random = self._generator(_ROWS, start)
        rows = np.arange(stop - start)
        chunks = np.split(rows, np.arange(CHUNK - begun, len(rows), CHUNK))
        for chunk in chunks:
            random.shuffle(chunk)
        return np.concatenate([chunks[i] for i in random.permutation(len(chunks)).tolist()])

    def _generator(self, purpose: int, step: int = 0) -> np.random.Generator:
        return np.random.default_rng([*self._seed, purpose, step])


class Stream:
    """Pass after pass over the rows of a frame.

    Parameters
    ----------
    counts
        Rows of each partition: int64 (partitions,).
    seed
        Seed of the shuffle; None for the order of the frame.
    places
        Number of places from which a shuffle reads.
    weights
        Draw the rows of each pass; None for all rows.
    frame
        Number of the frame in a mix: a row that two of them have gets two random augmentations.
    first
        Number of the frame's first row.
    """

    def __init__(
        self,
        counts: np.ndarray,
        seed: int | None,
        places: int,
        weights: Weights | None = None,
        frame: int = 0,
        first: int = 0,
    ) -> None:
        self.length = int(counts.sum()) if weights is None else weights.length
        self._counts = counts
        self._seed = seed
        self._places = places
        self._weights = weights
        self._frame = frame
        self._first = first
        self._pass = functools.lru_cache(2)(self._make_pass)

    def rows(self, start: int, stop: int) -> Rows:
        """Rows at the positions of the stream."""
        parts = []
        while start < stop:
            number, begin = divmod(start, self.length)
            end = min(self.length, begin + stop - start)
            parts.append(self._pass_rows(number, begin, end))
            start += end - begin
        return Rows.joined(parts)

    def _pass_rows(self, number: int, start: int, stop: int) -> Rows:
        shuffled, selected = self._pass(number)
        if shuffled is None:
            numbers, places = np.arange(start, stop), np.zeros(stop - start, np.int64)
        else:
            numbers, places = shuffled.rows(start, stop)
        repetitions = np.zeros(len(numbers), np.int64)
        if selected is not None:
            repetitions = numbers - np.searchsorted(selected, selected[numbers])
            numbers = selected[numbers]
        draws = draws_of(self._seed or 0, number, repetitions, self._frame)
        return Rows(self._first + numbers, draws, places)

    def in_use_at(self, position: int) -> np.ndarray:
        """Numbers of rows whose partitions are in use at a position."""
        if not self.length:
            return np.empty(0, np.int64)
        number, at = divmod(position, self.length)
        shuffled, selected = self._pass(number)
        rows = np.array([at]) if shuffled is None else shuffled.in_use_at(at)
        return self._first + (rows if selected is None else selected[rows])

    def _make_pass(self, number: int) -> tuple[_Shuffled | None, np.ndarray | None]:
        """The shuffle of a pass, None for the order of the frame; the rows drawn, None for all."""
        counts, selected = self._counts, None
        if self._weights is not None:
            random = np.random.default_rng([self._seed or 0, number, _SAMPLE])
            selected = self._weights.draw(random)
            edges = np.concatenate([[0], np.cumsum(counts)])
            counts = np.diff(np.searchsorted(selected, edges))
        if self._seed is None:
            return None, selected
        return _Shuffled(counts, (self._seed, number), self._places), selected

    def digest(self) -> str:
        """Digest of all that decides the order apart from the seed."""
        drawn = [] if self._weights is None else [self._weights.values]
        return _digest(self._counts, np.array([self._places]), *drawn)


def draws_of(seed: int, number: int, repetitions: np.ndarray, frame: int = 0) -> np.ndarray:
    """Draws of a pass: 0 for a plain read, so that its images are those of ``compute``."""
    if seed == number == frame == 0 and not repetitions.any():
        return np.zeros(len(repetitions), np.uint64)
    purpose = f"{seed} {number}" + (f" {frame}" if frame else "")
    key = hashlib.blake2b(purpose.encode(), digest_size=8).digest()
    base = np.uint64(int.from_bytes(key, "little"))
    with np.errstate(over="ignore"):  # an odd multiple: each repetition has a number of its own
        draws: np.ndarray = base + repetitions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return draws


class Mix:
    """Pass after pass over the rows of several frames, with a share of each.

    Any piece of a pass has each frame's share, to a row or two at each end of it; within 1,024 rows
    the frames come in random order. A pass begins a new pass of each frame, and repeats it if its
    share has more rows.

    Parameters
    ----------
    streams
        Streams of the frames.
    weights
        Relative share of each frame: float64 (frames,). None for passes that have each row once.
    stop
        Where a pass by ``weights`` ends: ``"first"`` when a frame has no rows left, ``"all"`` when
        each row has come, while frames that end before begin again; None for never.
    seed
        Seed of the order of frames.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        weights: np.ndarray | None,
        stop: Literal["first", "all"] | None,
        seed: int,
    ) -> None:
        lengths = [stream.length for stream in streams]
        self._shares, self.length = _shares(lengths, weights, stop)
        self._streams = streams
        self._seed = seed
        # Rows of each stream from the beginning of a pass to that of the next one: whole passes.
        self._strides = [
            -(-share // max(1, length)) * length
            for share, length in zip(self._shares, lengths, strict=True)
        ]
        self._block = functools.lru_cache(4)(self._make_block)

    def rows(self, start: int, stop: int) -> Rows:
        """Rows at the positions of the mix."""
        parts = []
        while start < stop:
            begins, frames = self._from(start)
            frames = frames[: stop - start]
            start += len(frames)
            taken = np.bincount(frames, minlength=len(begins)).tolist()
            by_frame = Rows.joined(
                stream.rows(begin, begin + count)
                for stream, begin, count in zip(self._streams, begins, taken, strict=True)
            )
            place = np.empty(len(frames), np.int64)
            place[np.argsort(frames, kind="stable")] = np.arange(len(frames))
            parts.append(by_frame.take(place))
        return Rows.joined(parts)

    def in_use_at(self, position: int) -> np.ndarray:
        """Numbers of rows whose partitions are in use at a position."""
        if not self.length:
            return np.empty(0, np.int64)
        begins, _ = self._from(position)
        return np.concatenate(
            [stream.in_use_at(at) for stream, at in zip(self._streams, begins, strict=True)]
        )

    def digest(self) -> str:
        """Digest of all that decides the order apart from the seed."""
        return _digest(*(stream.digest() for stream in self._streams), np.array(self._shares))

    def _from(self, position: int) -> tuple[list[int], np.ndarray]:
        """Each stream's position there, and the frame of each row from there to a block's end."""
        number, at = divmod(position, self.length)
        # A block has a row less than its share of some frames.
        block = at // _MIXED
        while sum(self._before(block + 1)) <= at:
            block += 1
        begins, frames = self._block(number, block)
        skipped = at - sum(self._before(block))
        before = np.bincount(frames[:skipped], minlength=len(begins)).tolist()
        return [begin + rows for begin, rows in zip(begins, before, strict=True)], frames[skipped:]

    def _before(self, block: int) -> list[int]:
        """Rows of each frame in a pass before a block."""
        rows, total = min(block * _MIXED, self.length), sum(self._shares)
        return [rows * share // total for share in self._shares]

    def _make_block(self, number: int, block: int) -> tuple[list[int], np.ndarray]:
        before = self._before(block)
        counts = [end - start for start, end in zip(before, self._before(block + 1), strict=True)]
        random = np.random.default_rng([self._seed, number, _MIX, block])
        frames = random.permutation(np.repeat(np.arange(len(counts)), counts))
        begins = [
            number * stride + rows for stride, rows in zip(self._strides, before, strict=True)
        ]
        return begins, frames


class Epoch:
    """Steps of a piece of a stream.

    Parameters
    ----------
    stream
        Stream of a frame, or mix of several.
    begin
        Its position at the beginning of the epoch.
    size
        Rows of a step, over all ranks.
    length
        Rows of the epoch.
    """

    def __init__(self, stream: Stream | Mix, begin: int, size: int, length: int) -> None:
        self.size = size
        self.length = length
        self._stream = stream
        self._begin = begin

    def step(self, row: int) -> Rows:
        """Rows of the step that begins after ``row`` rows."""
        return self._stream.rows(self._begin + row, self._begin + self.after(row, 1))

    def after(self, row: int, steps: int) -> int:
        """Rows before the step that comes so many steps after the one at ``row``."""
        return min(row + steps * self.size, self.length)

    def count(self, drop_last: bool) -> int:
        """Steps of the epoch: all, or those that are full."""
        return self.length // self.size if drop_last else -(-self.length // self.size)

    def bucket(self, row: int) -> tuple[Any, ...] | None:
        """The size or values that the rows of the step at ``row`` share; None without buckets."""
        return None

    def in_use_at(self, row: int) -> np.ndarray | None:
        """Numbers of rows whose partitions are in use after ``row`` rows; None for all."""
        return self._stream.in_use_at(self._begin + row)

    def digest(self) -> str:
        """Digest of all that decides the order apart from the seed and the epoch."""
        return self._stream.digest()


class BucketedEpoch(Epoch):
    """Steps of rows of one bucket each, in the order in which a stream fills them.

    Parameters
    ----------
    stream, begin, size, length
        As for an epoch.
    bucket_of
        Number of each row's bucket, from 0: int64 (rows,).
    buckets
        What the rows of each have in common.
    """

    def __init__(
        self,
        stream: Stream | Mix,
        begin: int,
        size: int,
        length: int,
        bucket_of: np.ndarray,
        buckets: Sequence[tuple[Any, ...]],
    ) -> None:
        super().__init__(stream, begin, size, length)
        rows = stream.rows(begin, begin + length)
        numbers = bucket_of[rows.numbers]
        by_bucket = np.argsort(numbers, kind="stable")
        counts = np.bincount(numbers)
        place_in_bucket = np.arange(length) - np.repeat(np.cumsum(counts) - counts, counts)
        first = np.flatnonzero(place_in_bucket % size == 0)
        lengths = np.diff(first, append=length)
        last = by_bucket[first + lengths - 1]
        # Full steps come when their last row does; then what is left of each bucket.
        order = np.lexsort([last, lengths < size])
        self._first = first[order]
        self._row_edges = np.concatenate([[0], np.cumsum(lengths[order])])
        self._rows = rows.take(by_bucket)
        self._buckets = buckets
        self._bucket_of = numbers[by_bucket][self._first]
        self._decisive = (bucket_of, repr(buckets), np.array([size]))

    def _number(self, row: int) -> int:
        return int(np.searchsorted(self._row_edges, row))

    def step(self, row: int) -> Rows:
        first = int(self._first[self._number(row)])
        return self._rows.take(slice(first, first + self.after(row, 1) - row))

    def after(self, row: int, steps: int) -> int:
        return int(self._row_edges[min(self._number(row) + steps, len(self._first))])

    def count(self, drop_last: bool) -> int:
        lengths = np.diff(self._row_edges)
        return int((lengths == self.size).sum()) if drop_last else len(lengths)

    def bucket(self, row: int) -> tuple[Any, ...]:
        return self._buckets[self._bucket_of[self._number(row)]]

    def in_use_at(self, row: int) -> None:
        return None  # rows wait until their bucket is full

    def digest(self) -> str:
        return _digest(super().digest(), *self._decisive)


def _shares(
    lengths: list[int], weights: np.ndarray | None, stop: str | None
) -> tuple[list[int], int]:
    """Share of each frame in a pass of a mix, in rows if it ends; and the rows of the pass."""
    if weights is None:
        return lengths, sum(lengths)
    shares = np.maximum(1, np.rint(weights / weights.max() * _FINEST)).astype(np.int64).tolist()
    if stop != "first":
        shares = [share if length else 0 for share, length in zip(shares, lengths, strict=True)]
    if stop is None or not any(shares):
        return shares, FOREVER if any(lengths) else 0
    # The frame with which the pass ends has all of its rows in it.
    ends = [Fraction(length, share) for length, share in zip(lengths, shares, strict=True) if share]
    end = min(ends) if stop == "first" else max(ends)
    rows = [int(end * share) for share in shares]
    return rows, sum(rows)


def _digest(*parts: np.ndarray | str) -> str:
    """Short digest of arrays and other digests."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        array = np.frombuffer(part.encode(), np.uint8) if isinstance(part, str) else part
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
