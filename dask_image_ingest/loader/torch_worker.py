"""A worker process of a torch ``DataLoader``: how it sends batches, and when it ends.

torch pickles a batch on a thread, which drops what it can't pickle and what finds no room in
``/dev/shm``: the training process then waits for ever, or misses the batch. So a batch is pickled
here, once, into memory that the training process maps; what torch pickles later refers to it.
"""

from __future__ import annotations

import errno
import gc
import io
import multiprocessing
import os
import pickle
import resource
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing import forkserver
from multiprocessing.reduction import ForkingPickler
from typing import Any

import dask
import torch
import torch.multiprocessing
from dask.system import CPU_COUNT
from torch.utils.data import DataLoader, default_convert, get_worker_info

from dask_image_ingest.decode import import_decoders
from dask_image_ingest.errors import ArgumentError, ClusterError
from dask_image_ingest.frames import pixel_memory

_THREADS = "image-ingest.decode-threads"

_ENDS_WITH_PARENT = "ends-with-parent"

# Modules that a worker needs.
_PRELOADED = ("dask_image_ingest.loader.dataloader", "nvidia.dali.fn", "nvidia.nvimgcodec")

# Tensors begin at multiples of so many bytes in the memory of their batch.
_ALIGNED = 64

# Descriptors that torch needs to send a batch.
_DESCRIPTORS = 8


def import_for_workers(loader: DataLoader[Any]) -> None:
    """Import what workers need where they come from; each of them would need seconds for it.

    A fork has what this process has imported. A fork server imports what it is told before it
    starts, which is now. A spawned worker is a new Python.
    """
    chosen = (loader.multiprocessing_context or multiprocessing).get_start_method(allow_none=True)
    method = chosen or multiprocessing.get_all_start_methods()[0]
    if method == "fork":
        import_decoders()
    elif method == "forkserver":
        # Dask, too, tells the server of this process what to import, and the user may.
        names = [*getattr(forkserver._forkserver, "_preload_modules", ["__main__"]), *_PRELOADED]
        multiprocessing.set_forkserver_preload(list(dict.fromkeys(names)))
        forkserver.ensure_running()


def set_up_worker() -> None:
    """Prepare this process, a worker of a ``DataLoader``."""
    if not dask.config.get(_THREADS, None):
        dask.config.set({_THREADS: max(1, CPU_COUNT // get_worker_info().num_workers)})
    # Batches are sent so: for the other strategy torch would copy them into /dev/shm.
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    # What a fork has of its parent stays: a collection would copy it, page by page, to mark it.
    gc.freeze()
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
        If there are too many open files.
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
            written, sent = _memory(value.nbytes())
            written.copy_(torch.empty(0, dtype=torch.uint8).set_(value))
            copies[number] = sent.untyped_storage()
            continue
        value = copies[number] = value.resolve_conj().resolve_neg()
        # The elements in memory from its first to its last, as the rows of a column may be apart.
        last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        length = last + 1 if value.numel() else 0
        spans[number] = value.as_strided((length,), (1,)).view(torch.uint8)
    lengths = [-(-span.nbytes // _ALIGNED) * _ALIGNED for span in spans.values()]
    blocks = (block.split(lengths) for block in _memory(sum(lengths)))
    for (number, span), written, sent in zip(spans.items(), *blocks, strict=True):
        tensor, sent = copies[number], sent[: span.nbytes]
        written[: span.nbytes].copy_(span)
        copies[number] = sent.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    return copies


def _memory(nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory that other processes can map: the tensor to write into, and the one to send.

    It is a memfd, for which ``/dev/shm`` needs no room.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
    try:
        with ExitStack() as closing:
            pixels = pixel_memory.take(nbytes)
            # Memory that was sent before, and that nobody has any more; small batches are new.
            block = pixel_memory.shared_block(pixels.ctypes.data)
            file = os.memfd_create("batch") if block is None else block.lend()
            closing.callback(os.close, file)
            if block is None:
                os.ftruncate(file, nbytes)
            for _ in range(_DESCRIPTORS):
                closing.callback(os.close, os.dup(file))
            storage = torch.UntypedStorage._new_shared_fd_cpu(file, nbytes)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise ClusterError(
            f"a worker of the DataLoader can't open more files than its limit of {limit:,}: a "
            "batch that waits or that the training holds is one. Raise the limit, as by "
            "`ulimit -n 65536`, or reduce num_workers and prefetch_factor"
        ) from error
    sent = torch.empty(0, dtype=torch.uint8).set_(storage)
    return sent if block is None else torch.from_numpy(pixels[:nbytes]), sent
