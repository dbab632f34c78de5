"""``torch_dataset``: batches for a torch ``DataLoader``, divided among workers and ranks."""

from __future__ import annotations

from typing import Any

import cloudpickle
import dask
from dask.system import CPU_COUNT

from dask_image_ingest.arguments import whole_number
from dask_image_ingest.errors import MissingDependencyError
from dask_image_ingest.loader.iter_batches import Batches
from dask_image_ingest.loader.shard import torch_rank, torch_worker

try:
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError as error:
    raise MissingDependencyError(
        "torch_dataset needs torch, which is not installed: see its web page for the build that "
        "fits this machine"
    ) from error

_THREADS = "image-ingest.decode-threads"


class TorchDataset(IterableDataset):
    """An iterable of batches, which a ``DataLoader`` may pickle.

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
        self._epoch = 0
        self._batches: Batches | None = None
        self._rank: tuple[int, int] | None = None
        # Checks the arguments here, rather than in a worker.
        self._iterate(shard=None)

    def __iter__(self) -> Batches:
        _share_cores()
        rank = torch_rank() if self._rank is None else self._rank
        # start= is for this epoch only.
        start, self._options = self._options["start"], self._options | {"start": 0}
        self._batches = self._iterate(shard=torch_worker(rank), start=start)
        return self._batches

    def set_epoch(self, epoch: int) -> None:
        """Shuffle the next iteration with the seed ``shuffle + epoch``."""
        self._epoch = whole_number("epoch", epoch, 0, "pass the number of the epoch")

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position, for torchdata's ``StatefulDataLoader``."""
        start = self._options["start"] if self._batches is None else self._batches.position
        return {"epoch": self._epoch, "start": list(start) if isinstance(start, tuple) else start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration at the position of ``state``."""
        self.set_epoch(state["epoch"])
        self._options = self._options | {"start": state["start"]}

    def __getstate__(self) -> dict[str, Any]:
        # cloudpickle, since the frame may have functions that can't be imported. The rank, since a
        # spawned worker has no process group.
        frame, rank = cloudpickle.dumps(self._frame), self._rank or torch_rank()
        return self.__dict__ | {"_frame": frame, "_rank": rank, "_batches": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {"_frame": cloudpickle.loads(state["_frame"])}

    def _iterate(self, **options: Any) -> Batches:
        options = self._options | options
        if options["shuffle"] is not None and self._epoch:
            options["shuffle"] += self._epoch
        batches: Batches = self._frame.images.iter_batches(format="torch", **options)
        return batches


def _share_cores() -> None:
    """Divide the cores among the workers of a ``DataLoader`` for decoding."""
    worker = get_worker_info()
    if worker is not None and not dask.config.get(_THREADS, None):
        dask.config.set({_THREADS: max(1, CPU_COUNT // worker.num_workers)})


__all__ = ["TorchDataset"]
