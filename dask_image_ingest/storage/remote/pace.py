"""How long a server takes to answer and how fast it sends, as the requests so far have shown."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from urllib.parse import urlsplit

__all__ = ["Pace", "Request", "pace_of"]

# Of so many requests the median counts.
_REMEMBERED = 32

# A connection alone may be faster than one beside others: the rate counts of requests that had at
# least so many beside them, and of answers of at least so many bytes.
_BESIDE, _ENOUGH = 4, 32 << 10

# In seconds, and in times of the usual latency: what a server is waited for at least; and one that
# is not known yet.
_PATIENCE, _LATENCIES, _UNKNOWN = 0.5, 15, 2.5


class Pace:
    """What requests to one server have cost.

    Parameters
    ----------
    connections
        How many requests are made at once.
    clock
        Gives seconds.
    """

    def __init__(self, connections: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._connections = connections
        self._clock = clock
        self._lock = threading.Lock()
        #: Whether the last walk through a shard there has left out nothing.
        self.reads_through = False
        self._under_way = 0
        self._latencies: deque[float] = deque(maxlen=_REMEMBERED)
        self._rates: deque[float] = deque(maxlen=_REMEMBERED)

    def break_even(self) -> float | None:
        """How many bytes all connections fetch in the time of one answer; None if not known yet.

        To leave out more than that pays, though it takes a request that waits for the last one.
        """
        with self._lock:
            if len(self._rates) < _BESIDE or not self._latencies:
                return None
            return median(self._latencies) * median(self._rates) * self._connections

    def patience(self, longest: float, stalls: int) -> float:
        """How long to wait for the next byte: of a server that answered fast so far not for long.

        Twice as long after each wait in vain, and while few answers are known.
        """
        with self._lock:
            usual = _UNKNOWN
            if self._latencies:
                usual = max(_PATIENCE, _LATENCIES * median(self._latencies))
                usual *= 2 if len(self._latencies) < _BESIDE else 1
        return min(longest, usual * 2 ** min(stalls, 10))

    @contextmanager
    def watch(self) -> Iterator[Request]:
        """Measure a request; one that fails counts for nothing."""
        with self._lock:
            self._under_way += 1
            beside = self._under_way
        request = Request(self._clock)
        try:
            yield request
            self._count(request, beside)
        finally:
            with self._lock:
                self._under_way -= 1

    def _count(self, request: Request, beside: int) -> None:
        end = self._clock()
        with self._lock:
            beside = max(beside, self._under_way)
            if request.answered is not None:
                self._latencies.append(request.answered - request.began)
                seconds = end - request.answered
            elif request.nbytes < _ENOUGH:
                # All of it came at once, as from fsspec: a small answer is one that was waited for.
                self._latencies.append(end - request.began)
                return
            else:
                waited = min(self._latencies, default=0.0)
                seconds = max(end - request.began - waited, (end - request.began) / 10)
            if request.nbytes >= _ENOUGH and beside >= _BESIDE:
                self._rates.append(request.nbytes / max(seconds, 1e-6))


class Request:
    """One that is under way."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.began = clock()
        #: When the answer began, if that was told apart from its end.
        self.answered: float | None = None
        self.nbytes = 0
        self._clock = clock

    def take(self, piece: bytes) -> None:
        """Count a piece; an empty one says that the answer has begun."""
        if not piece and self.answered is None:
            self.answered = self._clock()
        self.nbytes += len(piece)


_paces: dict[tuple[str, str, int], Pace] = {}
# A lock may be held for ever in a forked process.
os.register_at_fork(after_in_child=_paces.clear)


def pace_of(url: str, connections: int) -> Pace:
    """The pace of the server or bucket of a shard: all shards there share it, in this process."""
    parts = urlsplit(url)
    key = (parts.scheme, parts.netloc, connections)
    return _paces.get(key) or _paces.setdefault(key, Pace(connections))
