"""Threads and malloc of decoding."""

from __future__ import annotations

import ctypes
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

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


# What dask sets for its workers. glibc then maps every block above 128 kB again: 155 page faults an
# image inside DALI, and 640 where it is resized too, which is a third of the time.
_DASKS_TRIM_THRESHOLD = "65536"

# The names of mallopt(3), and bytes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIMMED, _MAPPED = 64 << 20, 16 << 20


def keep_freed_memory() -> None:
    """Have malloc keep freed memory for the next image, where only dask has set it otherwise."""
    of_dask = os.environ.get("MALLOC_TRIM_THRESHOLD_") == _DASKS_TRIM_THRESHOLD
    if not of_dask or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    with suppress(OSError, AttributeError):  # no glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MAPPED)
        mallopt(_M_TRIM_THRESHOLD, _TRIMMED)
