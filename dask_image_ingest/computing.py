"""Compute with the current scheduler, optionally with a progress line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import dask
from dask.bag import from_sequence
from dask.base import get_scheduler
from distributed.scheduler import KilledWorker

from dask_image_ingest.errors import DaskImageIngestError
from dask_image_ingest.progress_bar import progress
from dask_image_ingest.scheduler_plugin import check_cluster_in_use, client_that_computes


def run(function: Callable[[Any], Any], items: Sequence[Any], show: bool) -> list[Any]:
    """Call ``function`` with each item, in one task per item; results in order.

    Raises
    ------
    DaskImageIngestError
        If an item kills workers of a cluster.
    """
    if not len(items):
        return []
    try:
        return list(compute(from_sequence(items, npartitions=len(items)).map(function), show))
    except KilledWorker as error:
        # A single item's task is fused with its successor, and its key has no number.
        number = error.task[1] if isinstance(error.task, tuple) else 0
        raise killed_by(error, str(items[number])) from error


def compute(collection: Any, show: bool) -> Any:
    """:func:`compute_all` for one collection."""
    return compute_all([collection], show)[0]


def compute_all(collections: Sequence[Any], show: bool) -> tuple[Any, ...]:
    """Compute collections with the current scheduler, by default in threads.

    With ``show``, under :func:`progress`.

    Raises
    ------
    ArgumentError
        If the client is asynchronous.
    """
    scheduler = None if client_that_computes() or get_scheduler() else "threads"
    check_cluster_in_use()
    with progress() if show else contextlib.nullcontext():
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
