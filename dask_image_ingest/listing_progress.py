"""Progress of a slow listing of shards.

The command line shows it on a terminal, and so does ``progress`` in a program.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

# Seconds before anything is shown, and from one line to the next.
_PATIENCE, _EVERY = 1.0, 0.5

_shown_on: ContextVar[TextIO | None] = ContextVar("listings are shown on", default=None)
_current: ContextVar[_Listing | None] = ContextVar("the listing under way", default=None)


@contextmanager
def showing_listings(out: TextIO | None) -> Iterator[None]:
    """Show on ``out`` what is listed meanwhile; with None, show nothing more than was shown."""
    token = _shown_on.set(out or _shown_on.get())
    try:
        yield
    finally:
        _shown_on.reset(token)


@contextmanager
def listing(what: str) -> Iterator[None]:
    """Say that this is being listed, if it takes longer than a second and somebody looks."""
    out = _shown_on.get()
    if out is None or _current.get() is not None:
        yield
        return
    under_way = _Listing(what, out)
    token = _current.set(under_way)
    try:
        yield
    finally:
        _current.reset(token)
        under_way.end()


def found(files: int = 1) -> None:
    """Count what the listing under way has found."""
    under_way = _current.get()
    if under_way is not None:
        under_way.files += files


class _Listing:
    """One line, written again and again by a thread of its own."""

    def __init__(self, what: str, out: TextIO) -> None:
        self.files = 0
        self._what = what
        self._out = out
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="image-ingest-listing", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _tell(self) -> None:
        if self._ended.wait(_PATIENCE):
            return
        over = False
        while not over:
            over = self._ended.wait(_EVERY)
            seconds = time.monotonic() - self._began
            line = f"\rlisting {self._what}: {self.files:,} files in {seconds:.1f} s"
            print(line, end="\n" if over else "", file=self._out, flush=True)
