"""Computing with the scheduler in use, with a progress bar where one is wanted."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import dask
from dask.bag import from_sequence
from dask.base import get_scheduler
from dask.callbacks import Callback
from dask.diagnostics import ProgressBar
from distributed import Client, futures_of, progress, wait
from distributed.scheduler import KilledWorker

from dask_image_ingest.killed_workers import killed_by

__all__ = ["compute", "compute_all", "run"]

# In a file, where each update is another line.
_SECONDS_PER_LINE = 30.0


def run(function: Callable[[Any], Any], items: Sequence[Any], show: bool) -> list[Any]:
    """Call ``function`` with each item, each time in a task of its own; results in order.

    Raises
    ------
    DaskImageIngestError
        If workers of a cluster die of an item.
    """
    if not len(items):
        return []
    try:
        return list(compute(from_sequence(items, npartitions=len(items)).map(function), show))
    except KilledWorker as error:
        # Of a single item the task is one with what follows it, and has no number.
        number = error.task[1] if isinstance(error.task, tuple) else 0
        raise killed_by(error, str(items[number])) from error


def compute(collection: Any, show: bool) -> Any:
    """Compute one collection, as :func:`compute_all`."""
    return compute_all([collection], show)[0]


def compute_all(collections: Sequence[Any], show: bool) -> tuple[Any, ...]:
    """Compute collections with the scheduler that was chosen, or else on threads.

    With ``show``, what takes longer than a second has a progress bar on standard error; where that
    is no terminal but a file, a line twice a minute.
    """
    chosen = get_scheduler()
    scheduler = None if chosen else "threads"
    if not show:
        return _computed(collections, scheduler)
    terminal = sys.stderr.isatty()
    if not isinstance(getattr(chosen, "__self__", None), Client):
        with ProgressBar(minimum=1.0, out=sys.stderr) if terminal else _Lines():
            return _computed(collections, scheduler)
    persisted = dask.persist(*collections)
    try:
        wait(persisted, timeout=1)
    except TimeoutError:
        if terminal:
            with contextlib.redirect_stdout(sys.stderr):
                progress(*persisted, notebook=False)
        else:
            _wait_with_lines(persisted)
    return _computed(persisted, None)


class _Lines(Callback):
    """Says from time to time how many tasks are done."""

    def _start(self, dsk: Any) -> None:
        self._began = self._told = time.monotonic()

    def _posttask(self, key: Any, result: Any, dsk: Any, state: Any, worker_id: Any) -> None:
        if time.monotonic() - self._told >= _SECONDS_PER_LINE:
            self._told = time.monotonic()
            done = len(state["finished"])
            left = sum(len(state[name]) for name in ("ready", "waiting", "running"))
            _tell(done, done + left, self._told - self._began)

    def _finish(self, dsk: Any, state: Any, errored: bool) -> None:
        took = time.monotonic() - self._began
        if took >= 1 and not errored:
            done = len(state["finished"])
            _tell(done, done, took)


def _wait_with_lines(persisted: Sequence[Any]) -> None:
    began, futures = time.monotonic(), futures_of(persisted)
    while not all(future.done() for future in futures):
        with contextlib.suppress(TimeoutError):
            wait(futures, timeout=_SECONDS_PER_LINE)
        done = sum(future.done() for future in futures)
        _tell(done, len(futures), time.monotonic() - began)


def _tell(done: int, tasks: int, seconds: float) -> None:
    left = seconds * (tasks - done) / done if done else None
    soon = f", about {left:.0f} s left" if left else ""
    sys.stderr.write(f"{done:,} of {tasks:,} tasks are done after {seconds:.0f} s{soon}\n")
    sys.stderr.flush()


def _computed(collections: Sequence[Any], scheduler: str | None) -> tuple[Any, ...]:
    results: tuple[Any, ...] = dask.compute(*collections, scheduler=scheduler)
    return results
