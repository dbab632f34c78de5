"""Messages while a cluster starts, runs and ends: how many workers have joined, less Dask's own."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin

_PATIENCE = 5.0  # seconds between two messages, and before the first

# Warnings of Dask that tell of no fault: how they begin, by their loggers.
_ROUTINE = {
    "distributed.shuffle._scheduler_plugin": (
        "Shuffle %s initialized by task",
        "Shuffle %s deactivated",
    ),
    "distributed.nanny": ("Worker process still alive after",),
}
_OF_CLOSING_WORKERS = {"distributed.worker": ("Failed to communicate with scheduler during",)}


def silence_routine(closing: bool = False) -> None:
    """Leave out messages that tell of no fault; with ``closing`` those of a worker that ends."""
    for name, beginnings in (_OF_CLOSING_WORKERS if closing else _ROUTINE).items():
        logger = logging.getLogger(name)
        if not any(isinstance(each, _LessRoutine) for each in logger.filters):
            logger.addFilter(_LessRoutine(beginnings))


class _LessRoutine(logging.Filter):
    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self._beginnings)


@contextmanager
def telling_of_workers(workers: int) -> Iterator[SchedulerPlugin]:
    """Say every few seconds how many workers have joined; gives a plugin for their scheduler."""
    count, started = _Joined(), threading.Event()

    def tell() -> None:
        began = time.monotonic()
        while not started.wait(_PATIENCE):
            sys.stderr.write(
                f"start_cluster: {count.joined} of {workers} workers have joined after "
                f"{time.monotonic() - began:.0f} s; each imports what the program imports\n"
            )

    thread = threading.Thread(target=tell, name="image-ingest-workers", daemon=True)
    thread.start()
    try:
        yield count
    finally:
        started.set()
        thread.join()


class _Joined(SchedulerPlugin):
    """Counts workers."""

    name = "image-ingest-joined"

    def __init__(self) -> None:
        self.joined = 0

    def add_worker(self, scheduler: Any, worker: str) -> None:
        """Count it; called by dask."""
        self.joined += 1
