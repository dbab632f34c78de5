"""Computing with the scheduler in use, with a progress bar where one is wanted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import dask
from dask.bag import from_sequence
from dask.base import get_scheduler
from dask.diagnostics import ProgressBar
from distributed import Client, progress, wait

__all__ = ["compute", "compute_all", "run"]


def run(function: Callable[[Any], Any], items: Sequence[Any], show: bool) -> list[Any]:
    """Call ``function`` with each item, each time in a task of its own; results in order."""
    if not len(items):
        return []
    return list(compute(from_sequence(items, npartitions=len(items)).map(function), show))


def compute(collection: Any, show: bool) -> Any:
    """Compute one collection, as :func:`compute_all`."""
    return compute_all([collection], show)[0]


def compute_all(collections: Sequence[Any], show: bool) -> tuple[Any, ...]:
    """Compute collections with the scheduler that was chosen, or else on threads.

    With ``show``, what takes longer than a second has a progress bar on standard error.
    """
    chosen = get_scheduler()
    scheduler = None if chosen else "threads"
    if not show:
        return _computed(collections, scheduler)
    if not isinstance(getattr(chosen, "__self__", None), Client):
        with ProgressBar(minimum=1.0, out=sys.stderr):
            return _computed(collections, scheduler)
    persisted = dask.persist(*collections)
    try:
        wait(persisted, timeout=1)
    except TimeoutError:
        with contextlib.redirect_stdout(sys.stderr):
            progress(*persisted, notebook=False)
    return _computed(persisted, None)


def _computed(collections: Sequence[Any], scheduler: str | None) -> tuple[Any, ...]:
    results: tuple[Any, ...] = dask.compute(*collections, scheduler=scheduler)
    return results
