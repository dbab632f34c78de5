"""A worker process of a torch ``DataLoader``: how it sends batches, and when it ends.

torch pickles a batch on a thread, which drops what it can't pickle and what finds no room in
``/dev/shm``: the training process then waits for ever, or misses the batch. So a batch is pickled
here, once, into memory that the training process maps; what torch pickles later refers to it.
"""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import pickle
import resource
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.reduction import ForkingPickler
from typing import Any

import dask
import torch
import torch.multiprocessing
from dask.system import CPU_COUNT
from torch.utils.data import default_convert, get_worker_info

from dask_image_ingest.errors import ArgumentError, ClusterError

_THREADS = "image-ingest.decode-threads"

_ENDS_WITH_PARENT = "ends-with-parent"

# Tensors begin at multiples of so many bytes in the memory of their batch.
_ALIGNED = 64

# Descriptors that torch needs to send a batch.
_DESCRIPTORS = 8


def set_up_worker() -> None:
    """Prepare this process if it is a worker of a ``DataLoader``."""
    worker = get_worker_info()
    if worker is None:
        return
    if not dask.config.get(_THREADS, None):
        dask.config.set({_THREADS: max(1, CPU_COUNT // worker.num_workers)})
    if all(thread.name != _ENDS_WITH_PARENT for thread in threading.enumerate()):
        threading.Thread(target=_end_with_parent, name=_ENDS_WITH_PARENT, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent is gone: a worker that can't send waits for ever."""
    parent, process = multiprocessing.parent_process(), os.getppid()
    # The workers that were forked later keep the pipe open by which `is_alive` is told.
    while parent is not None and parent.is_alive() and os.getppid() == process:
        parent.join(1)
    os._exit(1)


def sendable(batch: Any) -> Any:
    """A copy of a batch with tensors for arrays, as torch makes it, that is sure to be sent.

    Raises
    ------
    ArgumentError
        If it has something that can't be pickled.
    ClusterError
        If there are too many open files, or no room in shared memory.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    converted = default_convert(batch)
    try:
        pickler.dump(converted)
    except Exception as error:
        raise ArgumentError(
            f"a worker of the DataLoader can't send a batch to the training process: {error}. "
            "Let collate_fn return arrays, tensors and values, in dicts, lists, tuples or objects "
            "that can be pickled"
        ) from error
    pickled.seek(0)
    return _Unpickler(pickled, _copies(pickler.found)).load()


class _Pickler(ForkingPickler):
    """Pickles a batch as torch does, but leaves out tensors, and memory of odd ones.

    Attributes
    ----------
    found : list
        What was left out: tensors and storages.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.found: list[torch.Tensor | torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        """The number of a value that is left out; None to pickle it."""
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor and not isinstance(value, torch.UntypedStorage):
            return None
        if is_tensor and value.device.type == "cpu" and not _is_plain(value):
            return None  # torch takes it apart, into storages
        number = self._numbers.setdefault(id(value), len(self.found))
        if number == len(self.found):
            self.found.append(value)
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, copies: Sequence[torch.Tensor | torch.UntypedStorage]
    ) -> None:
        super().__init__(file)
        self._copies = copies

    def persistent_load(self, pid: int) -> torch.Tensor | torch.UntypedStorage:
        """The copy of a value that was left out."""
        return self._copies[pid]


def _is_plain(tensor: torch.Tensor) -> bool:
    is_odd = tensor.requires_grad or tensor.is_quantized or tensor.is_nested
    return type(tensor) is torch.Tensor and tensor.layout == torch.strided and not is_odd


def _copies(
    values: Sequence[torch.Tensor | torch.UntypedStorage],
) -> list[torch.Tensor | torch.UntypedStorage]:
    """Copies in memory that the training process maps; all tensors in one, for few descriptors.

    Tensors of other devices stay as they are.
    """
    copies = list(values)
    spans: dict[int, torch.Tensor] = {}
    for number, value in enumerate(values):
        if value.device.type != "cpu":
            continue
        if isinstance(value, torch.UntypedStorage):
            copies[number] = _memory(value.nbytes()).copy_(value)
            continue
        value = copies[number] = value.resolve_conj().resolve_neg()
        # The elements in memory from its first to its last, as the rows of a column may be apart.
        last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        length = last + 1 if value.numel() else 0
        spans[number] = value.as_strided((length,), (1,)).view(torch.uint8)
    lengths = [-(-span.nbytes // _ALIGNED) * _ALIGNED for span in spans.values()]
    memory = torch.empty(0, dtype=torch.uint8).set_(_memory(sum(lengths)))
    for (number, span), part in zip(spans.items(), memory.split(lengths), strict=True):
        tensor, part = copies[number], part[: span.nbytes]
        part.copy_(span)
        copies[number] = part.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    return copies


def _memory(nbytes: int) -> torch.UntypedStorage:
    """Memory that other processes can map: a memfd, for which ``/dev/shm`` needs no room."""
    if not nbytes:
        return torch.UntypedStorage()
    if torch.multiprocessing.get_sharing_strategy() == "file_system":
        try:
            return torch.UntypedStorage(nbytes).share_memory_()
        except RuntimeError as error:
            raise ClusterError(
                f"a worker of the DataLoader has no room in shared memory (/dev/shm) for "
                f"{nbytes:,} bytes of a batch: {error}. Make it larger (docker run --shm-size), "
                "reduce batch_size, num_workers or prefetch_factor, or leave torch's sharing "
                "strategy 'file_descriptor', which needs no room there"
            ) from error
    try:
        with ExitStack() as closing:
            file = os.memfd_create("batch")
            closing.callback(os.close, file)
            os.ftruncate(file, nbytes)
            for _ in range(_DESCRIPTORS):
                closing.callback(os.close, os.dup(file))
            return torch.UntypedStorage._new_shared_fd_cpu(file, nbytes)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise ClusterError(
            f"a worker of the DataLoader can't open more files than its limit of {limit:,}: a "
            "batch that waits or that the training holds is one. Raise the limit, as by "
            "`ulimit -n 65536`, or reduce num_workers and prefetch_factor"
        ) from error
