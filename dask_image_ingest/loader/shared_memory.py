"""Shared memory between a client and the workers of the same machine.

The client maps the pixels of a partition; a socket would copy them four times. The rest of the
partition is pickled.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
from distributed import Client, Future, Worker

from dask_image_ingest.frames import LEAST_SHARED, map_block, pixel_memory, this_machine


@dataclass(frozen=True)
class _Pixels:
    """A block of pixels in the memory of another process."""

    file: int
    nbytes: int
    seal: bytes


@dataclass(frozen=True)
class _Mapping:
    """A pickled frame, whose pixels are blocks of the process."""

    process: int
    frame: bytes
    buffers: list[bytes | _Pixels]


def share_pixels(client: Client) -> None:
    """Have workers of this machine decode to memory that the client can map.

    They do so anyway once they are asked for a partition: the first ones would have been sent.
    """
    client.run(_share, this_machine(), on_error="ignore")


def map_remote(future: Future) -> Any:
    """A finished partition with its pixels mapped, not copied; None where that is not possible.

    The worker has to be on this machine, of the same user, and has to have the pixels in memory
    that can be shared. Workers use such memory from `share_pixels` or the first request on; a
    filter copies pixels to other memory.
    """
    client, key = future.client, future.key
    for worker in client.who_has([future]).get(key, ()):
        # Errors, such as the death of the worker, are left to the transfer that follows None.
        replies = client.run(
            _export_mapping, key, this_machine(), workers=[worker], on_error="ignore"
        )
        mapping = replies.get(worker)
        if mapping is None:
            continue
        try:
            buffers = [
                map_block(mapping.process, buffer.file, buffer.nbytes, buffer.seal)
                if isinstance(buffer, _Pixels)
                else buffer
                for buffer in mapping.buffers
            ]
        except OSError:
            continue
        # As safe as dask's own transfer: a worker of this cluster pickled it.
        return pickle.loads(mapping.frame, buffers=buffers)
    return None


def _is_this(machine: str) -> bool:
    return bool(machine) and machine == this_machine()


def _share(machine: str) -> None:
    if _is_this(machine):
        pixel_memory.share()


def _export_mapping(key: Any, machine: str, dask_worker: Worker) -> _Mapping | None:
    if not _is_this(machine) or key not in dask_worker.data:
        return None
    pickled: list[pickle.PickleBuffer] = []
    frame = pickle.dumps(dask_worker.data[key], protocol=5, buffer_callback=pickled.append)
    buffers: list[bytes | _Pixels] = []
    for each in pickled:
        with each.raw() as raw:
            buffers.append(_placed(raw) or bytes(raw))
    if not any(isinstance(buffer, _Pixels) for buffer in buffers):
        pixel_memory.share()
        return None
    return _Mapping(os.getpid(), frame, buffers)


def _placed(raw: memoryview) -> _Pixels | None:
    if raw.nbytes <= LEAST_SHARED:
        return None
    block = pixel_memory.shared_block(np.frombuffer(raw, np.uint8).ctypes.data)
    return None if block is None else _Pixels(block.file, raw.nbytes, block.seal)
