"""Partitions of workers on the same machine, whose pixels the client maps.

A socket would copy them four times. The rest of a partition is pickled.
"""

from __future__ import annotations

import os
import pickle
from typing import Any, NamedTuple

import numpy as np
from dask.typing import Key
from distributed import Future as RemoteFuture
from distributed import Worker

from dask_image_ingest.frames import MIN_SHARED_BYTES, map_block, pixel_memory, this_machine


class _Pixels(NamedTuple):
    """A block of pixels in shared memory of another process."""

    file: int  # descriptor in that process
    nbytes: int
    seal: bytes


class _Mapping(NamedTuple):
    """A pickled frame, with its pixels as blocks in shared memory of ``process``."""

    process: int
    frame: bytes
    buffers: list[bytes | _Pixels]


def map_remote(future: RemoteFuture) -> Any:
    """A finished partition with mapped pixels, without a copy; None if they cannot be mapped.

    The worker must be on this machine and run as the same user, and the pixels must be in shared
    memory.
    """
    client, key = future.client, future.key
    for worker in client.who_has([future]).get(key, ()):
        # On errors, such as the death of the worker, the transfer after None raises or retries.
        mapping = client.run(
            _export_mapping, key, this_machine(), workers=[worker], on_error="ignore"
        ).get(worker)
        if mapping is None:
            continue
        try:
            buffers = [
                map_block(mapping.process, *buffer) if isinstance(buffer, _Pixels) else buffer
                for buffer in mapping.buffers
            ]
        except OSError:
            continue
        # As safe as dask's own transfer: a worker of this cluster pickled it.
        return pickle.loads(mapping.frame, buffers=buffers)
    return None


def _export_mapping(key: Key, machine: str, dask_worker: Worker) -> _Mapping | None:
    """On a worker: describe a partition for the client to map; None if it cannot be mapped."""
    if not machine or machine != this_machine() or key not in dask_worker.data:
        return None
    pickled: list[pickle.PickleBuffer] = []
    frame = pickle.dumps(dask_worker.data[key], protocol=5, buffer_callback=pickled.append)
    buffers: list[bytes | _Pixels] = []
    for buffer in pickled:
        with buffer.raw() as raw:
            buffers.append(_as_pixels(raw) or bytes(raw))
    is_shared = any(isinstance(buffer, _Pixels) for buffer in buffers)
    return _Mapping(os.getpid(), frame, buffers) if is_shared else None


def _as_pixels(raw: memoryview) -> _Pixels | None:
    """The shared block of a buffer; None for small buffers and those in other memory."""
    if raw.nbytes <= MIN_SHARED_BYTES:
        return None
    block = pixel_memory.shared_block(np.frombuffer(raw, np.uint8).ctypes.data)
    return None if block is None else _Pixels(block.file, raw.nbytes, block.seal)
