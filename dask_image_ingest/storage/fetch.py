"""Requests for the bytes of a remote shard: settings, latencies, retries, and the thread pool."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import median
from threading import Event
from typing import Any, TypeVar
from urllib.parse import urlsplit

import dask
from dask.utils import parse_bytes, parse_timedelta

from dask_image_ingest.errors import ArgumentError, ShardError
from dask_image_ingest.storage.reader import Range
from dask_image_ingest.url_secrets import without_secrets


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of remote reads, in bytes and seconds.

    Attributes
    ----------
    connections
        Concurrent requests of a process.
    request_size
        Most bytes of one request.
    read_ahead
        Most bytes of an open shard that are requested or fetched but not used yet.
    cache
        Bytes of an open shard to keep after they were used.
    gap
        Ranges that lie no further apart are fetched by one request.
    skip
        A header scan that skips more bytes than this at a time fetches headers only.
    head
        Bytes that are fetched when a shard is opened.
    connect_timeout, read_timeout
        Longest wait for a connection, and for the next byte.
    retry_limit
        How long a range is retried after its first failure.
    """

    connections: int = 64
    request_size: int = 4 << 20
    read_ahead: int = 64 << 20
    cache: int = 128 << 20
    gap: int = 128 << 10
    skip: int = 4 << 20
    head: int = 64 << 10
    connect_timeout: float = 10.0
    read_timeout: float = 20.0
    retry_limit: float = 120.0


def configured_settings() -> Settings:
    """The current settings in Dask's configuration.

    Raises
    ------
    ArgumentError
        If a value cannot be parsed, or is too small.
    """
    configured = {}
    for field in fields(Settings):
        name = "image-ingest.remote." + field.name.replace("_", "-")
        value = dask.config.get(name, None)
        if value is not None and not (field.name == "skip" and value == "auto"):
            configured[field.name] = _parse(name, value, field.name)
    return Settings(**configured)


def _parse(name: str, value: object, field: str) -> Any:
    seconds = field.endswith(("timeout", "limit"))
    try:
        parsed = parse_timedelta(value) if seconds else parse_bytes(value)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        kind = "seconds, such as 20 or '20s'" if seconds else "a number, such as 16 or '4 MiB'"
        raise ArgumentError(f"{name}={value!r} in Dask's configuration: give {kind}") from error
    least = 0 if field in ("gap", "skip", "retry_limit", "read_ahead", "cache") else 1e-3
    if parsed < least:
        raise ArgumentError(f"{name}={value!r} in Dask's configuration is too small")
    return parsed


class RetryableError(Exception):
    """Failure of a request that may succeed if it is retried.

    ``wait``: seconds that the server asks to wait. ``unreached``: no connection was made.
    ``stalled``: the server sent nothing for the time of the timeout.
    """

    def __init__(
        self, message: str, wait: float = 0.0, unreached: bool = False, stalled: bool = False
    ) -> None:
        super().__init__(without_secrets(message))
        self.wait = wait
        self.unreached = unreached
        self.stalled = stalled


@dataclass(frozen=True, slots=True)
class FirstBytes:
    """First bytes of a shard (all of them if its server supports no ranges), and its size."""

    data: bytes
    size: int


def merge(ranges: Iterable[Range], gap: int = 0) -> list[Range]:
    """Merge ranges that overlap, touch, or lie at most ``gap`` bytes apart; sorted."""
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
    """Split a range into pieces of at most ``largest`` bytes."""
    return [(at, min(at + largest, stop)) for at in range(start, stop, largest)]


# How many recent latencies are kept; with fewer than the second, the timeout is doubled.
_LATENCIES_KEPT, _LATENCIES_TRUSTED = 32, 4

# The stall timeout: at least so many seconds and so many median latencies; seconds without any.
_LEAST_TIMEOUT, _TIMEOUT_IN_LATENCIES, _TIMEOUT_UNKNOWN = 0.5, 15, 2.5


