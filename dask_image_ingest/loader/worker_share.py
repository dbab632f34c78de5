"""Shards of an iteration: which part of a frame this process or DataLoader worker reads."""

from __future__ import annotations

import operator
import os
import sys
from typing import Any

from dask_image_ingest.errors import ArgumentError


def parse_shard(shard: Any, format: str) -> tuple[int, int]:
    """Parse the argument ``shard=``: (rank, world).

    Raises
    ------
    ArgumentError
    """
    if shard is None:
        return 0, 1
    if isinstance(shard, str) and shard == "auto":
        return torch_worker(torch_rank() if format == "torch" else (0, 1))
    try:
        rank, world = map(operator.index, shard)
    except (TypeError, ValueError):
        rank, world = 0, 0
    if not 0 <= rank < world:
        raise ArgumentError(
            f"shard={shard!r}; pass (rank, world), a rank from 0 below world, or 'auto', or None"
        )
    return rank, world


def torch_rank() -> tuple[int, int]:
    """Rank and world size of this process in ``torch.distributed``; (0, 1) outside of it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return 0, 1
    group = torch.distributed
    if group.is_available() and group.is_initialized():
        return group.get_rank(), group.get_world_size()
    if torch.utils.data.get_worker_info() is not None and "WORLD_SIZE" in os.environ:
        # A spawned DataLoader worker has no process group, but inherits torchrun's variables.
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def torch_worker(shard: tuple[int, int]) -> tuple[int, int]:
    """The part of ``shard`` for this worker of a torch ``DataLoader``; else ``shard`` itself."""
    torch = sys.modules.get("torch")
    worker = None if torch is None else torch.utils.data.get_worker_info()
    if worker is None:
        return shard
    rank, world = shard
    return rank * worker.num_workers + worker.id, world * worker.num_workers
