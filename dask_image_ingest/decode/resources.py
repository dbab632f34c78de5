"""Threads, malloc and GPU memory of decoding."""

from __future__ import annotations

import ctypes
import functools
import os
import re
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


# What dask sets for its workers. glibc then maps every block above 128 kB anew: 155 page faults an
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


# Decoded bytes of a batch at most: a GPU wants more work at once than a CPU.
_MOST_BYTES = 2**30

# Of a GPU's memory. DALI has the pixels of two batches, and of one more before they are resized;
# start_cluster leaves it three tenths of the memory, the context and the decoders' tables included.
_SHARE = 1 / 24

# Above it, DALI quotes the code that made the pipeline, and with it the path of this package.
_ABOVE_THE_MESSAGE = "\nencountered:\n"

# Where in DALI's sources it happened, and the libraries on the stack: paths too.
_PATHS = re.compile(r"\[/[^\]\n]*\]|^Stacktrace.*|^\[frame \d+\].*", re.MULTILINE)

# A bad image is told by its number, or by one of nvImageCodec's states. 5 and 15 are those of its
# allocator, 21 is one of CUDA (nvimgcodecStatus_t).
_FAILURE = re.compile(
    r"CUDA|bad_alloc|out of memory|can't allocate|ALLOCATOR_FAILURE"
    r"|nvImageCodec failure: '#(5|15|21)'",
    re.IGNORECASE,
)
_BAD_IMAGE = re.compile(r"Failed to decode sample #\d+")

#: What to do where DALI finds no memory.
ROOM_FOR_DALI = (
    "Where it is memory that is missing: DALI takes its own beside that of the frames. "
    "start_cluster(device_memory_limit=0.5) leaves it more, and size= or smaller images ask for "
    "less"
)


def is_gpu_failure(error: str) -> bool:
    """True if DALI's error is one of the GPU, which no other decoder should make up for."""
    message = _PATHS.sub("", error.rpartition(_ABOVE_THE_MESSAGE)[2])
    return bool(_FAILURE.search(message)) and not _BAD_IMAGE.search(message)


def current_device() -> int:
    """The number of the GPU that this process works on, as CUDA counts those it may see."""
    import cupy

    return int(cupy.cuda.runtime.getDevice())


@functools.cache
def batch_bytes(device: int) -> int:
    """Decoded bytes that a batch may hold, so that DALI has room for it beside a pool of frames."""
    import cupy

    with cupy.cuda.Device(device):
        _, total = cupy.cuda.runtime.memGetInfo()
    return min(_MOST_BYTES, int(total * _SHARE))
