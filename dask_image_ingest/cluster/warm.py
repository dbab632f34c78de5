"""A preload for workers: what the first decode would wait for, done before it comes.

DALI takes as long to be imported and to build its first pipeline as a partition takes to decode. A
worker has time for it while the client looks at the first shard and plans the query.
"""

from __future__ import annotations

import io
import threading
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image

from dask_image_ingest.decode import Decoding, decode_one
from dask_image_ingest.errors import MissingDependencyError

__all__ = ["dask_setup", "dask_teardown"]

_warming: list[threading.Thread] = []


def dask_setup(worker: Any) -> None:
    """Begin, on a thread beside those for tasks; called by dask."""
    thread = threading.Thread(target=_warm_up, name="warm-up", daemon=True)
    _warming.append(thread)
    thread.start()


def dask_teardown(worker: Any) -> None:
    """Let a worker that is closed at once end its imports; called by dask."""
    while _warming:
        _warming.pop().join()


def _warm_up() -> None:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    # Without DALI, the first read says what is missing.
    with suppress(MissingDependencyError):
        decode_one(np.frombuffer(file.getvalue(), np.uint8), Decoding())
