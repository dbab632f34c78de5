"""Compute with the current scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dask
from dask.bag import from_sequence
from dask.base import get_scheduler
from distributed.scheduler import KilledWorker

from dask_image_ingest.errors import DaskImageIngestError
from dask_image_ingest.scheduler_plugin import check_cluster_in_use, client_that_computes


def run(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Call ``function`` with each item, in one task per item; results in order.

    Raises
    ------
    DaskImageIngestError
        If an item kills workers of a cluster.
    """
    if not len(items):
        return []
    try:
        (results,) = compute(from_sequence(items, npartitions=len(items)).map(function))
        return list(results)
    except KilledWorker as error:
        # A single item's task is fused with its successor, and its key has no number.
        number = error.task[1] if isinstance(error.task, tuple) else 0
        raise killed_by(error, str(items[number])) from error


def compute(*collections: Any) -> tuple[Any, ...]:
    """Compute collections with the current scheduler, by default in threads.

    Raises
    ------
    ArgumentError
        If the client is asynchronous.
    """
    scheduler = None if client_that_computes() or get_scheduler() else "threads"
    check_cluster_in_use()
    results: tuple[Any, ...] = dask.compute(*collections, scheduler=scheduler)
    return results


def killed_by(error: KilledWorker, what: str) -> DaskImageIngestError:
    """Error that names ``what`` the task has read, and says what to do."""
    count = error.allowed_failures + 1
    workers = "workers that read" if count > 1 else "worker that read"
    return DaskImageIngestError(
        f"{count} {workers} {what} died, the last one at {error.last_worker.address}: an image of "
        "it crashes the decoder, or memory was too small. Run this again: its images are decoded "
        "one by one then, in a process that may die. If workers die of it all the same, give them "
        "more memory"
    )
