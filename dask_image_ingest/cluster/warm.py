"""A warm-up of workers: all that their first decode would wait for.

DALI takes as long to be imported and to build its first pipeline as a partition takes to decode. A
worker has time for it while the client looks at the first shard and plans the query.
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

_warming: list[threading.Thread] = []

_STARTING = (Status.created, Status.init, Status.starting)


def warm_up(device: Literal["cpu", "gpu"], worker: Any = None) -> None:
    """Have this process decode an image, on a thread beside those for tasks; once.

    On a GPU not before ``worker`` has started: until then its memory is not divided.
    """
    if _warming:
        return
    thread = threading.Thread(target=_decode, args=(device, worker), name="warm-up", daemon=True)
    _warming.append(thread)
    thread.start()


def end_warm_up() -> None:
    """Let a worker that is closed at once end its imports."""
    while _warming:
        _warming.pop().join()


def _decode(device: Literal["cpu", "gpu"], worker: Any) -> None:
    while device == "gpu" and worker is not None and worker.status in _STARTING:
        time.sleep(0.05)
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    # Without DALI, or memory on the GPU, the first read says what is missing.
    with suppress(MissingDependencyError, RuntimeError):
        decode_one(np.frombuffer(file.getvalue(), np.uint8), DecodeSpec(device=device))
