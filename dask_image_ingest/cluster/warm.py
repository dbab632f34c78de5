"""Warm-up of workers: import DALI and decode one image before the first task.

To import DALI and build its first pipeline takes as long as the decode of a partition. A worker has
time for it while the client reads the first shard and plans the query.
"""

from __future__ import annotations

import io
import threading
import time
from contextlib import suppress
from typing import Any, Literal

import numpy as np
from distributed import Status
from PIL import Image

from dask_image_ingest.decode import DecodeSpec, decode_one
from dask_image_ingest.errors import MissingDependencyError

_warming: list[threading.Thread] = []  # at most one

_STARTING = (Status.created, Status.init, Status.starting)


def warm_up(device: Literal["cpu", "gpu"], worker: Any = None) -> None:
    """Decode an image in a thread of its own, once per process.

    On a GPU it waits until ``worker`` has started, since the memory pool does not exist before.
    """
    if _warming:
        return
    thread = threading.Thread(target=_decode, args=(device, worker), name="warm-up", daemon=True)
    _warming.append(thread)
    thread.start()


def end_warm_up() -> None:
    """Wait for the warm-up: a worker that closes at once must not be in the middle of an import."""
    while _warming:
        _warming.pop().join()


def _decode(device: Literal["cpu", "gpu"], worker: Any) -> None:
    while device == "gpu" and worker is not None and worker.status in _STARTING:
        time.sleep(0.05)
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    # If DALI or GPU memory is missing, the first read reports it.
    with suppress(MissingDependencyError, RuntimeError):
        decode_one(np.frombuffer(file.getvalue(), np.uint8), DecodeSpec(device=device))
