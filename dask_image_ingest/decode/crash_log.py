"""Log of crashes, which a cluster's scheduler keeps for all machines.

Its plugin annotates tasks that were on a worker when it died: their images are decoded under guard.
Its metadata list the images that killed a decoder, which are not decoded again. Without a cluster a
crash ends the program, and nothing is logged.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from distributed import Worker, get_worker
from distributed.utils import sync

from dask_image_ingest.client import HAS_KILLED

_METADATA = "image-ingest-crashes"

_REFRESH_SECONDS = 5.0  # age at which a worker fetches the log from its scheduler again
_TIMEOUT = 60.0  # seconds for a request to the scheduler


def has_crashed() -> bool:
    """True if a worker died while it ran the task of this thread."""
    worker = _worker()
    with suppress(ValueError, KeyError, AttributeError):
        if worker is not None:
            task = worker.state.tasks[worker.get_current_task()]
            return bool((task.annotations or {}).get(HAS_KILLED))
    return False


def remember(data: bytes, death: str) -> None:
    """Log an image as one that kills its decoder; ``death`` says how, such as "SIGSEGV"."""
    if (worker := _worker()) is not None:
        keys = [_METADATA, crash_name(data)]
        _call_scheduler(worker, worker.scheduler.set_metadata, keys=keys, value=death)
        _read_scheduler.cache_clear()


def known_deaths() -> Mapping[str, str]:
    """Signal or exit status of the decoder by `crash_name`, of the images that killed one."""
    worker = _worker()
    if worker is None:
        return {}
    return _read_scheduler(worker, time.monotonic() // _REFRESH_SECONDS)


def crash_name(data: bytes) -> str:
    """Name of an image in the log; it begins with the size, so that few images are hashed."""
    return f"{len(data)}-{hashlib.blake2b(data, digest_size=16).hexdigest()}"


@functools.lru_cache(maxsize=1)
def _read_scheduler(worker: Worker, interval: float) -> Mapping[str, str]:
    """The log that a worker's scheduler keeps, fetched once in each ``interval``."""
    function = worker.scheduler.get_metadata
    return _call_scheduler(worker, function, keys=[_METADATA], default={}) or {}


def _worker() -> Worker | None:
    """The worker whose task this thread runs; None outside a cluster."""
    try:
        return get_worker()
    except ValueError:
        return None


def _call_scheduler(worker: Worker, function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function of the worker's scheduler; None if it can't be reached."""
    with suppress(OSError, TimeoutError, RuntimeError):
        return sync(worker.loop, function, callback_timeout=_TIMEOUT, **arguments)
    return None