class LatencyStats:
    """Recent response times of a server or bucket, in seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latencies: deque[float] = deque(maxlen=_LATENCIES_KEPT)

    def add(self, latency: float) -> None:
        """Add the latency of one request."""
        with self._lock:
            self._latencies.append(latency)

    def stall_timeout(self, longest: float, stalls: int) -> float:
        """Seconds to wait for the next byte, at most ``longest``: short if the server is fast.

        Doubled for each of ``stalls`` (earlier timeouts), and while few latencies are known.
        """
        with self._lock:
            timeout = _TIMEOUT_UNKNOWN
            if self._latencies:
                timeout = max(_LEAST_TIMEOUT, _TIMEOUT_IN_LATENCIES * median(self._latencies))
                timeout *= 2 if len(self._latencies) < _LATENCIES_TRUSTED else 1
        return min(longest, timeout * 2 ** min(stalls, 10))


_latency_stats: dict[tuple[str, str], LatencyStats] = {}
# A lock may be held for ever in a forked process.
os.register_at_fork(after_in_child=_latency_stats.clear)


def latency_stats_of(url: str) -> LatencyStats:
    """Latencies of the server or bucket of a shard, shared by all its shards in this process."""
    parts = urlsplit(url)
    key = (parts.scheme, parts.netloc)
    return _latency_stats.get(key) or _latency_stats.setdefault(key, LatencyStats())


Item = TypeVar("Item")
Result = TypeVar("Result")

# Exponential backoff, in seconds, with jitter.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0

# Attempts before a never-reached server is an error: its name may be misspelt.
_CONNECT_ATTEMPTS = 3


class Retries:
    """Backoff of one task: when to retry, and when to give up.

    ``limit`` is in seconds from the first failure to the last attempt. ``reached``: the server has
    answered before. ``stopped`` is set when the result is not needed any more.
    """

    def __init__(
        self, url: str, limit: float, reached: bool = True, stopped: Event | None = None
    ) -> None:
        self._url = url
        self._limit = limit
        self._reached = reached
        self._stopped = stopped or Event()
        self._failures = 0
        #: Failures since the last attempt that received any bytes.
        self._failures_in_a_row = 0
        #: Time of the first failure; 0 before.
        self._since = 0.0

    def wait(self, error: RetryableError, progress: bool = False) -> None:
        """Pause before the next attempt; only briefly if the failed one made ``progress``.

        Raises
        ------
        ShardError
            If there is to be no next attempt.
        """
        now = time.monotonic()
        self._since = self._since or now
        self._failures += 1
        self._failures_in_a_row = 0 if progress else self._failures_in_a_row + 1
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self._failures_in_a_row, 20) / 2)
        pause = max(pause * random.uniform(0.5, 1.0), error.wait)
        too_late = now + pause - self._since > self._limit
        never_reached = error.unreached and not self._reached
        if too_late or (never_reached and self._failures >= _CONNECT_ATTEMPTS):
            why = "its server cannot be reached: " if error.unreached else ""
            tried = f" ({self._failures} tries)" if self._failures > 1 else ""
            raise ShardError(f"{self._url} cannot be read: {why}{error}{tried}") from error
        if self._stopped.wait(pause):
            raise ShardError(f"{self._url} was closed while it was read")


# The longest pause that is taken over from another process, in seconds.
_LONGEST_SHARED = 3600.0


def pause_requests(url: str, seconds: float) -> None:
    """Let no process of this user on this machine ask a server before so many seconds have passed.

    A server that limits requests counts those of all processes. The time of modification of a file
    is when they may go on.
    """
    path, until = _pause_file(url), time.time() + seconds
    with suppress(OSError):  # without a temporary folder, each process waits by itself
        folder = os.path.dirname(path)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if os.lstat(folder).st_uid != os.getuid():
            return  # another user made it, and may have put links into it
        with open(path, "ab") as file:
            if os.fstat(file.fileno()).st_mtime < until:
                os.utime(path, (until, until))


def refuse_paused(url: str) -> None:
    """Raise `RetryableError` if a process was told to wait before it asks this server again."""
    with suppress(OSError):
        status = os.lstat(_pause_file(url))
        wait = min(status.st_mtime - time.time(), _LONGEST_SHARED)
        if wait > 0 and status.st_uid == os.getuid():
            raise RetryableError("its server has asked this machine to wait", wait)


@lru_cache(100)
def _pause_file(url: str) -> str:
    host = hashlib.blake2b(urlsplit(url).netloc.encode(), digest_size=8).hexdigest()
    return os.path.join(tempfile.gettempdir(), f"image-ingest-{os.getuid()}", host)


def request_all(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call a function that waits for requests with each item, ``connections`` of them at once.

    In threads of its own: those of `request_threads` fetch what such a function waits for.
    """
    with ThreadPoolExecutor(configured_settings().connections) as threads:
        return list(threads.map(function, items))


def call_with_retry(task: Callable[[], Result], retries: Retries) -> Result:
    """Call ``task``, again while it raises `RetryableError`."""
    while True:
        try:
            return task()
        except RetryableError as error:
            retries.wait(error)
