"""End a worker whose GPU is unusable, so that its nanny starts another.

After some errors of CUDA, all later calls of the process fail with the same error, and so would all
later tasks of a worker.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from distributed import Worker, WorkerPlugin

logger = logging.getLogger("dask_image_ingest")

# Values of cudaError_t after which the process must be terminated, by CUDA's documentation: from
# cudaErrorIllegalAddress (700) to cudaErrorLaunchFailure (719).
_STICKY = frozenset((700, 702, 710, *range(714, 720)))


class LeaveBrokenGpu(WorkerPlugin):
    """Worker plugin that ends the process after an error from which its GPU does not recover.

    The failed task and those that the worker held are computed again by others, as after any death
    of a worker. A worker without a nanny stays, since nobody would replace it.
    """

    name = "image-ingest-broken-gpu"

    def setup(self, worker: Worker) -> None:
        """Keep the worker; called by Dask."""
        self._worker = worker

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Look at the GPU after an error of CUDA; called by Dask."""
        if finish != "error":
            return
        text = self._worker.state.tasks[key].exception_text
        error = broken_gpu() if "cuda" in text.lower() else None
        if error is None:
            return
        logger.error("%s: the GPU is unusable for this process: %s", self._worker.address, error)
        if self._worker.nanny:
            # At once: closing in order would move frames that can't be read.
            os._exit(1)


def broken_gpu() -> str | None:
    """Error of CUDA that all later calls of this process give; None if there is none."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return None
    try:
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error) if error.status in _STICKY else None
    return None
