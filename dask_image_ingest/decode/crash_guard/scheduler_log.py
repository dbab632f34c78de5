"""Crash log on a cluster's scheduler, for workers that share no disk.

It knows which tasks a worker had when it died, and says so to the worker that gets one of them
next, in the task's annotations. Images that kill are kept in its metadata.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dask.typing import Key
from distributed import Scheduler, SchedulerPlugin, Worker, get_worker
from distributed.utils import sync

_ANNOTATION = "image-ingest-has-killed"
_METADATA = "image-ingest-crashes"

_MOST_TASKS = 10_000
_SECONDS_BETWEEN = 5.0  # from one question of a worker to the next
_TIMEOUT = 10.0


class CrashJournal(SchedulerPlugin):
    """Marks tasks that were with a worker when it died."""

    name = "image-ingest-crash-journal"
    idempotent = True

    def __init__(self) -> None:
        self._scheduler: Scheduler | None = None
        self._killers: dict[Key, None] = {}  # the oldest first

    async def start(self, scheduler: Scheduler) -> None:
        """Take note of the scheduler; called by dask."""
        self._scheduler = scheduler

    def transition(self, key: Key, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Note a death, or mark a task that is about to be given out; called by dask."""
        if start == "processing":
            self._ended(key, finish)
        elif finish == "waiting" and key in self._killers:
            task = self._task(key)
            task.annotations = {**(task.annotations or {}), _ANNOTATION: True}

    def _ended(self, key: Key, finish: str) -> None:
        if finish == "memory":
            self._killers.pop(key, None)
        elif finish in ("released", "erred") and self._task(key).suspicious:
            self._killers[key] = None
            if len(self._killers) > _MOST_TASKS:
                self._killers.pop(next(iter(self._killers)))

    def _task(self, key: Key) -> Any:
        assert self._scheduler is not None
        return self._scheduler.tasks[key]


def task_has_killed() -> bool:
    """True if a worker died while it ran the task of this thread."""
    try:
        worker = get_worker()
        task = worker.state.tasks[worker.get_current_task()]
    except (ValueError, KeyError, AttributeError):
        return False  # in no task of a cluster
    return bool((task.annotations or {}).get(_ANNOTATION))


def tell_of_crash(decoders: str, image: str, death: str) -> None:
    """Tell the scheduler of an image that kills, if this process is one of its workers."""
    worker = _worker()
    if worker is not None:
        with suppress(OSError, TimeoutError, RuntimeError):
            _ask(
                worker,
                worker.scheduler.set_metadata,
                keys=[_METADATA, decoders, image],
                value=death,
            )
        _known.asked = 0.0


def known_crashes(decoders: str) -> Mapping[str, str]:
    """Images that kill these decoders, and how; the scheduler is asked every few seconds."""
    worker = _worker()
    if worker is None:
        return {}
    with _known.lock:
        if worker is not _known.worker or time.monotonic() > _known.asked + _SECONDS_BETWEEN:
            with suppress(OSError, TimeoutError, RuntimeError):
                _known.crashes = _ask(
                    worker, worker.scheduler.get_metadata, keys=[_METADATA, decoders], default={}
                )
            _known.worker, _known.asked = worker, time.monotonic()
        return _known.crashes


class _Known:
    """The last answer of the scheduler."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.worker: Worker | None = None
        self.crashes: Mapping[str, str] = {}
        self.asked = 0.0


_known = _Known()


def _worker() -> Worker | None:
    try:
        return get_worker()
    except ValueError:
        return None


def _ask(worker: Worker, question: Any, **what: Any) -> Any:
    return sync(worker.loop, question, callback_timeout=_TIMEOUT, **what)
