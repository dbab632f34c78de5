"""Progress line for a slow listing of shards, in the command line and under ``progress``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

# Seconds before the first line, and between updates.
_PATIENCE, _EVERY = 1.0, 0.5

_output: ContextVar[TextIO | None] = ContextVar("output for listings", default=None)
_current: ContextVar[_Listing | None] = ContextVar("current listing", default=None)


@contextmanager
def showing_listings(out: TextIO | None) -> Iterator[None]:
    """Show listings on ``out`` inside the context; None changes nothing."""
    token = _output.set(out or _output.get())
    try:
        yield
    finally:
        _output.reset(token)


@contextmanager
def listing(what: str) -> Iterator[None]:
    """Show that ``what`` is being listed, if that takes longer than a second."""
    out = _output.get()
    if out is None or _current.get() is not None:
        yield
        return
    current = _Listing(what, out)
    token = _current.set(current)
    try:
        yield
    finally:
        _current.reset(token)
        current.end()


def found(files: int = 1) -> None:
    """Add to the number of files that the current listing has found."""
    current = _current.get()
    if current is not None:
        current.files += files


class _Listing:
    """Thread that writes the line repeatedly."""

    def __init__(self, what: str, out: TextIO) -> None:
        self.files = 0
        self._what = what
        self._out = out
        self._started = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="image-ingest-listing", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        if self._ended.wait(_PATIENCE):
            return
        is_last = False
        while not is_last:
            is_last = self._ended.wait(_EVERY)
            seconds = time.monotonic() - self._started
            line = f"\rlisting {self._what}: {self.files:,} files in {seconds:.1f} s"
            print(line, end="\n" if is_last else "", file=self._out, flush=True)
