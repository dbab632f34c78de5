"""``torch_dataset``: batches for a torch ``DataLoader``, divided among workers and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle
import dask
from dask.system import CPU_COUNT

from dask_image_ingest.arguments import shown, whole_number
from dask_image_ingest.errors import ArgumentError, MissingDependencyError
from dask_image_ingest.loader.iter_batches import Batches
from dask_image_ingest.loader.worker_share import torch_rank, torch_worker

try:
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
    from torch.utils.data._utils.collate import default_collate_fn_map
except ImportError as error:
    raise MissingDependencyError(
        "torch_dataset and dataloader need torch, which is not installed: see its web page for the "
        "build that fits this machine"
    ) from error

_THREADS = "image-ingest.decode-threads"

# Places in the memory that workers share: which iteration begins at start=, and from _BEGUN on
# whether each of its workers has begun.
_EPOCH, _STARTED, _BEGUN = range(3)
_NONE_YET, _WITHOUT_WORKERS, _OVER = -1, -2, -3
_MOST_WORKERS = 4096

# Arguments of a DataLoader that choose samples or make batches of them.
_OTHER_WAYS = frozenset({"dataset", "sampler", "batch_sampler", "collate_fn"})


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
        # Workers have copies of this object, made anew for each iteration or, where they persist,
        # once for all: what is told to the one or the other has to be in shared memory.
        self._shared = torch.tensor([0, _NONE_YET] + [0] * _MOST_WORKERS).share_memory_()
        self._batches: Batches | None = None
        self._iterated = 0
        self._rank: tuple[int, int] | None = None
        # Checks the arguments here, rather than in a worker.
        self._iterate(shard=None)

    def __iter__(self) -> _WholeBatches:
        _share_cores()
        rank = torch_rank() if self._rank is None else self._rank
        start = self._options["start"] if self._is_first() else 0
        self._iterated = self._epoch
        self._batches = self._iterate(shard=torch_worker(rank), start=start)
        return _WholeBatches(self._batches)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle the next iteration with the seed ``shuffle + epoch``."""
        self._shared[_EPOCH] = whole_number(
            "epoch", epoch, 0, "pass the number of the epoch", most=2**63 - 1
        )

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position, for torchdata's ``StatefulDataLoader``."""
        if self._batches is None:
            start = 0 if self._shared[_STARTED] == _OVER else self._options["start"]
            return {"epoch": self._epoch, "start": _plain(start)}
        return {"epoch": self._iterated, "start": _plain(self._batches.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration at the position of ``state``.

        Workers that persist, and have begun already, hear of the epoch alone.

        Raises
        ------
        ArgumentError
            If ``state`` is not what ``state_dict`` gave.
        """
        if not isinstance(state, Mapping) or not {"epoch", "start"} <= set(state):
            raise ArgumentError(
                f"load_state_dict: {shown(state)} is not what state_dict() gives, which is a dict "
                "of 'epoch' and 'start'"
            )
        self.set_epoch(state["epoch"])
        self._options = self._options | {"start": state["start"]}
        self._shared[_STARTED] = _NONE_YET
        self._shared[_BEGUN:] = 0
        self._batches = None

    def __getstate__(self) -> dict[str, Any]:
        # cloudpickle, since the frame may have functions that can't be imported. The rank, since a
        # spawned worker has no process group.
        frame, rank = cloudpickle.dumps(self._frame), self._rank or torch_rank()
        return self.__dict__ | {"_frame": frame, "_rank": rank, "_batches": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {"_frame": cloudpickle.loads(state["_frame"])}
        # What is not pickled for a worker, but for a file, or copied, has memory of its own.
        self._shared.share_memory_()

    @property
    def _epoch(self) -> int:
        return int(self._shared[_EPOCH])

    def _is_first(self) -> bool:
        """True for the first iteration, in any process: the one that begins at ``start=``."""
        worker = get_worker_info()
        iteration, begun = _WITHOUT_WORKERS, False
        if worker is not None:
            # A DataLoader draws a base seed for each iteration, from which its workers' seeds
            # count. Whoever seeds torch for each iteration has the same one again.
            iteration = _iteration(worker.seed - worker.id, worker.num_workers)
            begun = bool(self._shared[_BEGUN + worker.id])
            self._shared[_BEGUN + worker.id] = 1
        started = int(self._shared[_STARTED])
        first = self._batches is None and not begun and started in (_NONE_YET, iteration)
        self._shared[_STARTED] = iteration if first else _OVER
        return first

    def _iterate(self, **options: Any) -> Batches:
        options = self._options | options
        if options["shuffle"] is not None and self._epoch:
            options["shuffle"] += self._epoch
        batches: Batches = self._frame.images.iter_batches(format="torch", **options)
        return batches


def make_dataloader(dataset: TorchDataset, options: dict[str, Any]) -> DataLoader:
    """A ``DataLoader`` that hands on the batches of a dataset as they are.

    Raises
    ------
    ArgumentError
        For options that no ``DataLoader`` has, or that make batches another way.
    """
    refused = sorted(options.keys() & _OTHER_WAYS)
    if refused:
        raise ArgumentError(
            f"dataloader: {refused[0]}= is not for batches that are made already; batch_size=, "
            "columns=, shuffle= and drop_last= say which these are"
        )
    try:
        return DataLoader(dataset, batch_size=None, **options)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"dataloader: {error}") from error


class WholeBatch(dict[str, Any]):
    """A batch, which torch must not make a batch of."""


class _WholeBatches:
    """The batches of an iteration, as `WholeBatch`."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[WholeBatch]:
        return self

    def __next__(self) -> WholeBatch:
        return WholeBatch(next(self._batches))

    @property
    def position(self) -> Any:
        """Position of the next batch."""
        return self._batches.position

    def close(self) -> None:
        """Stop reading ahead and free what was read."""
        self._batches.close()


def _refuse_collation(batch: Any, *, collate_fn_map: Any = None) -> Any:
    raise ArgumentError(
        "torch_dataset gives whole batches, of which a DataLoader with a batch size would make "
        "batches of batches: pass it batch_size=None, or take ddf.images.dataloader()"
    )


# Torch's way to say what becomes of a type where a DataLoader has a batch size.
default_collate_fn_map[WholeBatch] = _refuse_collation


def _plain(start: Any) -> Any:
    return list(start) if isinstance(start, tuple) else start


def _iteration(base_seed: int, workers: int) -> int:
    """A number from 0 for the iterations of a loader."""
    return hash((base_seed, workers)) & (2**62 - 1)


def _share_cores() -> None:
    """Divide the cores among the workers of a ``DataLoader`` for decoding."""
    worker = get_worker_info()
    if worker is not None and not dask.config.get(_THREADS, None):
        dask.config.set({_THREADS: max(1, CPU_COUNT // worker.num_workers)})
