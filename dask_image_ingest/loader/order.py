"""The order of an epoch: a function of the rows, the seed and the epoch.

Rows are counted over all partitions. A pass brings each row once, in order or shuffled; an epoch
cuts passes into steps, the global batches; a step is divided evenly among ranks, and the steps of a
rank are dealt in turn to its workers. So the rows of a step depend neither on ranks and workers nor
on partitions read so far, and are known before anything is decoded.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from dask_image_ingest.arguments import shown, whole_number
from dask_image_ingest.errors import ArgumentError

# Purposes of random numbers: part of their seed, so that each draws a sequence of its own.
_PARTITIONS, _ROWS, _MIX, _SAMPLE, _TURNS = range(5)

# Places of a shuffle's line of shards that are read at the same time; divisible by most numbers of
# ranks.
READERS = 64

# Neighbouring places, of which one comes in each part of a round.
_NEAR = 4

# Positions that are computed at once.
_BLOCK = 1024

# Consecutive rows of a partition that stay together in time: near rows are read at once.
CHUNK = 32


class Rows(NamedTuple):
    """Rows of a step.

    Attributes
    ----------
    numbers : int64 array, shape (n,)
        Numbers of the rows in the frame, counted over all partitions.
    draws : uint64 array, shape (n,)
        Seeds of random augmentations: one for each row, pass and repetition.
    """

    numbers: np.ndarray
    draws: np.ndarray

    def slice(self, rows: slice) -> Rows:
        """Some of the rows, by position."""
        return Rows(self.numbers[rows], self.draws[rows])


class Pass(Protocol):
    """Order in which each of some rows comes once."""

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the rows at these positions, and the place from which each is read."""

    def open_at(self, position: int) -> np.ndarray:
        """Numbers of the rows at which each place is at a position."""


