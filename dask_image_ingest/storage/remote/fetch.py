"""Requests for the bytes of a remote shard: sources, latencies, retries and threads."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from threading import Event
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from dask_image_ingest.errors import ShardError


class Fault(Exception):
    """A request has failed, and may succeed when it is made again.

    The server asks to ``wait`` so many seconds, was not reached, or sent nothing for too long.
    """

    def __init__(
        self, message: str, wait: float = 0.0, unreached: bool = False, stalled: bool = False
    ) -> None:
        super().__init__(message)
        self.wait = wait
        self.unreached = unreached
        self.stalled = stalled


@dataclass(frozen=True, slots=True)
class Head:
    """First bytes of a shard, all of them where its server knows no ranges, and its size."""

    data: bytes
    size: int


class Source(Protocol):
    """A remote shard as it is when its head is read; any number of threads read its ranges.

    ``head`` and ``stream`` make one request each. They raise `Fault` where it may be made again,
    ``ShardNotFoundError`` where there is no such shard, and ``ShardError`` where nothing helps, or
    where the shard is not the one any more whose head was read.
    """

    url: str

    def head(self, nbytes: int, stall_timeout: float | None = None) -> Head:
        """Read the first bytes, and keep in mind which version this is."""
        ...

    def stream(self, start: int, stop: int, stall_timeout: float | None = None) -> Iterator[bytes]:
        """Read a range, piece by piece; an empty one first says that the answer has begun.

        More than ``stall_timeout`` seconds without a byte are a fault, if it is given.
        """
        ...

    @property
    def version(self) -> str:
        """Version as a listing shows it; empty if it shows none."""
        ...

    def is_version(self, version: str) -> bool:
        """False if this is surely not the version of a listing."""
        ...

    def refuse_changes(self) -> None:
        """Raise if what was read may be of two versions."""
        ...


#: Start and stop.
Range = tuple[int, int]


def merge(ranges: Iterable[Range], gap: int = 0) -> list[Range]:
    """Join ranges that overlap, touch, or lie no more than ``gap`` bytes apart; in order."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if merged and start - merged[-1][1] <= gap:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def split(start: int, stop: int, largest: int) -> list[Range]:
    """Cut a range into pieces of ``largest`` bytes at most."""
    return [(at, min(at + largest, stop)) for at in range(start, stop, largest)]


_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def request_threads(connections: int) -> ThreadPoolExecutor:
    """The pool with that many threads: all shards that are open in this process share it."""
    with _lock:
        if connections not in _pools:
            _pools[connections] = ThreadPoolExecutor(connections, "image-ingest-remote")
        return _pools[connections]


def _forget() -> None:
    """A forked process has none of the threads, and the lock may be held for ever."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_forget)


# Recent response times of which the median counts, and how few of them are too few to trust.
_REMEMBERED, _FEW = 32, 4

# Shortest stall timeout in seconds and in latencies; the timeout while no latency is known.
_LEAST_TIMEOUT, _LATENCIES, _UNKNOWN = 0.5, 15, 2.5

# Answers of fewer bytes take no longer than their latency, where the answer comes in one piece.
_SMALL = 32 << 10


class LatencyStats:
    """Recent response times of a server or bucket, in seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latencies: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, latency: float) -> None:
        """Count the answer to one request."""
        with self._lock:
            self._latencies.append(latency)

    def stall_timeout(self, longest: float, stalls: int) -> float:
        """Seconds to wait for the next byte: few for a server that has answered fast.

        Twice as many after each stall, and while few answers are known.
        """
        with self._lock:
            usual = _UNKNOWN
            if self._latencies:
                usual = max(_LEAST_TIMEOUT, _LATENCIES * median(self._latencies))
                usual *= 2 if len(self._latencies) < _FEW else 1
        return min(longest, usual * 2 ** min(stalls, 10))


_latency_stats: dict[tuple[str, str], LatencyStats] = {}
# A lock may be held for ever in a forked process.
os.register_at_fork(after_in_child=_latency_stats.clear)


def latency_stats_of(url: str) -> LatencyStats:
    """Latencies of the server or bucket of a shard, shared by all its shards in this process."""
    parts = urlsplit(url)
    key = (parts.scheme, parts.netloc)
    return _latency_stats.get(key) or _latency_stats.setdefault(key, LatencyStats())


Result = TypeVar("Result")

# Seconds. The pause doubles with each failure, and some of it is left to chance, so that those who
# failed together don't come back together.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0

# How often to knock where no server has answered yet: its name may be misspelt.
_CONNECT_ATTEMPTS = 3


class Retries:
    """Failures of one task: when to retry, and when to give up.

    ``limit`` is in seconds from the first failure to the last try. ``reached`` says that the server
    has answered before; ``stopped`` is set when nobody waits for the result any more.
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
        if over or (fault.unreached and not self._reached and self._failures >= _CONNECT_ATTEMPTS):
            why = "its server cannot be reached: " if fault.unreached else ""
            tried = f" ({self._failures} tries)" if self._failures > 1 else ""
            raise ShardError(f"{self._url} cannot be read: {why}{fault}{tried}") from fault
        if self._stopped.wait(pause):
            raise ShardError(f"{self._url} was closed while it was read")


def call_with_retry(task: Callable[[], Result], retries: Retries) -> Result:
    """Call ``task`` until it raises no `Fault`."""
    while True:
        try:
            return task()
        except Fault as fault:
            retries.wait(fault)


def first_bytes(
    source: Source, nbytes: int, retries: Retries, latency: LatencyStats, read_timeout: float
) -> Head:
    """The first bytes of a shard, requested again until they come."""
    stalls = 0
    while True:
        began = time.monotonic()
        try:
            head = source.head(nbytes, latency.stall_timeout(read_timeout, stalls))
        except Fault as fault:
            stalls += fault.stalled
            retries.wait(fault)
        else:
            latency.add(time.monotonic() - began)
            return head


def whole_range(
    source: Source,
    start: int,
    stop: int,
    retries: Retries,
    latency: LatencyStats,
    read_timeout: float,
) -> bytearray:
    """The bytes of a range; an interrupted request is resumed at the next byte."""
    data = bytearray()
    stalls = 0
    while True:
        before = len(data)
        stall_timeout = latency.stall_timeout(read_timeout, stalls)
        began = time.monotonic()
        try:
            for piece in source.stream(start + before, stop, stall_timeout):
                # An empty piece says that the answer has begun; fsspec gives all of it at once.
                if not piece or (len(piece) == stop - start <= _SMALL):
                    latency.add(time.monotonic() - began)
                data.extend(piece)
            if len(data) != stop - start:
                raise Fault(f"{len(data)} of the {stop - start} bytes from {start} on came")
            return data
        except Fault as fault:
            stalls += fault.stalled
            retries.wait(fault, progress=len(data) > before)
