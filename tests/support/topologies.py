"""Epochs as ranks and workers have them, simulated in one process; and in plain Python."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

# (ranks, workers); a step of 24 rows is whole for each.
TOPOLOGIES = [(1, 1), (2, 2), (4, 1), (3, 5), (8, 4)]
STEP = 24

Make = Callable[..., Any]


def fake_torch(patch: pytest.MonkeyPatch, worker: Any = None, group: Any = None) -> None:
    """torch as a process sees it that is worker ``(id, of)`` and rank ``(rank, of)``."""
    info = worker and SimpleNamespace(id=worker[0], num_workers=worker[1])
    distributed = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: group is not None,
        get_rank=lambda: group[0],
        get_world_size=lambda: group[1],
    )
    dlpack = SimpleNamespace(from_dlpack=lambda array: array)
    data = SimpleNamespace(get_worker_info=lambda: info)
    utils = SimpleNamespace(data=data, dlpack=dlpack)
    torch = SimpleNamespace(distributed=distributed, utils=utils)
    patch.setitem(sys.modules, "torch", torch)
    patch.setitem(sys.modules, "torch.utils", utils)
    patch.setitem(sys.modules, "torch.utils.dlpack", dlpack)


def in_turn(workers: list[list[Any]]) -> list[Any]:
    """Batches of workers as a ``DataLoader`` gives them."""
    rounds = itertools.zip_longest(*workers, fillvalue=None)
    return [batch for one in rounds for batch in one if batch is not None]


def steps_of(make: Make, ranks: int, workers: int, **options: Any) -> list[list[list[int]]]:
    """Keys of each rank's batch in each step: ``[step][rank][row]``.

    Each process iterates over ``make(**options)``, and each rank has the steps that it expects.
    """
    by_rank = []
    for rank in range(ranks):
        by_worker = []
        for worker in range(workers):
            with pytest.MonkeyPatch.context() as patch:
                fake_torch(patch, (worker, workers), (rank, ranks))
                batches = make(format="torch", **options)
                by_worker.append([batch["key"] for batch in map(checked, batches)])
                expected = len(batches)
        by_rank.append([list(map(int, keys)) for keys in in_turn(by_worker)])
        if not options.get("start"):
            assert len(by_rank[-1]) == expected
    assert len({len(steps) for steps in by_rank}) == 1, "ranks have unequal steps"
    return [list(step) for step in zip(*by_rank, strict=True)]


def checked(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch, whose images have their keys as values if it has images."""
    if "image" in batch:
        assert [int(image.flat[0]) for image in batch["image"]] == list(batch["key"])
    return batch


def rows_of(steps: Iterable[list[list[int]]]) -> list[Counter]:
    """The rows of each global batch."""
    return [Counter(key for rank in step for key in rank) for step in steps]


def expected_steps(order: list[int], bad: set[int], size: int, drop_last: bool) -> list[Counter]:
    """The global batches of rows in this order, of which the bad ones are missing."""
    steps = [order[start : start + size] for start in range(0, len(order), size)]
    if drop_last and steps and len(steps[-1]) < size:
        steps.pop()
    return [Counter(key for key in step if key not in bad) for step in steps]
