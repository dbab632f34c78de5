"""Loops over a dataset of batches: which epoch each one is, and where it starts."""

from __future__ import annotations

import json
import os
from multiprocessing import RawArray
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple

from dask_image_ingest.loader.position import Position, parse_start, worker_of_loader

# Bytes of a loop as JSON, at most.
_SIZE = 1024


class Loop(NamedTuple):
    """Epoch of a loop, and where it starts: an argument ``start=``."""

    epoch: int
    start: int | Position


class Loops:
    """The loop that begins next, or the latest one if it has begun.

    torch copies a dataset to workers, which may be there for many loops, and tells nobody where a
    loop begins. So it lies in memory that a process shares with its workers, who note there that it
    has begun. Each process that is no worker has memory of its own: ranks may be copies of one.

    Parameters
    ----------
    start
        Where the first loop starts.
    """

    def __init__(self, start: int | Position) -> None:
        self._hold(Loop(start.epoch if isinstance(start, Position) else 0, start))

    def _hold(self, loop: Loop) -> None:
        self._process = os.getpid()
        # Each with a number, as a loop can be set again.
        self._next = RawArray("c", _SIZE)
        self._begun = RawArray("c", _SIZE)
        self._next.value = json.dumps([0, *loop]).encode()

    def __getstate__(self) -> dict[str, Any]:
        # Only to a process that is being started can it be sent itself; else, its contents.
        is_sent = get_spawning_popen() is not None
        return self.__dict__ if is_sent else {"loop": self.current}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "loop" in state:
            self._hold(state["loop"])
        else:
            self.__dict__ = state

    def _own(self) -> None:
        if self._process != os.getpid() and worker_of_loader() is None:
            self._hold(_loop(self._next.value))

    @property
    def current(self) -> Loop:
        """The loop that begins next; once it has begun, that loop."""
        self._own()
        return _loop(self._next.value)

    @property
    def begun(self) -> Loop:
        """The latest loop that has begun, which another one may be set to follow."""
        return _loop(self._begun.value)

    @property
    def has_begun(self) -> bool:
        """True if the current loop has begun."""
        self._own()
        return bool(self._begun.value == self._next.value)

    def set(self, loop: Loop) -> None:
        """Let the next loop be this one."""
        number, *_ = json.loads(self._next.value)
        self._next.value = json.dumps([number + 1, *loop]).encode()

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be an epoch, from the start that was set for it or from its begin."""
        self.set(Loop(epoch, 0 if self.has_begun else self.current.start))

    def note_begin(self) -> None:
        """Note that the current loop has begun."""
        self._own()
        self._begun.value = self._next.value


def _loop(text: bytes) -> Loop:
    _, epoch, start = json.loads(text)
    return Loop(epoch, parse_start(start))
