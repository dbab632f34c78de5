"""Crash log on a cluster's scheduler, for workers that share no disk.

Its plugin knows which tasks a worker had when it died, and says so to the worker that gets one of
them next, in the task's annotations. Images that kill are kept in its metadata.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from distributed import Worker, get_worker
from distributed.utils import sync

from dask_image_ingest.scheduler_plugin import HAS_KILLED

_METADATA = "image-ingest-crashes"

_SECONDS_BETWEEN = 5.0  # from one question of a worker to the next
_TIMEOUT = 10.0


def task_has_killed() -> bool:
    """True if a worker died while it ran the task of this thread."""
    try:
        worker = get_worker()
        task = worker.state.tasks[worker.get_current_task()]
    except (ValueError, KeyError, AttributeError):
        return False  # in no task of a cluster
    return bool((task.annotations or {}).get(HAS_KILLED))


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
