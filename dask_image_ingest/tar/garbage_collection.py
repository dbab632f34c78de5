"""Python's garbage collector, paused where many objects are made and none in cycles.

The pause is the whole process's, and other threads may make cycles meanwhile. So it does not last
as long as any thread is inside, which may be for ever: the first thread that comes or leaves when
it has lasted a second ends it, whoever else is inside. The collector then has a tenth of a second
at least, since the first thread that comes after that begins the next pause.
"""

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_paused"]

_PAUSE = 1.0
_REST = 0.1


@contextmanager
def gc_paused() -> Iterator[None]:
    """Stop cyclic garbage collection, which takes a third of the time of indexing a tar.

    Threads may do this at once: the last that leaves turns the collector on, if it was on when the
    first came, or one before it when the pause has lasted a second. In a process that is forked
    meanwhile it is on, too.
    """
    _pause.enter()
    try:
        yield
    finally:
        _pause.leave()


class _Pause:
    """The threads that are inside, and whether the collector was on before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: list[int] = []
        self._paused = False
        self._was_on = False
        self._since = 0.0

    def enter(self) -> None:
        with self._lock:
            self._end_if_long()
            rested = time.monotonic() - self._since >= _REST
            if not self._inside or (rested and not self._paused):
                self._begin()
            self._inside.append(threading.get_ident())

    def leave(self) -> None:
        with self._lock:
            self._inside.remove(threading.get_ident())
            if self._inside:
                self._end_if_long()
            else:
                self._end()

    def forked(self) -> None:
        """Forget the threads that a fork does not have."""
        self._lock = threading.Lock()
        self._inside = [thread for thread in self._inside if thread == threading.get_ident()]
        if not self._inside:
            self._end()

    def _begin(self) -> None:
        self._paused, self._since = True, time.monotonic()
        self._was_on = gc.isenabled()
        gc.disable()

    def _end_if_long(self) -> None:
        if time.monotonic() - self._since >= _PAUSE:
            self._end()

    def _end(self) -> None:
        if self._paused:
            self._paused, self._since = False, time.monotonic()
            if self._was_on:
                gc.enable()


_pause = _Pause()

os.register_at_fork(after_in_child=_pause.forked)
