"""A function over many items, as tasks of the scheduler in use, with a bar for whoever waits."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dask.bag import from_sequence
from dask.base import get_scheduler
from dask.diagnostics import ProgressBar
from distributed import Client, progress, wait

__all__ = ["compute", "run"]


def run(function: Callable[[Any], Any], items: Sequence[Any], show: bool) -> list[Any]:
    """Call ``function`` with each item, each time in a task of its own; results in order."""
    if not len(items):
        return []
    return list(compute(from_sequence(items, npartitions=len(items)).map(function), show))


def compute(collection: Any, show: bool) -> Any:
    """Compute a collection; threads do it where nothing else was chosen."""
    chosen = get_scheduler()
    scheduler = None if chosen else "threads"
    if not show:
        return collection.compute(scheduler=scheduler)
    if not isinstance(getattr(chosen, "__self__", None), Client):
        with ProgressBar(minimum=1.0, out=sys.stderr):
            return collection.compute(scheduler=scheduler)
    collection = collection.persist()
    try:
        wait(collection, timeout=1)
    except TimeoutError:
        with contextlib.redirect_stdout(sys.stderr):
            progress(collection, notebook=False)
    return collection.compute()
