"""Place of a process in an epoch: the position of its next batch, and its part of each step.

A step is divided evenly among ranks, and the steps of a rank are dealt in turn to its workers.

`Loops` is the epoch and start of the loops over a torch dataset: one state, for a process and its
workers. torch copies a dataset to workers, and tells nobody where a loop begins. So the state lies
in a file without a name that all copies share. The first worker that begins a loop notes which
epoch it has and where it starts; the others follow that note.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import multiprocessing
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import numpy as np

from dask_image_ingest.arguments import shown, whole_number
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.loader.order import Rows

# What decides the order of rows.
_ORDER = (
    "another order (the rows of each partition, the bytes of an image, weights= and balance=; with "
    "buckets= and mix_batches also these and batch_size × ranks): order"
)


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
        """Refuse ``other``, an argument ``start=``, unless it is a position in the same epoch."""
        named = {"seed": "shuffle", "order": _ORDER}
        for name, ours, theirs in zip(self._fields, self, other, strict=True):
            is_unknown = name in ("rows", "order") and None in (ours, theirs)
            if name != "row" and ours != theirs and not is_unknown:
                raise ArgumentError(
                    f"start={tuple(other)!r}: the position has {named.get(name, name)}={theirs}, "
                    f"and this is {ours}"
                )
        if self.rows is not None and other.row > self.rows:
            raise ArgumentError(f"start={tuple(other)!r}: this epoch ends after {self.rows:,} rows")


def parse_start(start: int | Sequence[Any]) -> int | Position:
    """Parse the argument ``start=``: a number of batches, or a position."""
    advice = "pass how many batches to skip, or the position of an earlier iterator"
    if isinstance(start, (str, bytes)) or not isinstance(start, Sequence):
        return whole_number("start", start, 0, advice)
    try:
        epoch, row, seed, rows, order = start
        position = Position(
            operator.index(epoch),
            operator.index(row),
            None if seed is None else operator.index(seed),
            None if rows is None else operator.index(rows),
            order,
        )
    except (TypeError, ValueError):
        raise ArgumentError(f"start={shown(start)}; {advice}") from None
    if min(position.epoch, position.row) < 0:
        raise ArgumentError(f"start={shown(start)}; {advice}")
    return position


class Share(NamedTuple):
    """The part of an epoch that a process reads.

    A rank takes its part of each step; a worker of a rank takes every workers-th step.
    """

    rank: int = 0
    world: int = 1
    worker: int = 0
    workers: int = 1

    def of(self, parts: list[Rows]) -> list[Rows]:
        """The rank's rows of a step, by frame.

        Places are dealt out in order, so that each shard is read by few ranks.
        """
        ours, first = [], 0
        for rows in parts:
            count = len(rows.numbers)
            # The ranks take turns at one row more than others.
            more = (np.arange(self.world) - first) % self.world < count % self.world
            first += count % self.world
            edges = np.concatenate([[0], np.cumsum(count // self.world + more)])
            mine = np.argsort(rows.places, kind="stable")[edges[self.rank] : edges[self.rank + 1]]
            ours.append(rows.take(mine))
        return ours


def parse_shard(shard: Any, format: str) -> Share:
    """Parse the argument ``shard=``: (rank, world), None, or "auto"."""
    if shard is None:
        return Share()
    worker = None
    if isinstance(shard, str) and shard == "auto":
        worker = worker_of_loader()
        shard = (torch_rank() or _launched_rank()) if format == "torch" else None
        shard = shard or (0, 1)
    try:
        rank, world = map(operator.index, shard)
    except (TypeError, ValueError):
        rank, world = 0, 0
    if not 0 <= rank < world:
        raise ArgumentError(
            f"shard={shard!r}; pass (rank, world), a rank from 0 below world, or 'auto', or None"
        )
    return Share(rank, world, *(worker or (0, 1)))


def torch_rank() -> tuple[int, int] | None:
    """Rank and world size of this process in ``torch.distributed``; None outside of it."""
    torch = sys.modules.get("torch")
    group = None if torch is None else torch.distributed
    if group is not None and group.is_available() and group.is_initialized():
        return group.get_rank(), group.get_world_size()
    return None


# The process that imported this module: a fork of it has its process group, if there is one.
_PROCESS = os.getpid()


def _launched_rank() -> tuple[int, int] | None:
    """Rank and world size by torchrun's variables, in a spawned worker of a ``DataLoader``.

    It has no process group, and iterators that it makes have no process that could tell them.
    """
    is_spawned = worker_of_loader() is not None and os.getpid() == _PROCESS
    if not is_spawned or not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def worker_of_loader() -> tuple[int, int] | None:
    """Number of this worker of a torch ``DataLoader``, and how many it has; None in no worker."""
    torch = sys.modules.get("torch")
    worker = None if torch is None else torch.utils.data.get_worker_info()
    return None if worker is None else (worker.id, worker.num_workers)


# Loops that are remembered: more than are under way at once.
_REMEMBERED = 8

# Bytes of the file, at most.
_SIZE = 1 << 20


class Loop(NamedTuple):
    """Epoch of a loop, and where it starts: an argument ``start=``."""

    epoch: int
    start: int | Position


class Loops:
    """State of the loops over a dataset: that of the next one, and what the latest ones are.

    Each process that is no worker has a state of its own, which its workers share: ranks may be
    copies of one process.

    Parameters
    ----------
    start
        Where the first loop starts.
    """

    def __init__(self, start: int | Position) -> None:
        epoch = start.epoch if isinstance(start, Position) else 0
        first: dict[str, Any] = {"epoch": epoch, "start": start, "is_set": False, "loops": []}
        self._hold(_new_file({"": first}))

    def _hold(self, file: int) -> None:
        self._file = file
        weakref.finalize(self, os.close, file)

    def __getstate__(self) -> Any:
        # To a process that is being started, the file itself; else, as copies and in files, its
        # contents.
        if get_spawning_popen() is not None:
            return DupFd(self._file)
        with self._own() as own:
            return {"": own}

    def __setstate__(self, state: Any) -> None:
        self._hold(_new_file(state) if isinstance(state, dict) else state.detach())

    @contextlib.contextmanager
    def _own(self) -> Iterator[dict[str, Any]]:
        """The state of this process, or of the one whose worker this is, to read and change."""
        parent = multiprocessing.parent_process()
        above = os.getppid() if parent is None else parent.pid
        process = os.getpid() if worker_of_loader() is None else above
        # A lock of the file, not a semaphore: that of a worker that is killed is released.
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            states = json.loads(os.pread(self._file, _SIZE, 0).partition(b"\n")[0])
            inherited = states.get(str(above), states[""])
            own = states.setdefault(str(process), copy.deepcopy(inherited))
            try:
                yield own
            finally:
                os.pwrite(self._file, json.dumps(states).encode() + b"\n", 0)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    @property
    def next(self) -> Loop:
        """The loop that begins next."""
        with self._own() as own:
            return _loop(own)

    @property
    def latest(self) -> Loop:
        """The loop that began last; the next one, if there was none."""
        with self._own() as own:
            begun = [loop for loop in own["loops"] if not loop["is_refused"]]
            return _loop(begun[-1] if begun else own)

    @property
    def is_set(self) -> bool:
        """True if the next loop's epoch was set, or its state loaded, since the latest one."""
        with self._own() as own:
            return bool(own["is_set"])

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be an epoch."""
        with self._own() as own:
            own.update(epoch=epoch, is_set=True)

    def load(self, loop: Loop) -> None:
        """Let the next loop be this one; of the epoch that was set, if one was."""
        with self._own() as own:
            own.update(start=loop.start, epoch=own["epoch"] if own["is_set"] else loop.epoch)

    def begin(self, iteration: int, resumed: Loop | None, check: Callable[[int, Any], Any]) -> Loop:
        """Begin a loop, or join the one that another worker has begun.

        Parameters
        ----------
        iteration
            How many times this process has begun to iterate over its copy of the dataset.
        resumed
            What this worker goes on with, from a state of its own; None for what is next.
        check
            Gives the start in an epoch for a start of perhaps another one, or raises.
        """
        worker = worker_of_loader()
        # Which loop it is: a loop without workers is one of its own.
        loop: dict[str, Any] = {"workers": 0}
        if worker is not None:
            number, workers = worker
            # Its first worker, by the number of this process among those that its parent started.
            first = multiprocessing.current_process()._identity[-1] - number
            loop = {"workers": workers, "iteration": iteration, "process": first}
        with self._own() as own:
            for begun in own["loops"] if worker else ():
                if _is_same(begun, loop):
                    if begun["is_refused"]:
                        check(*_loop(begun))
                    if resumed is not None:
                        _merge(begun, resumed)
                    return _loop(begun)
            epoch, start = resumed or _loop(own)
            if own["is_set"]:
                epoch = own["epoch"]
            # Noted before the check: a worker that comes late to a refused loop is refused, too.
            loop |= {"epoch": epoch, "start": start, "is_refused": True}
            own["loops"] = [*own["loops"], loop][-_REMEMBERED:]
            loop |= {"start": check(epoch, start), "is_refused": False}
            own.update(epoch=epoch, start=0, is_set=False)
            return _loop(loop)


def _loop(state: dict[str, Any]) -> Loop:
    return Loop(state["epoch"], parse_start(state["start"]))


def _is_same(loop: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if workers are of one loop: they are started one after the other.

    Threads may start other processes in between; the workers of another loop are further away.
    """
    distance = abs(loop.get("process", 0) - other["process"])
    names = ("workers", "iteration")
    return all(loop.get(name) == other[name] for name in names) and distance < other["workers"]


def _merge(loop: dict[str, Any], resumed: Loop) -> None:
    """Let a loop start at the first of its workers' steps."""
    starts = [parse_start(loop["start"]), resumed.start]
    positions = [start for start in starts if isinstance(start, Position)]
    if len(positions) == 2:
        loop["start"] = min(positions, key=lambda position: position.row)


def _new_file(states: dict[str, Any]) -> int:
    file = os.memfd_create("loops")
    os.pwrite(file, json.dumps(states).encode() + b"\n", 0)
    return file
