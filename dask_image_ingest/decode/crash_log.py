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
from dask_image_ingest.storage import LazyBytes

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
        keys = [_METADATA, _crash_name(data)]
        _call_scheduler(worker, worker.scheduler.set_metadata, keys=keys, value=death)
        _read_scheduler.cache_clear()


def crashers() -> Crashers:
    """Images that are known to kill their decoder."""
    worker = _worker()
    if worker is None:
        return Crashers({})
    return Crashers(_read_scheduler(worker, time.monotonic() // _REFRESH_SECONDS))


class Crashers:
    """Images that kill their decoder. Images are hashed only if one of the same size is known.

    Parameters
    ----------
    deaths
        How the process dies, by the image's `_crash_name`.
    """

    def __init__(self, deaths: Mapping[str, str]) -> None:
        self._deaths = deaths
        self._sizes = frozenset(int(name.split("-")[0]) for name in deaths)

    def __bool__(self) -> bool:
        return bool(self._deaths)

    def death(self, data: LazyBytes) -> str | None:
        """Signal or exit status of the decoder that this image kills; None if not known."""
        if len(data) not in self._sizes:
            return None
        return self._deaths.get(_crash_name(bytes(data[:])))


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


def _crash_name(data: bytes) -> str:
    return f"{len(data)}-{hashlib.blake2b(data, digest_size=16).hexdigest()}"
