"""Streams whose work is done as late as CUDA allows: when somebody waits for it.

Work runs in the order of its stream, after what its stream was told to wait for. The default
stream and blocking streams wait for each other, as CUDA's legacy default stream does.
"""

import contextlib
import itertools
import threading
import weakref
from collections import defaultdict, deque

from simulated.counts import count, lock

_numbers = itertools.count(1)
_streams = weakref.WeakValueDictionary()
_left = []  # work of streams that are gone
_thread = threading.local()


class Work:
    """A function that a stream calls, after other work."""

    def __init__(self, run, needs, before):
        self.run, self.needs, self.done = run, needs, False
        self._before = before  # this work's stream up to it

    def finish(self):
        """Do it, and what comes before it."""
        with lock:
            while not self.done:
                first = self._before.popleft()
                for other in first.needs:
                    other.finish()
                run, first.run, first.needs, first.done = first.run, None, (), True
                run()


def nothing():
    """Work that only has a place in the order of a stream."""


class Stream:
    null = None

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        self.ptr = 0 if null else next(_numbers)
        self._blocking = not null and not non_blocking
        self._pending = deque()
        self.prompt = False  # does its work as soon as it is queued
        self.freed = defaultdict(list)  # blocks of memory by their size
        _streams[self.ptr] = self

    def __del__(self):
        if self._pending:
            _left.append(self._pending)

    def queue(self, run, *needs):
        """Have the stream call this at some time, after other work."""
        with lock:
            if self is Stream.null:
                others = [stream for stream in list(_streams.values()) if stream._blocking]
            else:
                others = [Stream.null] if self._blocking else []
            needs += tuple(stream._pending[-1] for stream in others if stream._pending)
            work = Work(run, needs, self._pending)
            self._pending.append(work)
            if self.prompt:
                work.finish()
        return work

    def catch_up(self):
        """Do all that is queued: of this the host may know nothing."""
        self.queue(nothing).finish()

    @property
    def done(self):
        return not self._pending

    def synchronize(self):
        count("waits")
        self.catch_up()

    def record(self, event=None):
        event = event or Event()
        event.work = self.queue(nothing)
        return event

    def wait_event(self, event):
        self.queue(nothing, *([event.work] if event.work else []))

    def __enter__(self):
        _thread.streams = [*getattr(_thread, "streams", ()), self]
        return self

    def __exit__(self, *_):
        _thread.streams = _thread.streams[:-1]


Stream.null = Stream(null=True)


class Event:
    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.work = None

    @property
    def done(self):
        return self.work is None or self.work.done

    def synchronize(self):
        count("waits")
        if self.work is not None:
            self.work.finish()


def current():
    """The stream of this thread's next work."""
    return (getattr(_thread, "streams", None) or [Stream.null])[-1]


def stream_at(ptr):
    """The stream of a handle, as C knows it."""
    return _streams[ptr or 0]


def synchronize_device():
    """Wait for all streams."""
    count("waits")
    for stream in list(_streams.values()):
        stream.catch_up()
    while _left:
        pending = _left.pop()
        while pending:
            pending[-1].finish()


@contextlib.contextmanager
def prompt(stream):
    """Have a stream do its work as soon as it can, which CUDA allows as well."""
    stream.catch_up()
    stream.prompt = True
    try:
        yield
    finally:
        stream.prompt = False