class InOrder:
    """Pass in the order of the frame."""

    def __init__(self, count: int) -> None:
        self._last = max(count - 1, 0)

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the rows at these positions, and the place from which each is read."""
        return np.arange(start, stop), np.zeros(stop - start, np.int64)

    def open_at(self, position: int) -> np.ndarray:
        """Number of the row at a position."""
        return np.array([min(position, self._last)])


class Shuffled:
    """Pass in random order, which reads few partitions at a time.

    The partitions in random order are a line of rows, read from several places that divide it
    evenly: the pass takes a row from each in turn. At a place, the rows of a partition come chunk
    by chunk, in random order, and those of a chunk in random order.
    """

    def __init__(self, counts: np.ndarray, seed: Sequence[int], readers: int) -> None:
        self._seed = tuple(seed)
        line = self._generator(_PARTITIONS).permutation(len(counts))
        line = line[counts[line] > 0]
        self._ends = np.cumsum(counts[line])
        self._starts = self._ends - counts[line]
        # The number of a partition's first row, in the line's order.
        self._first = (np.cumsum(counts) - counts)[line]
        total = int(counts.sum())
        self._places = max(1, min(readers, total))
        self._edges = np.arange(self._places + 1) * total // self._places
        self._rounds = total // self._places
        lengths = np.diff(self._edges)
        self._longer = np.flatnonzero(lengths > self._rounds)
        self._total = total
        self._permuted = functools.lru_cache(4 * self._places)(self._permutation)
        self._block = functools.lru_cache(4)(self._make_block)

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the rows at these positions, and the place from which each is read."""
        first = start // _BLOCK
        blocks = [self._block(number) for number in range(first, -(-stop // _BLOCK))]
        wanted = slice(start - first * _BLOCK, stop - first * _BLOCK)
        numbers, places = (np.concatenate(part) for part in zip(*blocks, strict=True))
        return numbers[wanted], places[wanted]

    def _make_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """`rows` of positions that are computed together, since that takes as long as for one."""
        position = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, self._total))
        depth, turn = np.divmod(position, self._places)
        rounds = range(int(depth[0]), int(depth[-1]) + 1)
        turns = np.stack([self._turns(number) for number in rounds])
        place = turns[depth - rounds.start, turn]
        rest = depth == self._rounds
        place[rest] = self._longer[position[rest] - self._rounds * self._places]
        at = self._edges[place] + depth
        index = np.searchsorted(self._ends, at, "right")
        begin = np.maximum(self._starts[index], self._edges[place])
        numbers = np.empty(len(at), np.int64)
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
        if self._total <= READERS:
            return random.permutation(self._places)
        places = np.arange(self._places)
        part = np.concatenate(
            [random.permutation(len(group)) for group in np.split(places, places[::_NEAR][1:])]
        )
        return places[np.lexsort([random.random(self._places), part])]

    def open_at(self, position: int) -> np.ndarray:
        """A row of the partition at which each place is at a position."""
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


class Sample(NamedTuple):
    """Rows that a pass takes; drawn anew for each pass.

    Attributes
    ----------
    draw : callable
        Gives their numbers, sorted, with repetitions.
    length : int
        How many it gives.
    digest : str
        Digest of what decides which these are.
    """

    draw: Callable[[np.random.Generator], np.ndarray]
    length: int
    digest: str


class Stream:
    """Pass after pass over the rows of a frame.

    Parameters
    ----------
    counts
        Rows of each partition: int64 (partitions,).
    seed
        Seed of the shuffle; None for the order of the frame.
    readers
        Places from which a shuffle reads.
    sample
        Draws the rows of each pass; None for all rows.
    frame
        Number of the frame in a mix: a row that two of them have gets two random augmentations.
    """

    def __init__(
        self,
        counts: np.ndarray,
        seed: int | None,
        readers: int = READERS,
        sample: Sample | None = None,
        frame: int = 0,
    ) -> None:
        self.counts = counts
        self.seed = seed
        self.length = int(counts.sum()) if sample is None else sample.length
        self._readers = readers
        self._sample = sample
        self._frame = frame
        self._pass = functools.lru_cache(2)(self._make_pass)

    def rows(self, start: int, stop: int) -> tuple[Rows, np.ndarray]:
        """Rows at the positions of the stream, and the place from which each is read."""
        parts = [
            self._pass_rows(number, begin, end) for number, begin, end in self._spans(start, stop)
        ]
        rows = Rows(
            np.concatenate([np.empty(0, np.int64), *(part.numbers for part, _ in parts)]),
            np.concatenate([np.empty(0, np.uint64), *(part.draws for part, _ in parts)]),
        )
        return rows, np.concatenate([np.empty(0, np.int64), *(places for _, places in parts)])

    def open_at(self, position: int) -> np.ndarray:
        """Numbers of rows whose partitions are in use at a position."""
        if not self.length:
            return np.empty(0, np.int64)
        number, at = divmod(position, self.length)
        order, selected = self._pass(number)
        rows = order.open_at(at)
        return rows if selected is None else selected[rows]

    def digest(self) -> str:
        """Digest of all that decides the order apart from the seed."""
        sample = "" if self._sample is None else self._sample.digest
        return digest_of(self.counts, np.array([self._readers]), sample)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        while start < stop:
            number, begin = divmod(start, self.length)
            end = min(self.length, begin + stop - start)
            yield number, begin, end
            start += end - begin

    def _pass_rows(self, number: int, start: int, stop: int) -> tuple[Rows, np.ndarray]:
        order, selected = self._pass(number)
        numbers, places = order.rows(start, stop)
        repetitions = np.zeros(len(numbers), np.int64)
        if selected is not None:
            repetitions = numbers - np.searchsorted(selected, selected[numbers])
            numbers = selected[numbers]
        return Rows(numbers, draws_of(self.seed or 0, number, repetitions, self._frame)), places

    def _make_pass(self, number: int) -> tuple[Pass, np.ndarray | None]:
        counts, selected = self.counts, None
        if self._sample is not None:
            random = np.random.default_rng([self.seed or 0, number, _SAMPLE])
            selected = self._sample.draw(random)
            edges = np.concatenate([[0], np.cumsum(counts)])
            counts = np.diff(np.searchsorted(selected, edges))
        if self.seed is None:
            return InOrder(int(counts.sum())), selected
        return Shuffled(counts, (self.seed, number), self._readers), selected


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


class Position(NamedTuple):
    """Position in an epoch, to be stored in a model's checkpoint; as a list, in JSON too.

    Attributes
    ----------
    epoch : int
    row : int
        Rows that came before, over all ranks; a bad image counts as a row.
    seed : int or None
        Seed of the shuffle.
    rows : int or None
        Rows of the epoch; None if it repeats for ever, or if they were not counted.
    order : str or None
        Digest of what else decides the order; None if nothing was counted.
    """

    epoch: int
    row: int
    seed: int | None = None
    rows: int | None = None
    order: str | None = None

    def check(self, other: Position) -> None:
        """Refuse ``other``, an argument ``start=``, unless it is a position in the same epoch.

        Raises
        ------
        ArgumentError
        """
        ours, theirs = self._asdict(), other._asdict()
        for name, what in (
            ("seed", "the position has shuffle={}, and this is shuffle={}"),
            ("epoch", "the position has epoch={}, and this is epoch={}"),
            ("rows", "the position is in an epoch of {} rows, and this has {}"),
            (
                "order",
                "the position is in another order ({}, and this is {}): the partitions have other "
                "numbers of rows, or larger images, or weights= and balance= differ; or with "
                "buckets= and mix_batches, these or batch_size × ranks do",
            ),
        ):
            is_unknown = name in ("rows", "order") and None in (ours[name], theirs[name])
            if ours[name] != theirs[name] and not is_unknown:
                reason = what.format(theirs[name], ours[name])
                raise ArgumentError(f"start={tuple(other)!r}: {reason}")
        if self.rows is not None and other.row > self.rows:
            raise ArgumentError(f"start={tuple(other)!r}: this epoch ends after {self.rows:,} rows")


def parse_start(start: Any) -> int | Position:
    """Parse the argument ``start=``: a number of batches, or a position.

    Raises
    ------
    ArgumentError
    """
    advice = "pass how many batches to skip, or the position of an earlier iterator"
    if isinstance(start, (str, bytes)) or not isinstance(start, Sequence):
        return whole_number("start", start, 0, advice)
    try:
        epoch, row, seed, rows, order = start
        seed, rows = (None if part is None else operator.index(part) for part in (seed, rows))
        position = Position(operator.index(epoch), operator.index(row), seed, rows, order)
    except (TypeError, ValueError):
        raise ArgumentError(f"start={shown(start)}; {advice}") from None
    if min(position.epoch, position.row) < 0 or not isinstance(order, str | None):
        raise ArgumentError(f"start={shown(start)}; {advice}")
    return position


class Plan(Protocol):
    """The steps of an epoch.

    Attributes
    ----------
    size : int
        Rows of a step, over all ranks.
    length : int or None
        Rows of the epoch; None if it never ends.
    """

    size: int
    length: int | None

    def step(self, row: int) -> list[tuple[Rows, np.ndarray]]:
        """Rows of the step that begins after ``row`` rows, by frame, with their places."""

    def after(self, row: int, steps: int) -> int:
        """Rows before the step that comes so many steps after the one at ``row``."""

    def count(self, drop_last: bool) -> int:
        """Steps of the epoch: all, or those that are full."""

    def shape(self, row: int) -> tuple[int, int] | None:
        """Height and width of the images of the step at ``row``; None for those of the read."""

    def open_at(self, row: int) -> list[np.ndarray | None]:
        """Rows of each frame whose partitions are in use after ``row`` rows; None for all."""

    def digest(self) -> str:
        """Digest of all that decides the order apart from the seed and the epoch."""


class _EvenPlan:
    """Plan whose steps have all the same size, but the last."""

    size: int
    length: int | None

    def after(self, row: int, steps: int) -> int:
        """Rows before the step that comes so many steps after the one at ``row``."""
        row += steps * self.size
        return row if self.length is None else min(row, self.length)

    def count(self, drop_last: bool) -> int:
        """Steps of the epoch: all, or those that are full."""
        assert self.length is not None
        return self.length // self.size if drop_last else -(-self.length // self.size)

    def shape(self, row: int) -> None:
        """Height and width of the images of a step: those of the read."""


class Epoch(_EvenPlan):
    """A piece of a stream as a plan."""

    def __init__(self, stream: Stream, size: int, begin: int, length: int | None) -> None:
        self.size = size
        self.length = length
        self._stream = stream
        self._begin = begin

    def step(self, row: int) -> list[tuple[Rows, np.ndarray]]:
        """Rows of the step that begins after ``row`` rows, with their places."""
        return [self._stream.rows(self._begin + row, self._begin + self.after(row, 1))]

    def open_at(self, row: int) -> list[np.ndarray | None]:
        """Rows whose partitions are in use after ``row`` rows; None for all."""
        return [self._stream.open_at(self._begin + row)]

    def digest(self) -> str:
        """Digest of the rows of each partition."""
        return self._stream.digest()


class Bucketed:
    """Steps of rows of one bucket each, in the order in which a stream fills them.

    Parameters
    ----------
    stream
        Stream of the frame.
    size
        Rows of a step, over all ranks.
    begin, length
        The part of the stream.
    bucket_of
        Bucket of each row of the frame: int (rows,).
    shapes
        Height and width of each bucket: int64 (buckets, 2).
    """

    def __init__(
        self,
        stream: Stream,
        size: int,
        begin: int,
        length: int,
        bucket_of: np.ndarray,
        shapes: np.ndarray,
    ) -> None:
        self.size = size
        self.length: int | None = length
        self._shapes = shapes
        self._bucket_of = bucket_of
        self._stream = stream.digest()
        rows, places = stream.rows(begin, begin + length)
        buckets = bucket_of[rows.numbers]
        by_bucket = np.argsort(buckets, kind="stable")
        counts = np.bincount(buckets, minlength=len(shapes))
        firsts = np.cumsum(counts) - counts
        # Of each step: its first row among those of all buckets, its rows, and when it is full.
        begins = [
            np.arange(first, first + n, size) for first, n in zip(firsts, counts, strict=True)
        ]
        lengths = [np.minimum(size, n - np.arange(0, n, size)) for n in counts]
        first, rows_of = np.concatenate(begins), np.concatenate(lengths)
        is_full = rows_of == size
        last = by_bucket[first + rows_of - 1] if length else first
        order = np.lexsort([last, ~is_full])
        self._first, self._rows_of = first[order], rows_of[order]
        self._edges = np.concatenate([[0], np.cumsum(self._rows_of)])
        self._rows = Rows(rows.numbers[by_bucket], rows.draws[by_bucket])
        self._places = places[by_bucket]

    def _number(self, row: int) -> int:
        return int(np.searchsorted(self._edges, row))

    def step(self, row: int) -> list[tuple[Rows, np.ndarray]]:
        """Rows of the step that begins after ``row`` rows, with their places."""
        number = self._number(row)
        first = int(self._first[number])
        some = slice(first, first + int(self._rows_of[number]))
        return [(self._rows.slice(some), self._places[some])]

    def after(self, row: int, steps: int) -> int:
        """Rows before the step that comes so many steps after the one at ``row``."""
        return int(self._edges[min(self._number(row) + steps, len(self._edges) - 1)])

    def count(self, drop_last: bool) -> int:
        """Steps of the epoch: all, or those that are full."""
        return int((self._rows_of == self.size).sum()) if drop_last else len(self._rows_of)

    def shape(self, row: int) -> tuple[int, int]:
        """Height and width of the images of the step at ``row``."""
        first = self._first[self._number(row)]
        height, width = self._shapes[self._bucket_of[self._rows.numbers[first]]].tolist()
        return height, width

    def open_at(self, row: int) -> list[np.ndarray | None]:
        """None: rows wait until their bucket is full."""
        return [None]

    def digest(self) -> str:
        """Digest of the rows of each partition, of their buckets, and of the size of a step."""
        return digest_of(self._stream, self._bucket_of, self._shapes, np.array([self.size]))


class Mix(_EvenPlan):
    """Steps with rows of several streams, as many of each as independent draws would give.

    Parameters
    ----------
    streams
        Streams of the frames.
    size
        Rows of a step, over all ranks.
    shares
        Probability that a row comes from each frame; float64 (frames,), sum 1.
    seed, epoch
        Seed of the draws.
    longest
        Whether to continue with the other frames when one has no rows left.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        size: int,
        shares: np.ndarray,
        seed: int,
        epoch: int,
        longest: bool,
    ) -> None:
        self.size = size
        self._streams = streams
        self._epoch = epoch
        self._shares = shares
        lengths = np.array([stream.length for stream in streams])
        random = np.random.default_rng([seed, epoch, _MIX])
        # Rows taken of each frame before each step, and after the last: (steps + 1, frames).
        self._taken = _taken(lengths, size, shares, random, longest)
        self.length = int(self._taken[-1].sum())

    def step(self, row: int) -> list[tuple[Rows, np.ndarray]]:
        """Rows of the step that begins after ``row`` rows, by frame, with their places."""
        number = -(-row // self.size)
        edges = self._taken[number : number + 2].T.tolist()
        return [
            stream.rows(*(self._epoch * stream.length + edge for edge in pair))
            for stream, pair in zip(self._streams, edges, strict=True)
        ]

    def open_at(self, row: int) -> list[np.ndarray | None]:
        """Rows of each frame whose partitions are in use after ``row`` rows."""
        taken = self._taken[-(-row // self.size)].tolist()
        return [
            stream.open_at(self._epoch * stream.length + min(edge, max(stream.length - 1, 0)))
            for stream, edge in zip(self._streams, taken, strict=True)
        ]

    def digest(self) -> str:
        """Digest of the frames' partitions, of the shares and of the size of a step."""
        streams = [stream.digest() for stream in self._streams]
        return digest_of(*streams, self._shares, np.array([self.size]))


# Steps that are drawn at once.
_DRAWN = 1024


def _taken(
    lengths: np.ndarray, size: int, shares: np.ndarray, random: np.random.Generator, longest: bool
) -> np.ndarray:
    taken = np.zeros(len(lengths), np.int64)
    tables = [taken[None]]
    while (taken < lengths).all() or (longest and (taken < lengths).any()):
        active = shares * (taken < lengths)
        drawn = random.multinomial(size, active / active.sum(), _DRAWN)
        table = taken + np.cumsum(drawn, axis=0)
        ending = np.flatnonzero(((table >= lengths) & (active > 0)).any(axis=1))
        whole = int(ending[0]) if len(ending) else _DRAWN
        tables.append(table[:whole])
        taken = table[whole - 1] if whole else taken
        if whole == _DRAWN:
            continue
        before, taken = taken, np.minimum(taken + drawn[whole], lengths)
        while longest and (missing := size - int((taken - before).sum())) and any(taken < lengths):
            active = shares * (taken < lengths)
            taken = np.minimum(taken + random.multinomial(missing, active / active.sum()), lengths)
        tables.append(taken[None])
    return np.concatenate(tables)


def digest_of(*parts: np.ndarray | str) -> str:
    """Short digest of arrays and other digests."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        array = np.frombuffer(part.encode(), np.uint8) if isinstance(part, str) else part
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


class Share(NamedTuple):
    """The part of an epoch that a process reads.

    A rank takes its part of each step; a worker of a rank takes every workers-th step.
    """

    rank: int = 0
    world: int = 1
    worker: int = 0
    workers: int = 1

    def of(self, parts: list[tuple[Rows, np.ndarray]]) -> list[Rows]:
        """The rank's rows of a step, by frame.

        Places are dealt out in order, so that each shard is read by few ranks.
        """
        ours, first = [], 0
        for rows, places in parts:
            count = len(places)
            # The ranks take turns at one row more than others.
            more = (np.arange(self.world) - first) % self.world < count % self.world
            first += count % self.world
            edges = np.concatenate([[0], np.cumsum(count // self.world + more)])
            mine = np.argsort(places, kind="stable")[edges[self.rank] : edges[self.rank + 1]]
            ours.append(Rows(rows.numbers[mine], rows.draws[mine]))
        return ours


def parse_shard(shard: Any, format: str) -> Share:
    """Parse the argument ``shard=``: (rank, world), None, or "auto".

    Raises
    ------
    ArgumentError
    """
    if shard is None:
        return Share()
    if isinstance(shard, str) and shard == "auto":
        ours = torch_rank() if format == "torch" else (0, 1)
        if format == "torch" and ours == (0, 1):
            ours = _launched_rank()
        return Share(*ours, *torch_worker())
    try:
        rank, world = map(operator.index, shard)
    except (TypeError, ValueError):
        rank, world = 0, 0
    if not 0 <= rank < world:
        raise ArgumentError(
            f"shard={shard!r}; pass (rank, world), a rank from 0 below world, or 'auto', or None"
        )
    return Share(rank, world)


def torch_rank() -> tuple[int, int]:
    """Rank and world size of this process in ``torch.distributed``; (0, 1) outside of it."""
    torch = sys.modules.get("torch")
    group = None if torch is None else torch.distributed
    if group is not None and group.is_available() and group.is_initialized():
        return group.get_rank(), group.get_world_size()
    return 0, 1


# The process that imported this module: a fork of it has its process group, if there is one.
_PROCESS = os.getpid()


def _launched_rank() -> tuple[int, int]:
    """Rank and world size by torchrun's variables, in a spawned worker of a ``DataLoader``.

    It has no process group, and iterators that it makes have no process that could tell them.

    Raises
    ------
    ArgumentError
        If the variables are no rank.
    """
    if worker_of_loader() is None or os.getpid() != _PROCESS:
        return 0, 1
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and world is None:
        return 0, 1
    try:
        numbers = int(rank or ""), int(world or "")
        if 0 <= numbers[0] < numbers[1]:
            return numbers
    except ValueError:
        pass
    raise ArgumentError(
        "shard='auto': a spawned worker of a DataLoader takes its rank from torchrun's variables, "
        f"and RANK={rank!r} with WORLD_SIZE={world!r} is none: set both, or pass shard=(rank, "
        "world), or shard=None for all rows"
    )


def torch_worker() -> tuple[int, int]:
    """Number and count of the workers of this process's torch ``DataLoader``; else (0, 1)."""
    return worker_of_loader() or (0, 1)


def worker_of_loader() -> tuple[int, int] | None:
    """Number of this worker of a torch ``DataLoader``, and how many it has; None in no worker."""
    torch = sys.modules.get("torch")
    worker = None if torch is None else torch.utils.data.get_worker_info()
    return None if worker is None else (worker.id, worker.num_workers)
