"""Threads and malloc settings for decoding."""

from __future__ import annotations

import ctypes
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import dask
from dask.system import CPU_COUNT


def decode_threads() -> int:
    """Number of threads for a DALI pipeline in this process.

    The configuration value ``image-ingest.decode-threads`` if set, as ``start_cluster`` does;
    otherwise the worker's number of threads; outside a worker the cores that this process may use.
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
    """Pool of `decode_threads` threads for work outside DALI: Pillow, reduced JPEGs, copies."""
    return _pool(decode_threads(), os.getpid())


@functools.lru_cache(maxsize=1)
def _pool(count: int, process: int) -> ThreadPoolExecutor:
    # Keyed by process, since a fork lacks the threads.
    return ThreadPoolExecutor(count, thread_name_prefix="decode")


# What Dask sets for its workers. It makes glibc map each block above 128 kB anew: 155 page faults
# per image in DALI, 640 with a resize, a third of the time.
_DASKS_TRIM_THRESHOLD = "65536"

# Parameters of mallopt(3), and their values in bytes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIMMED, _MAPPED = 64 << 20, 16 << 20


def keep_freed_memory() -> None:
    """Have malloc keep freed memory for the next image, unless the user has configured malloc."""
    of_dask = os.environ.get("MALLOC_TRIM_THRESHOLD_") == _DASKS_TRIM_THRESHOLD
    if not of_dask or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    with suppress(OSError, AttributeError):  # no glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MAPPED)
        mallopt(_M_TRIM_THRESHOLD, _TRIMMED)
