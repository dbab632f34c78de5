"""Requests are made again, with growing pauses, until they succeed or a time limit is over."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from threading import Event
from typing import TypeVar

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage.remote.pace import Pace
from dask_image_ingest.storage.remote.source import Fault, Head, Source

__all__ = ["Retries", "first_bytes", "retried", "whole_range"]

Result = TypeVar("Result")

# Seconds. The pause doubles with each failure, and some of it is left to chance, so that those who
# failed together don't come back together.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0

# How often to knock where no server has answered yet: its name may be misspelt.
_KNOCKS = 3


class Retries:
    """The failures of one task, and whether and when to try again.

    Parameters
    ----------
    url
        What errors call the shard.
    limit
        Seconds from the first failure to the last try.
    reached
        Whether its server has answered before.
    stopped
        Set when nobody waits for the result any more.
    """

    def __init__(
        self, url: str, limit: float, reached: bool = True, stopped: Event | None = None
    ) -> None:
        self._url = url
        self._limit = limit
        self._reached = reached
        self._stopped = stopped or Event()
        self._failures = self._in_vain = 0
        self._since = 0.0

    def wait(self, fault: Fault, progress: bool = False) -> None:
        """Pause before the next try, a short while if this one had some ``progress``.

        Raises
        ------
        ShardError
            If there is to be none.
        """
        now = time.monotonic()
        self._since = self._since or now
        self._failures += 1
        self._in_vain = 0 if progress else self._in_vain + 1
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self._in_vain, 20) / 2)
        pause = max(pause * random.uniform(0.5, 1.0), fault.wait)
        over = now + pause - self._since > self._limit
        if over or (fault.unreached and not self._reached and self._failures >= _KNOCKS):
            why = "its server cannot be reached: " if fault.unreached else ""
            tried = f" ({self._failures} tries)" if self._failures > 1 else ""
            raise ShardError(f"{self._url} cannot be read: {why}{fault}{tried}") from fault
        if self._stopped.wait(pause):
            raise ShardError(f"{self._url} was closed while it was read")


def retried(task: Callable[[], Result], retries: Retries) -> Result:
    """What ``task`` gives, as soon as it raises no `Fault`."""
    while True:
        try:
            return task()
        except Fault as fault:
            retries.wait(fault)


def first_bytes(
    source: Source, nbytes: int, retries: Retries, pace: Pace, read_timeout: float
) -> Head:
    """How a shard begins."""
    stalls = 0
    while True:
        try:
            # So few bytes take no longer than an answer does.
            with pace.watch():
                return source.head(nbytes, pace.patience(read_timeout, stalls))
        except Fault as fault:
            stalls += fault.stalled
            retries.wait(fault)


def whole_range(
    source: Source, start: int, stop: int, retries: Retries, pace: Pace, read_timeout: float
) -> bytearray:
    """The bytes of a range; where a request breaks off, the next one goes on from there."""
    data = bytearray()
    stalls = 0
    while True:
        before = len(data)
        patience = pace.patience(read_timeout, stalls)
        try:
            with pace.watch() as request:
                for piece in source.stream(start + before, stop, patience):
                    request.take(piece)
                    data.extend(piece)
                if len(data) != stop - start:
                    raise Fault(f"{len(data)} of the {stop - start} bytes from {start} on came")
            return data
        except Fault as fault:
            stalls += fault.stalled
            retries.wait(fault, progress=len(data) > before)
