"""``dataloader``: batches for torch, divided among workers and ranks."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle

from dask_image_ingest.arguments import shown, whole_number
from dask_image_ingest.errors import ArgumentError, MissingDependencyError, warn_user
from dask_image_ingest.loader.iter_batches import Batches
from dask_image_ingest.loader.loops import Loop, Loops
from dask_image_ingest.loader.position import (
    Position,
    Share,
    parse_shard,
    parse_start,
    torch_rank,
    worker_of_loader,
)

try:
    import torch  # noqa: F401 - a part of it may be there without it
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
except ImportError as error:
    raise MissingDependencyError(
        "dataloader needs torch, which is not installed: see its web page for the build that fits "
        "this machine"
    ) from error

from dask_image_ingest.loader.source import Facts
from dask_image_ingest.loader.torch_worker import import_for_workers, sendable, set_up_worker

# Makes the batches of an epoch, given the arguments epoch=, start= and the share.
MakeBatches = Callable[..., Batches]


class TorchDataset(IterableDataset):
    """Iterable dataset of batches, which a ``DataLoader`` can pickle to its workers.

    Parameters
    ----------
    make
        Makes the batches of an epoch.
    start
        Where the first loop begins: an argument ``start=``.
    share
        Rank and world; None for those of ``torch.distributed``.
    """

    def __init__(
        self,
        make: MakeBatches,
        start: int | Sequence[Any],
        share: Share | None = None,
    ) -> None:
        self._make = make
        self._loops = Loops(parse_start(start))
        # Copies in workers have what is known when they are made.
        self._facts: Facts = {}
        self._share = share
        # The latest iterator of this process.
        self._batches: Batches | None = None
        # Of workers of a `BatchLoader`, which tells them what has begun: another loop may be set
        # before they begin; and the loop for which they were started.
        self._is_told = False
        self._first: Loop | None = None
        # The process that unpickled this, with the rank and world of the one that pickled it.
        self._unpickled: tuple[int, tuple[int, int]] | None = None
        # Building an iterator checks the arguments here, rather than in a worker.
        first = self._batches_of(self._loops.current)
        self._is_on_gpu = first.is_on_gpu
        # Whether images are decoded where this is iterated.
        self.decodes = first.decodes
        # Whether to warn of a loop that is the same as the one before it.
        self._warns = first.differs_by_epoch

    def __repr__(self) -> str:
        return f"<torch dataset of {self._batches_of(self.loop)!r}>"

    def __len__(self) -> int:
        # Of this epoch: a mix has other lengths in others.
        return len(self._batches_of(self._loops.current._replace(start=0)))

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is None:
            self._batches = self._batches_of(self.begin())
            return self._batches
        self.refuse_workers()
        set_up_worker()
        if self._is_told:
            loop, self._first = self._first or self._loops.begun, None
        else:
            loop = self.loop
            self._loops.note_begin()
        self._batches = self._batches_of(loop)
        return map(sendable, self._batches)

    def __next__(self) -> Any:
        if self._batches is None:
            iter(self)
        assert self._batches is not None
        return next(self._batches)

    @property
    def world(self) -> int:
        """Number of ranks that share the batches."""
        return self._share.world if self._share else self._rank()[1]

    @property
    def loop(self) -> Loop:
        """The loop that begins next; once it has begun, that loop."""
        epoch, start = self._loops.current
        if not isinstance(start, Position) or start.epoch == epoch:
            return Loop(epoch, start)
        if self._batches_of(Loop(start.epoch, start)).is_at_end:
            return Loop(epoch, 0)
        raise ArgumentError(
            f"the next loop would go on in the middle of epoch {start.epoch}, at row "
            f"{start.row:,}, but set_epoch({epoch}) was called: call set_epoch({start.epoch}) "
            "first, or begin without start= or a state"
        )

    @loop.setter
    def loop(self, loop: Loop) -> None:
        self._batches_of(loop)  # its position is checked
        self._loops.set(loop)
        self._batches = None

    def begin(self) -> Loop:
        """Begin a loop: all of the epoch again, if no other one was set."""
        if self._loops.has_begun:
            if self._warns:
                self._warns = False
                warn_user(
                    "this loop has the same order and the same random crops as the loop before it: "
                    "call loader.set_epoch(epoch) before each loop, or that of its dataset"
                )
            self._loops.set_epoch(self._loops.current.epoch)
        loop = self.loop
        self._loops.note_begin()
        return loop

    @contextlib.contextmanager
    def starting(self, workers: int, loop: Loop) -> Iterator[None]:
        """Have workers that are started meanwhile begin with a loop."""
        # What the order needs to know of the rows is found before, once.
        if not self._facts:
            share = (self._share or Share(*self._rank()))._replace(workers=workers)
            self._make(epoch=loop.epoch, start=0, share=share, facts=self._facts).prepare()
        self._is_told, self._first = True, loop
        try:
            yield
        finally:
            self._is_told, self._first = False, None

    def close(self) -> None:
        """Stop reading ahead and free what was read."""
        if self._batches is not None:
            self._batches.close()

    @property
    def position(self) -> Position:
        """Position of the next batch that this process iterates: an argument ``start=``."""
        batches = self._batches
        return (self._batches_of(self.loop) if batches is None else batches).position

    def position_after(self, steps: int, loop: Loop | None = None) -> Position:
        """Position after so many batches of the latest loop: an argument ``start=``.

        Workers read ahead: only the training process knows how many batches it has used.

        Parameters
        ----------
        steps
            Batches of this rank since the loop began.
        loop
            Another loop than the latest one.

        Returns
        -------
        Position
        """
        return self._batches_of(loop or self.loop).position_after(steps)

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be another epoch: another order, and other augmentations.

        Loops that follow are this epoch again, until another one is set.

        Raises
        ------
        ArgumentError
            If accelerate, which calls this in each loop, would divide this rank's part once more.
        """
        accelerate = sys.modules.get("accelerate.state")
        if accelerate is not None:
            loaders = accelerate.GradientState().dataloader_references
            iterated = [getattr(loader, "dataset", None) for loader in loaders]
            if any(self in (data, getattr(data, "dataset", None)) for data in iterated):
                self.refuse_division()
        self._loops.set_epoch(
            whole_number("epoch", epoch, 0, "pass the number of the epoch", most=2**63 - 1)
        )

    def __getstate__(self) -> dict[str, Any]:
        # cloudpickle: the frame may contain functions that cannot be imported. The rank, too: a
        # spawned worker has no process group.
        make, rank = cloudpickle.dumps(self._make), self._rank()
        return self.__dict__ | {"_make": make, "_unpickled": (0, rank), "_batches": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _, rank = state["_unpickled"]
        make = cloudpickle.loads(state["_make"])
        self.__dict__ = state | {"_make": make, "_unpickled": (os.getpid(), rank)}

    def refuse_workers(self) -> None:
        """Refuse workers of a ``DataLoader`` that would decode on a GPU.

        CUDA does not work in a fork of a process that has used it. Spawned workers would have a
        context and a pool of their own each, beside those of the training.
        """
        if self._is_on_gpu:
            raise ArgumentError(
                "workers of a DataLoader can't decode on a GPU (backend='cudf'): read with "
                "backend='pandas', and num_workers=4 decode on the CPU; or leave num_workers=0, or "
                "iterate over images.iter_batches(), which decodes on the GPU of this process "
                "while the model trains"
            )

    def refuse_division(self) -> None:
        """Refuse that accelerate divides batches among ranks, of which each has its part."""
        if self.world > 1:
            raise ArgumentError(
                "accelerate would divide the batches among the ranks, and each has its part "
                "already: leave this DataLoader out of prepare(), and move its batches with "
                ".to(accelerator.device); or make it with shard=None"
            )

    def _rank(self) -> tuple[int, int]:
        """Rank and world: in a spawned worker those of the process that started it."""
        if self._unpickled is not None and get_worker_info() is not None:
            process, rank = self._unpickled
            if process == os.getpid():
                return rank
        return torch_rank() or (0, 1)

    def _batches_of(self, loop: Loop) -> Batches:
        """The batches of a loop that this process reads."""
        worker, workers = worker_of_loader() or (0, 1)
        share = (self._share or Share(*self._rank()))._replace(worker=worker, workers=workers)
        return self._make(epoch=loop.epoch, start=loop.start, share=share, facts=self._facts)


class BatchLoader(DataLoader):
    """A ``DataLoader`` of batches that tells its dataset the epoch, and knows its position."""

    dataset: TorchDataset

    # The latest loop with workers, and how many of its batches were taken.
    _loop: Loop | None = None
    _taken = 0

    def __iter__(self) -> Iterator[Any]:
        # It begins with the first batch: Lightning makes an iterator, and then sets its epoch.
        if not self.num_workers:
            yield from super().__iter__()
            return
        self._loop, self._taken = self.dataset.begin(), 0
        with self.dataset.starting(self.num_workers, self._loop):
            batches = super().__iter__()
        for batch in batches:
            self._taken += 1
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be another epoch, as transformers' ``Trainer`` asks for."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Position after the batches that were taken, as torchdata's ``StatefulDataLoader`` has it.

        It is that of all ranks, whatever the number of workers; plain values, for JSON too.
        """
        is_ahead = self._loop is not None  # workers read ahead, of a loop that this counts
        dataset = self.dataset
        position = dataset.position_after(self._taken, self._loop) if is_ahead else dataset.position
        return {"position": list(position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next loop go on at the position of ``state``, with any ranks and workers.

        If ``set_epoch`` is called before that loop, its epoch is that of ``state``, or ``state`` is
        at the end of one: in the middle of an epoch another one cannot begin.

        Raises
        ------
        ArgumentError
            If it is no position of these rows, in this order.
        """
        position = parse_start(state.get("position"))
        if not isinstance(position, Position):
            raise ArgumentError(f"load_state_dict: {shown(state)} is no state of such a loader")
        self.dataset.loop = Loop(position.epoch, position)
        self._loop = None

    @property
    def sampler(self) -> _Epochs:
        """Sampler that Lightning tells the epoch."""
        return _Epochs(self.dataset)

    @sampler.setter
    def sampler(self, sampler: object) -> None:
        """Ignore that of torch, which yields None."""

    @property
    def _is_accelerate_prepared(self) -> bool:
        """False; accelerate asks before it takes the loader for one that it has to divide."""
        self.dataset.refuse_division()
        return False


class _Epochs:
    """A sampler that only passes the epoch on."""

    def __init__(self, dataset: TorchDataset) -> None:
        self.set_epoch = dataset.set_epoch

    def __iter__(self) -> Iterator[None]:
        return itertools.repeat(None)


def make_dataset(
    make: MakeBatches,
    start: int | Sequence[Any],
    shard: tuple[int, int] | str | None,
) -> TorchDataset:
    """Create a dataset for the part ``shard=`` of the batches that ``make`` makes."""
    share = None if isinstance(shard, str) and shard == "auto" else parse_shard(shard, "torch")
    return TorchDataset(make, start, share)


def make_dataloader(
    make: MakeBatches,
    start: int | Sequence[Any],
    shard: tuple[int, int] | str | None,
    options: dict[str, Any],
) -> BatchLoader:
    """Create a ``DataLoader`` with ``options`` for the batches that ``make`` makes."""
    if options.get("in_order", True) is not True:
        raise ArgumentError(
            f"in_order={shown(options['in_order'])}: batches come in the order of the epoch, by "
            "which a state says which ones were used; leave it out"
        )
    loader = BatchLoader(make_dataset(make, start, shard), batch_size=None, **options)
    if loader.num_workers:
        loader.dataset.refuse_workers()
        if loader.dataset.decodes:
            import_for_workers(loader)
    else:
        loader.timeout = 0  # nothing is waited for, and torch asserts that it is 0
    return loader
