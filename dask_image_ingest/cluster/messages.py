"""Messages of a cluster: report workers that have joined, and silence routine warnings of Dask."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin

_PATIENCE = 5.0  # seconds before the first message, and between messages

# Harmless warnings of Dask: their beginnings, by logger.
_ROUTINE = {
    "distributed.shuffle._scheduler_plugin": (
        "Shuffle %s initialized by task",
        "Shuffle %s deactivated",
    ),
    "distributed.nanny": ("Worker process still alive after",),
}
_OF_CLOSING_WORKERS = {"distributed.worker": ("Failed to communicate with scheduler during",)}


def silence_routine(closing: bool = False) -> None:
    """Suppress harmless warnings of Dask: routine ones, or those of a closing worker."""
    for name, beginnings in (_OF_CLOSING_WORKERS if closing else _ROUTINE).items():
        logger = logging.getLogger(name)
        if not any(isinstance(present, _RoutineFilter) for present in logger.filters):
            logger.addFilter(_RoutineFilter(beginnings))


class _RoutineFilter(logging.Filter):
    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self._beginnings)


@contextmanager
def reporting_workers(workers: int) -> Iterator[SchedulerPlugin]:
    """Write every few seconds how many of ``workers`` have joined.

    Yields the plugin that counts them, to be given to the scheduler.
    """
    counter, all_joined = _JoinCounter(), threading.Event()

    def report() -> None:
        start = time.monotonic()
        while not all_joined.wait(_PATIENCE):
            sys.stderr.write(
                f"start_cluster: {counter.joined} of {workers} workers have joined after "
                f"{time.monotonic() - start:.0f} s; each imports what the program imports\n"
            )

    thread = threading.Thread(target=report, name="image-ingest-workers", daemon=True)
    thread.start()
    try:
        yield counter
    finally:
        all_joined.set()
        thread.join()


class _JoinCounter(SchedulerPlugin):
    """Counts the workers that join."""

    name = "image-ingest-joined"

    def __init__(self) -> None:
        self.joined = 0

    def add_worker(self, scheduler: Any, worker: str) -> None:
        """Called by Dask."""
        self.joined += 1
