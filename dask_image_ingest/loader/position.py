"""Place of a process in an epoch: the position of its next batch, and its part of each step.

A step is divided evenly among ranks, and the steps of a rank are dealt in turn to its workers.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dask_image_ingest.arguments import shown, whole_number
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.loader.order import Rows

# What decides the order of rows.
_ORDER = (
    "another order (the rows of each partition, the bytes of an image, weights= and "
    "balance=, stop=; with buckets= also these and batch_size × ranks): order"
)


class Position(NamedTuple):
    """Position in an epoch, to be stored in a model's checkpoint; as a list, in JSON too.

    Attributes
    ----------
    epoch : int
    row : int
        Rows that came before, over all ranks; a bad image counts as a row.
    seed : int or None
        Seed of the shuffle.
    rows : int or None
        Rows of the epoch; None if it repeats for ever, or if they were not counted.
    order : str or None
        Digest of what else decides the order; None if nothing was counted.
    """

    epoch: int
    row: int
    seed: int | None = None
    rows: int | None = None
    order: str | None = None

    def check(self, other: Position) -> None:
        """Refuse ``other``, an argument ``start=``, unless it is a position in the same epoch."""
        named = {"seed": "shuffle", "order": _ORDER}
        for name, ours, theirs in zip(self._fields, self, other, strict=True):
            is_unknown = name in ("rows", "order") and None in (ours, theirs)
            if name != "row" and ours != theirs and not is_unknown:
                raise ArgumentError(
                    f"start={tuple(other)!r}: the position has {named.get(name, name)}={theirs}, "
                    f"and this is {ours}"
                )
        if self.rows is not None and other.row > self.rows:
            raise ArgumentError(f"start={tuple(other)!r}: this epoch ends after {self.rows:,} rows")


def parse_start(start: int | Sequence[Any] | None) -> int | Position:
    """Parse the argument ``start=``: a number of batches, or a position; None is the begin."""
    if start is None:
        return 0
    advice = "pass how many batches to skip, or the position of an earlier iterator"
    if isinstance(start, (str, bytes)) or not isinstance(start, Sequence):
        return whole_number("start", start, 0, advice)
    try:
        epoch, row, seed, rows, order = start
        position = Position(
            operator.index(epoch),
            operator.index(row),
            None if seed is None else operator.index(seed),
            None if rows is None else operator.index(rows),
            order,
        )
    except (TypeError, ValueError):
        raise ArgumentError(f"start={shown(start)}; {advice}") from None
    if min(position.epoch, position.row) < 0:
        raise ArgumentError(f"start={shown(start)}; {advice}")
    return position


class Share(NamedTuple):
    """The part of an epoch that a process reads.

    A rank takes its part of each step; a worker of a rank takes every workers-th step.
    """

    rank: int = 0
    world: int = 1
    worker: int = 0
    workers: int = 1

    def of(self, parts: list[Rows]) -> list[Rows]:
        """The rank's rows of a step, by frame.

        Places are dealt out in order, so that each shard is read by few ranks.
        """
        ours, first = [], 0
        for rows in parts:
            count = len(rows.numbers)
            # The ranks take turns at one row more than others.
            more = (np.arange(self.world) - first) % self.world < count % self.world
            first += count % self.world
            edges = np.concatenate([[0], np.cumsum(count // self.world + more)])
            mine = np.argsort(rows.places, kind="stable")[edges[self.rank] : edges[self.rank + 1]]
            ours.append(rows.take(mine))
        return ours


def parse_shard(shard: Any, format: str) -> Share:
    """Parse the argument ``shard=``: (rank, world), None, or "auto"."""
    if shard is None:
        return Share()
    worker = None
    if isinstance(shard, str) and shard == "auto":
        worker = worker_of_loader()
        shard = (torch_rank() or _launched_rank()) if format == "torch" else None
        shard = shard or (0, 1)
    try:
        rank, world = map(operator.index, shard)
    except (TypeError, ValueError):
        rank, world = 0, 0
    if not 0 <= rank < world:
        raise ArgumentError(
            f"shard={shard!r}; pass (rank, world), a rank from 0 below world, or 'auto', or None"
        )
    return Share(rank, world, *(worker or (0, 1)))


def torch_rank() -> tuple[int, int] | None:
    """Rank and world size of this process in ``torch.distributed``; None outside of it."""
    torch = sys.modules.get("torch")
    group = None if torch is None else torch.distributed
    if group is not None and group.is_available() and group.is_initialized():
        return group.get_rank(), group.get_world_size()
    return None


# The process that imported this module: a fork of it has its process group, if there is one.
_PROCESS = os.getpid()


def _launched_rank() -> tuple[int, int] | None:
    """Rank and world size by torchrun's variables, in a spawned worker of a ``DataLoader``.

    It has no process group, and iterators that it makes have no process that could tell them.
    """
    is_spawned = worker_of_loader() is not None and os.getpid() == _PROCESS
    if not is_spawned or not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def worker_of_loader() -> tuple[int, int] | None:
    """Number of this worker of a torch ``DataLoader``, and how many it has; None in no worker."""
    torch = sys.modules.get("torch")
    worker = None if torch is None else torch.utils.data.get_worker_info()
    return None if worker is None else (worker.id, worker.num_workers)
