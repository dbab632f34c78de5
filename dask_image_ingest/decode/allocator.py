"""glibc's malloc, as dask's workers have it."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

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
