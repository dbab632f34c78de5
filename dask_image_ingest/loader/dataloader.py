"""``dataloader``: batches for torch, divided among workers and ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import cloudpickle
import dask
from dask.system import CPU_COUNT

from dask_image_ingest.arguments import shown, whole_number
from dask_image_ingest.errors import ArgumentError, ClusterError, MissingDependencyError
from dask_image_ingest.loader.iter_batches import Batches
from dask_image_ingest.loader.order import torch_rank, torch_worker

try:
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
except ImportError as error:
    raise MissingDependencyError(
        "dataloader needs torch, which is not installed: see its web page for the build that fits "
        "this machine"
    ) from error

_THREADS = "image-ingest.decode-threads"


class TorchDataset(IterableDataset):
    """Iterable dataset of batches, which a ``DataLoader`` can pickle to its workers.

    Parameters
    ----------
    frame
        A frame with images.
    options
        Arguments of ``iter_batches``.
    """

    def __init__(self, frame: Any, options: dict[str, Any]) -> None:
        self._frame = frame
        self._options = options
        # Shared memory, since persistent workers have a copy of this object that set_epoch() in the
        # main process could not reach otherwise.
        self._shared_epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        # Where the next iteration begins: an argument ``start=``.
        self._start: Any = 0
        # The latest iterator of this process, and its epoch.
        self._batches: Batches | None = None
        self._iterated = 0
        # Rank and world of the main process, in a copy that was pickled; None in the original.
        self._rank: tuple[int, int] | None = None
        # Building an iterator checks the arguments here, rather than in a worker.
        self._description = repr(self._iterate(shard=None))

    def __repr__(self) -> str:
        return f"<torch dataset, epoch {self._epoch}: {self._description[1:]}"

    def __iter__(self) -> Iterator[Any]:
        _share_cores()
        rank = torch_rank() if self._rank is None else self._rank
        self._iterated = self._epoch
        self._batches = self._iterate(shard=torch_worker(rank), start=self._start)
        self._start = 0
        return self._batches if get_worker_info() is None else map(_in_shared_memory, self._batches)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle the next iteration with the seed ``shuffle + epoch``."""
        self._shared_epoch[0] = whole_number(
            "epoch", epoch, 0, "pass the number of the epoch", most=2**63 - 1
        )

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position, for torchdata's ``StatefulDataLoader``."""
        if self._batches is None:
            return {"epoch": self._epoch, "start": self._start}
        return {"epoch": self._iterated, "start": list(self._batches.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration in this process at the position of ``state``.

        Raises
        ------
        ArgumentError
            If ``state`` is not from ``state_dict``.
        """
        if not isinstance(state, Mapping) or not {"epoch", "start"} <= set(state):
            raise ArgumentError(
                f"load_state_dict: {shown(state)} is not what state_dict() gives, which is a dict "
                "of 'epoch' and 'start'"
            )
        self.set_epoch(state["epoch"])
        self._start = state["start"]
        self._batches = None

    def __getstate__(self) -> dict[str, Any]:
        # cloudpickle: the frame may contain functions that cannot be imported. Pickle the rank,
        # too: a spawned worker has no process group.
        frame, rank = cloudpickle.dumps(self._frame), self._rank or torch_rank()
        return self.__dict__ | {"_frame": frame, "_rank": rank, "_batches": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {"_frame": cloudpickle.loads(state["_frame"])}
        # Pickled to a file, not to a worker, the tensor is no longer in shared memory.
        self._shared_epoch.share_memory_()

    @property
    def _epoch(self) -> int:
        return int(self._shared_epoch[0])

    def _iterate(self, **options: Any) -> Batches:
        options = self._options | options
        if options["shuffle"] is not None and self._epoch:
            options["shuffle"] += self._epoch
        batches: Batches = self._frame.images.iter_batches(format="torch", **options)
        return batches


if TYPE_CHECKING:

    class BatchLoader(DataLoader):
        """A ``DataLoader`` that declares the type of its dataset."""

        dataset: TorchDataset
else:
    BatchLoader = DataLoader


def make_dataloader(frame: Any, batches: dict[str, Any], options: dict[str, Any]) -> BatchLoader:
    """Create a ``DataLoader`` with ``options`` for the ``batches`` of a frame.

    Raises
    ------
    ArgumentError
        For options that a ``DataLoader`` of such a dataset does not take.
    """
    dataset = TorchDataset(frame, batches)
    try:
        return BatchLoader(dataset, batch_size=None, **options)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"dataloader: {error}") from error


def _in_shared_memory(batch: dict[str, Any]) -> dict[str, Any]:
    """Move the tensors of a batch to shared memory, from where the training process takes them.

    Otherwise the worker does so on a thread, which drops a batch that finds no room: the training
    process would wait for it for ever.

    Raises
    ------
    ClusterError
        If shared memory is full.
    """
    values = (value if isinstance(value, list) else [value] for value in batch.values())
    for tensor in itertools.chain.from_iterable(values):
        if isinstance(tensor, torch.Tensor) and not tensor.is_cuda:
            try:
                tensor.share_memory_()
            except (RuntimeError, OSError) as error:
                raise ClusterError(
                    f"a worker of the DataLoader has no room in shared memory (/dev/shm) for "
                    f"{tensor.nbytes:,} bytes of a batch: {error}. Make it larger (docker run "
                    "--shm-size), or reduce batch_size, num_workers or prefetch_factor"
                ) from error
    return batch


def _share_cores() -> None:
    """Divide the decoding threads among the workers of a ``DataLoader``."""
    worker = get_worker_info()
    if worker is not None and not dask.config.get(_THREADS, None):
        dask.config.set({_THREADS: max(1, CPU_COUNT // worker.num_workers)})
