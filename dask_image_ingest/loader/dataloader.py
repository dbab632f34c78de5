"""``dataloader``: batches for torch, divided among workers and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import cloudpickle

from dask_image_ingest.arguments import shown, whole_number
from dask_image_ingest.errors import ArgumentError, MissingDependencyError
from dask_image_ingest.loader.iter_batches import Batches
from dask_image_ingest.loader.order import Position, Share, parse_start, torch_rank, torch_worker

try:
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
except ImportError as error:
    raise MissingDependencyError(
        "dataloader needs torch, which is not installed: see its web page for the build that fits "
        "this machine"
    ) from error
from dask_image_ingest.loader.torch_worker import sendable, set_up_worker

# Makes the batches of an epoch, given the arguments epoch=, start= and the share.
MakeBatches = Callable[..., Batches]


class TorchDataset(IterableDataset):
    """Iterable dataset of batches, which a ``DataLoader`` can pickle to its workers.

    Parameters
    ----------
    make
        Makes the batches of an epoch.
    start
        Where the first iteration begins: an argument ``start=``.
    share
        Rank and world; None for those of ``torch.distributed``.
    """

    def __init__(self, make: MakeBatches, start: Any, share: Share | None = None) -> None:
        self._make = make
        # Shared memory, since persistent workers have a copy of this object that set_epoch() in the
        # main process could not reach otherwise.
        self._shared_epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        # Where the next iteration begins, and whether this is the worker's own position.
        self._start = parse_start(start)
        self._is_own = False
        # Where the latest iteration began.
        self._begun: Any = self._start
        if isinstance(self._start, Position):
            self._shared_epoch[0] = self._start.epoch
        self._share = share
        # The latest iterator of this process, and its epoch.
        self._batches: Batches | None = None
        self._iterated = 0
        # Rank and world of the main process, in a copy that was pickled; None in the original.
        self._rank: tuple[int, int] | None = None
        # Building an iterator checks the arguments here, rather than in a worker.
        self._iterate(self._start)

    def __repr__(self) -> str:
        return f"<torch dataset of {self._iterate(self._start, self._is_own)!r}>"

    def __len__(self) -> int:
        return len(self._iterate(0))  # of this epoch: a mix has other lengths in others

    def __iter__(self) -> Iterator[Any]:
        set_up_worker()
        self._iterated = self._epoch
        self._batches = self._iterate(self._start, self._is_own)
        self._begun, self._start, self._is_own = self._start, 0, False
        return self._batches if get_worker_info() is None else map(sendable, self._batches)

    def __next__(self) -> Any:
        if self._batches is None:
            iter(self)
        assert self._batches is not None
        return next(self._batches)

    def close(self) -> None:
        """Stop reading ahead and free what was read."""
        if self._batches is not None:
            self._batches.close()

    @property
    def position(self) -> Position:
        """Position of the next batch that this process iterates: an argument ``start=``."""
        return (self._batches or self._iterate(self._start, self._is_own)).position

    def position_after(self, steps: int) -> Position:
        """Position after so many batches of the latest loop: an argument ``start=``.

        Workers read ahead: only the training process knows how many batches it has used.

        Parameters
        ----------
        steps
            Batches of this rank since the loop began.

        Returns
        -------
        Position
        """
        return self._iterate(self._begun).position_after(steps)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be another epoch: another order, and other augmentations."""
        self._shared_epoch[0] = whole_number(
            "epoch", epoch, 0, "pass the number of the epoch", most=2**63 - 1
        )

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position, for torchdata's ``StatefulDataLoader``."""
        if self._batches is None:
            start = self._start
            return {"epoch": self._epoch, "start": _plain(start), "own": self._is_own}
        own = get_worker_info() is not None
        return {"epoch": self._iterated, "start": _plain(self._batches.position), "own": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration in this process at the position of ``state``.

        Raises
        ------
        ArgumentError
            If ``state`` is not from ``state_dict``.
        """
        if not isinstance(state, Mapping) or not {"epoch", "start", "own"} <= set(state):
            raise ArgumentError(
                f"load_state_dict: {shown(state)} is not what state_dict() gives, which is a dict "
                "of 'epoch', 'start' and 'own'"
            )
        self.set_epoch(state["epoch"])
        self._start, self._is_own = parse_start(state["start"]), bool(state["own"])
        self._batches = None

    def __getstate__(self) -> dict[str, Any]:
        # cloudpickle: the frame may contain functions that cannot be imported. Pickle the rank,
        # too: a spawned worker has no process group.
        make, rank = cloudpickle.dumps(self._make), self._rank or torch_rank()
        return self.__dict__ | {"_make": make, "_rank": rank, "_batches": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state | {"_make": cloudpickle.loads(state["_make"])}
        # Pickled to a file, not to a worker, the tensor is no longer in shared memory.
        self._shared_epoch.share_memory_()

    @property
    def _epoch(self) -> int:
        return int(self._shared_epoch[0])

    def _iterate(self, start: Any, is_own: bool = False) -> Batches:
        share = self._share or Share(*(torch_rank() if self._rank is None else self._rank))
        worker, workers = torch_worker()
        share = share._replace(worker=0 if is_own else worker, workers=workers)
        return self._make(epoch=self._epoch, start=start, share=share)


def _plain(start: Any) -> Any:
    return list(start) if isinstance(start, Position) else start


if TYPE_CHECKING:

    class BatchLoader(DataLoader):
        """A ``DataLoader`` that declares the type of its dataset."""

        dataset: TorchDataset
else:
    BatchLoader = DataLoader


def make_dataloader(make: MakeBatches, start: Any, options: dict[str, Any]) -> BatchLoader:
    """Create a ``DataLoader`` with ``options`` for the batches that ``make`` makes.

    Raises
    ------
    ArgumentError
        For options that a ``DataLoader`` of such a dataset does not take.
    """
    dataset = TorchDataset(make, start)
    try:
        return BatchLoader(dataset, batch_size=None, **options)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"dataloader: {error}") from error
