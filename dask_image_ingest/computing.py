"""Compute with the current scheduler; show the progress of listing, computing and writing.

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
from dask.bag import from_sequence
from dask.base import get_scheduler
from dask.callbacks import Callback
from distributed import Scheduler
from distributed.metrics import context_meter
from distributed.scheduler import KilledWorker

from dask_image_ingest.client import check_workers, client_that_computes
from dask_image_ingest.environment import own_version, refuse_other_version
from dask_image_ingest.errors import DaskImageIngestError

# Seconds before the first line; between updates; between lines in a file, which can't be updated.
_PATIENCE, _EVERY, _IN_FILE = 1.0, 0.5, 30.0

# Seconds to wait for the last metrics: workers send them with heartbeats, 0.5 s apart in a small
# cluster.
_HEARTBEAT = 0.6

_WIDTH = 10  # characters of the bar

#: Names of the metrics.
DECODED, BAD, ANSWERED, WRITTEN, SEARCHED = _METRICS = (
    "images decoded",
    "images not decoded",
    "rows answered",
    "samples written",
    "hashes searched",
)
LISTED = "files listed"

_lock = threading.Lock()
_counts: Counter[str] = Counter()  # of this process, inside `progress`

# The line of `progress`, and inside it that of a listing; only the last one is written.
_lines: list[_Line] = []


def count(metric: str, number: int = 1) -> None:
    """Add to a metric of this process, and of the cluster if this is one of its tasks."""
    if _lines:
        with _lock:
            _counts[metric] += number
    if number and metric in _METRICS:
        context_meter.digest_metric(metric, number, "count")


@contextlib.contextmanager
def progress(file: TextIO | None = None) -> Iterator[None]:
    """Show the progress of everything that is listed, computed and written inside.

    A line shows the tasks and images done, images per second, images that could not be decoded,
    rows for which the function of ``map_rows`` has answered, samples that an export has written,
    and an estimate of the time left::

        48/120 tasks in 61 s, 12,288 images (201/s), 3 bad, about 92 s left

    Nothing is shown for computations of less than a second.

    Parameters
    ----------
    file
        Where to write, by default standard error. A terminal or notebook gets a moving bar, and a
        line of each slow listing of shards; other files a line every 30 seconds, and one at the
        end.

    Notes
    -----
    On a cluster, tasks and images of its other users are counted too, and images and rows come when
    their task is done. With ``scheduler="processes"`` images are not counted.

    Examples
    --------
    >>> with progress():
    ...     frame = ddf.compute()
    """
    if _lines:  # nested
        yield
        return
    with _Work() as work, _Line(sys.stderr if file is None else file, work.text):
        try:
            yield
        finally:
            if work.client is not None and work.text():
                time.sleep(_HEARTBEAT)


@contextlib.contextmanager
def listing(what: str) -> Iterator[None]:
    """Show that ``what`` is being listed, on a terminal inside `progress`; counts are `LISTED`."""
    if len(_lines) != 1 or not _lines[0].moves:
        yield
        return
    before, started = _counts[LISTED], time.monotonic()

    def text() -> str:
        seconds = time.monotonic() - started
        files = _counts[LISTED] - before
        return f"listing {what}: {files:,} files in {seconds:.1f} s" * (seconds >= _PATIENCE)

    with _Line(_lines[0].out, text):
        yield


class _Line:
    """Thread that rewrites the line of ``text`` until the context ends."""

    def __init__(self, out: TextIO, text: Callable[[], str]) -> None:
        self.out = out
        self.moves = out.isatty() or type(out).__module__.startswith("ipykernel")
        self._text = text
        self._written = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="image-ingest-progress", daemon=True)

    def __enter__(self) -> None:
        _lines.append(self)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        _lines.remove(self)
        self._write(end="\n")

    def _run(self) -> None:
        while not self._ended.wait(_EVERY):
            due = self.moves or time.monotonic() - self._written >= _IN_FILE
            if due and _lines[-1] is self:
                self._write(end="" if self.moves else "\n")

    def _write(self, end: str) -> None:
        text = self._text()
        if not text:
            return
        self._written = time.monotonic()
        if self.moves:
            width = max(_WIDTH, shutil.get_terminal_size().columns - 1)
            text = f"\r{text[:width].ljust(width)}"
        self.out.write(text + end)
        self.out.flush()


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
        done, decoded, bad, answered, written, searched = (
            self._now[name] - self._before[name] for name in ("done", *_METRICS)
        )
        tasks = done + self._now["left"]
        if not tasks:
            self._began = time.monotonic()
        seconds = time.monotonic() - self._began
        if seconds < _PATIENCE:
            return ""
        full = _WIDTH * done // tasks
        bar = f"[{'#' * full}{'-' * (_WIDTH - full)}]"
        parts = [f"{bar} {done:,}/{tasks:,} tasks in {seconds:.0f} s"]
        if decoded:
            parts.append(f"{decoded:,} images ({decoded / seconds:,.0f}/s)")
        if bad:
            parts.append(f"{bad:,} bad")
        if answered:
            parts.append(f"{answered:,} rows answered ({answered / seconds:,.0f}/s)")
        if written:
            parts.append(f"{written:,} written ({written / seconds:,.0f}/s)")
        if searched:
            parts.append(f"{searched:,} hashes searched ({searched / seconds:,.0f}/s)")
        if 0 < done < tasks:
            parts.append(f"about {seconds * (tasks - done) / done:.0f} s left")
        return ", ".join(parts)

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

    def _start_state(self, dsk: Any, state: Any) -> None:
        self._states[id(state)] = state

    def _posttask(self, key: Any, result: Any, dsk: Any, state: Any, worker: Any) -> None:
        self._done += 1

    def _finish(self, dsk: Any, state: Any, errored: bool) -> None:
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


def killed_by(error: KilledWorker, what: str) -> DaskImageIngestError:
    """Error that names ``what`` the task has read, and says what to do."""
    count = error.allowed_failures + 1
    workers = "workers that read" if count > 1 else "worker that read"
    return DaskImageIngestError(
        f"{count} {workers} {what} died, the last one at {error.last_worker.address}: memory was "
        "too small, or images crash the decoder, which the second worker notices. Give workers "
        "more memory, and leave Dask's distributed.scheduler.allowed-failures above 0"
    )
