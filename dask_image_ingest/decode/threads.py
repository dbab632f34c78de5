"""The threads on which one process decodes."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import dask
from dask.system import CPU_COUNT


def decode_threads() -> int:
    """Threads that a DALI pipeline of this process should have.

    The configuration value ``image-ingest.decode-threads`` if it is set, as ``start_cluster`` does;
    otherwise a worker's own number of threads, or all cores that this process may use by its
    affinity and its control group.
    """
    configured = dask.config.get("image-ingest.decode-threads", None)
    if configured:
        return int(configured)
    try:
        from distributed import get_worker

        return int(get_worker().state.nthreads)
    except (ImportError, ValueError):
        return CPU_COUNT


def decode_pool() -> ThreadPoolExecutor:
    """As many threads for what DALI does not do: Pillow's images, reduced JPEGs, copies."""
    return _pool(decode_threads(), os.getpid())


@functools.lru_cache(maxsize=1)
def _pool(count: int, process: int) -> ThreadPoolExecutor:
    # A fork of this process has none of its threads, hence the process among the arguments.
    return ThreadPoolExecutor(count, thread_name_prefix="decode")
