"""Whether this process has a GPU for a cuDF backend."""

from __future__ import annotations

import functools
import importlib.util

from dask_image_ingest.errors import MissingDependencyError


def gpus() -> int:
    """How many GPUs this machine has for a cuDF backend; 0 where cuDF is not installed."""
    if importlib.util.find_spec("cudf") is None or importlib.util.find_spec("cupy") is None:
        return 0
    import cupy

    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


@functools.cache
def require_gpu() -> None:
    """Refuse to make a cuDF frame in a process without a GPU.

    Raises
    ------
    MissingDependencyError
    """
    if not gpus():
        raise MissingDependencyError(
            "backend='cudf' needs a GPU, and CUDA finds none in this process. Compute on the "
            "workers of a cluster that have one, and take the result as pandas, "
            "ddf.to_backend('pandas').compute(); or read with backend='pandas'"
        )
