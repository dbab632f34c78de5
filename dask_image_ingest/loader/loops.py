"""Loops over a dataset of batches: which epoch each one is, and where it starts."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import multiprocessing
import os
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

from dask_image_ingest.loader.position import Position, parse_start, worker_of_loader

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

    torch copies a dataset to workers, and tells nobody where a loop begins. So the state lies in a
    file without a name that all copies share. The first worker that begins a loop notes which epoch
    it has and where it starts; the others follow that note. Each process that is no worker has a
    state of its own, which its workers share: ranks may be copies of one process.

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
            begun = _begun(own)
            return _loop(begun[-1] if begun else own)

    @property
    def is_set(self) -> bool:
        """True if the next loop's epoch was set, or its state loaded, since the latest one."""
        with self._own() as own:
            return bool(own["is_set"])

    @property
    def comes_again(self) -> bool:
        """True if the next loop is all of the latest one's epoch, and nobody has set that."""
        with self._own() as own:
            begun = _begun(own)
            is_whole = own["start"] == 0 and not own["is_set"]
            return bool(begun) and is_whole and begun[-1]["epoch"] == own["epoch"]

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


def _begun(own: dict[str, Any]) -> list[dict[str, Any]]:
    """The latest loops, without those that were refused."""
    return [loop for loop in own["loops"] if not loop["is_refused"]]


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
