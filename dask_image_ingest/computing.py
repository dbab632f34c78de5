"""Compute with the current scheduler; show the progress of computing and writing.

Each process counts the images that it decodes. A worker reports them to its scheduler as fine
performance metrics of Dask, so they are on the dashboard too.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TextIO

import dask
from dask import delayed
from dask.bag import from_sequence
from dask.base import get_scheduler
from dask.callbacks import Callback
from dask.typing import Key
from distributed import Scheduler
from distributed.metrics import context_meter
from distributed.scheduler import KilledWorker

from dask_image_ingest.client import (
    check_workers,
    client_that_computes,
    own_version,
    refuse_other_version,
)
from dask_image_ingest.errors import DaskImageIngestError

# Seconds before the first line; between updates; between lines in a file, which can't be updated.
_PATIENCE, _EVERY, _IN_FILE = 1.0, 0.5, 30.0

# Seconds to wait for the last metrics: workers send them with heartbeats, 0.5 s apart in a small
# cluster.
_HEARTBEAT = 0.6

#: Names of the metrics.
DECODED, BAD, ANSWERED, WRITTEN, SEARCHED = _METRICS = (
    "images decoded",
    "images not decoded",
    "rows answered",
    "samples written",
    "rows searched",
)

_lock = threading.Lock()
_counts: Counter[str] = Counter()  # of this process, inside `progress`
_shown: list[_Work] = []  # at most one


def count(metric: str, number: int = 1) -> None:
    """Add to a metric of this process, and of the cluster if this is one of its tasks."""
    if _shown:
        with _lock:
            _counts[metric] += number
    if number:
        context_meter.digest_metric(metric, number, "count")


@contextlib.contextmanager
def progress(file: TextIO | None = None) -> Iterator[None]:
    """Show the progress of everything that is computed and written inside.

    A line shows the tasks and images done, images per second, images that could not be decoded,
    rows for which the function of ``map_rows`` has answered, samples that an export has written,
    and an estimate of the time left::

        48/120 tasks in 61 s, 12,288 images decoded (201/s), about 92 s left

    Nothing is shown for computations of less than a second.

    Parameters
    ----------
    file
        Where to write, by default standard error. A terminal or notebook gets a line that changes,
        other files a line every 30 seconds, and one at the end.

    Notes
    -----
    On a cluster, tasks and images of its other users are counted too, and images and rows come when
    their task is done. With ``scheduler="processes"`` images are not counted.

    Examples
    --------
    >>> with progress():
    ...     frame = ddf.compute()
    """
    if _shown:  # nested
        yield
        return
    out = sys.stderr if file is None else file
    ended = threading.Event()
    with _Work() as work:
        _shown.append(work)
        thread = threading.Thread(
            target=_show, args=(work, out, ended), name="image-ingest-progress", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            if work.client is not None and work.text():
                time.sleep(_HEARTBEAT)
            ended.set()
            thread.join()
            _shown.clear()


def _show(work: _Work, out: TextIO, ended: threading.Event) -> None:
    """Write the line of ``work`` from time to time, and at the end."""
    moves = out.isatty() or type(out).__module__.startswith("ipykernel")
    running = True
    while running:
        running = not ended.wait(_EVERY if moves else _IN_FILE)
        text = work.text()
        if text and moves:
            width = max(1, shutil.get_terminal_size().columns - 1)
            text = f"\r{text[:width].ljust(width)}"
        if text:
            out.write(text if moves and running else f"{text}\n")
            out.flush()


class _Work(Callback):
    """Tasks and images since its creation: of the cluster in use, else of this process."""

    def __init__(self) -> None:
        self.client = client_that_computes()
        self._done, self._states = 0, dict[int, Any]()  # tasks; running computations
        try:
            self._before = self._now = self._counts()
        except ValueError:  # the cluster may be configured to run no functions
            self.client = None
            self._before = self._now = self._counts()
        self._began = time.monotonic()  # the first task, about

    def text(self) -> str:
        """The line; empty in the first second of the first task."""
        with contextlib.suppress(Exception):  # the last counts if the scheduler can't be reached
            self._now = self._counts()
        new = {name: self._now[name] - self._before[name] for name in ("done", *_METRICS)}
        done = new.pop("done")
        tasks = done + self._now["left"]
        if not tasks:
            self._began = time.monotonic()
        seconds = time.monotonic() - self._began
        if seconds < _PATIENCE:
            return ""
        counted = [(number, name) for name, number in new.items() if number]
        rates = [f"{number:,} {name} ({number / seconds:,.0f}/s)" for number, name in counted]
        left = [f"about {seconds * (tasks - done) / done:.0f} s left"] if 0 < done < tasks else []
        return ", ".join([f"{done:,}/{tasks:,} tasks in {seconds:.0f} s", *rates, *left])

    def _counts(self) -> dict[str, int]:
        """Tasks ``done`` and ``left``, and the metrics."""
        if self.client is not None:
            counts: dict[str, int]
            counts = self.client.run_on_scheduler(_of_scheduler, _METRICS)
            return counts
        pending = ("ready", "waiting", "running")
        left = sum(len(state[name]) for state in [*self._states.values()] for name in pending)
        return {"done": self._done, "left": left} | {name: _counts[name] for name in _METRICS}

    # Hooks of Dask's local schedulers.

    def _start_state(self, dsk: object, state: object) -> None:
        self._states[id(state)] = state

    def _posttask(
        self, key: Key, result: object, dsk: object, state: object, worker: object
    ) -> None:
        self._done += 1

    def _finish(self, dsk: object, state: object, errored: bool) -> None:
        self._states.pop(id(state), None)


def _of_scheduler(metrics: Sequence[str], dask_scheduler: Scheduler) -> dict[str, int]:
    """:meth:`_Work._counts` of a cluster, since its start."""
    counts = dict.fromkeys(("done", "left", *metrics), 0)
    for prefix in dask_scheduler.task_prefixes.values():
        for state in ("memory", "erred"):
            counts["done"] += prefix.state_counts.get(state, 0)
        for state in ("waiting", "queued", "no-worker", "processing"):
            counts["left"] += prefix.states.get(state, 0)
    for key, number in dask_scheduler.cumulative_worker_metrics.items():
        if isinstance(key, tuple) and key[-2] in metrics:
            counts[key[-2]] += int(number)
    return counts


def one_task_per_item(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Call ``function`` with each item, in one task per item; results in order.

    Raises
    ------
    ClusterError
        If a worker has another version of this package.
    DaskImageIngestError
        If an item kills workers of a cluster.
    """
    if not len(items):
        return []
    checked = from_sequence(items, npartitions=len(items)).map(partial(_checked, own_version()))
    try:
        (results,) = compute(checked.map(function))
        return list(results)
    except KilledWorker as error:
        # A single item's task is fused with its successor, and its key has no number.
        number = error.task[1] if isinstance(error.task, tuple) else 0
        raise killed_by(error, str(items[number])) from error


def _checked(version: str, item: Any) -> Any:
    refuse_other_version(version)
    return item


def compute(*collections: Any) -> tuple[Any, ...]:
    """Compute collections with the current scheduler, by default in threads.

    Raises
    ------
    ClusterError
        If workers of the cluster lack this package, or have another version of it.
    """
    scheduler = None if get_scheduler() else "threads"
    check_workers()
    results: tuple[Any, ...] = dask.compute(*collections, scheduler=scheduler)
    return results


def on_workers(value: Any) -> Any:
    """An argument for many tasks, which each worker gets once and not with each task."""
    client = client_that_computes()
    if client is None:
        return delayed(value, pure=False, traverse=False)
    return client.scatter(value, broadcast=True, hash=False)


def killed_by(error: KilledWorker, what: str) -> DaskImageIngestError:
    """Error that names ``what`` the task has read, and says what to do."""
    count = error.allowed_failures + 1
    workers = "workers that read" if count > 1 else "worker that read"
    return DaskImageIngestError(
        f"{count} {workers} {what} died, the last one at {error.last_worker.address}: memory was "
        "too small, or images crash the decoder, which the second worker notices. Give workers "
        "more memory, and leave Dask's distributed.scheduler.allowed-failures above 0"
    )
