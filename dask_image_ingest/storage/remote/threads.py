"""The threads of this process that make requests."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

__all__ = ["request_threads"]

_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def request_threads(connections: int) -> ThreadPoolExecutor:
    """The pool with that many threads: all shards that are open in this process share it."""
    with _lock:
        if connections not in _pools:
            _pools[connections] = ThreadPoolExecutor(connections, "image-ingest-remote")
        return _pools[connections]


def _forget() -> None:
    """A forked process has none of the threads, and the lock may be held for ever."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_forget)
