"""``progress``: a line with tasks and images done, bad images, and time left.

Each process counts the images that it decodes. A worker reports them to its scheduler as fine
performance metrics of Dask, so they are on the dashboard too.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, TextIO

from dask.callbacks import Callback
from distributed import Client, Scheduler
from distributed.metrics import context_meter

from dask_image_ingest.environment import Portable
from dask_image_ingest.listing_progress import showing_listings
from dask_image_ingest.scheduler_plugin import client_that_computes

# Seconds before the first line; between updates; between lines in a file, which can't be updated.
_PATIENCE, _EVERY, _IN_FILE = 1.0, 0.5, 30.0

# Seconds to wait for the last metrics: workers send them with heartbeats, 0.5 s apart in a small
# cluster.
_HEARTBEAT = 0.6

_WIDTH = 10  # characters of the bar

# Names of the metrics.
_DECODED, _BAD = "images decoded", "images not decoded"

_lock = threading.Lock()
_images = {_DECODED: 0, _BAD: 0}  # counts of this process
_shown = threading.Lock()  # held by the outermost `progress`


def count_images(decoded: int, bad: int) -> None:
    """Add to the counts of decoded images, and of images that could not be decoded."""
    with _lock:
        _images[_DECODED] += decoded
        _images[_BAD] += bad
    for name, count in ((_DECODED, decoded), (_BAD, bad)):
        if count:
            context_meter.digest_metric(name, count, "count")


@contextlib.contextmanager
def progress(file: TextIO | None = None) -> Iterator[None]:
    """Show the progress of everything that is computed inside.

    A line shows the tasks and images done, images per second, images that could not be decoded, and
    an estimate of the time left::

        48/120 tasks in 61 s, 12,288 images (201/s), 3 bad, about 92 s left

    Nothing is shown for computations of less than a second.

    Parameters
    ----------
    file
        Where to write, by default standard error. A terminal or notebook gets a moving bar; other
        files a line every 30 seconds, and one at the end.

    Notes
    -----
    On a cluster, tasks and images of its other users are counted too. Image counts come with the
    workers' heartbeats, up to a few seconds late. With ``scheduler="processes"`` images are not
    counted.

    Examples
    --------
    >>> with progress():
    ...     frame = ddf.compute()
    """
    out = sys.stderr if file is None else file
    if not _shown.acquire(blocking=False):  # nested
        yield
        return
    try:
        moving = out.isatty() or type(out).__module__.startswith("ipykernel")
        with showing_listings(out if moving else None), _LocalTasks() as local:
            writer = _Writer(out, moving, local)
            try:
                yield
            finally:
                writer.end()
    finally:
        _shown.release()


class _Counts(NamedTuple):
    """Tasks done, all tasks, images decoded, images not decoded."""

    done: int
    tasks: int
    decoded: int
    bad: int


class _LocalTasks(Callback):
    """Counter of the tasks of Dask's local schedulers."""

    def __init__(self) -> None:
        self._ended = 0  # tasks of computations that have ended
        self._states: dict[int, Any] = {}  # of running computations

    def _start_state(self, dsk: Any, state: Any) -> None:
        self._states[id(state)] = state

    def _finish(self, dsk: Any, state: Any, errored: bool) -> None:
        self._states.pop(id(state), None)
        self._ended += len(state["finished"])

    def tasks(self) -> tuple[int, int]:
        """Number of tasks that are done, and left."""
        states = list(self._states.values())
        done = sum(len(state["finished"]) for state in states)
        left = sum(len(state[name]) for name in ("ready", "waiting", "running") for state in states)
        return self._ended + done, left


class _ClusterCounter:
    """Counter of the tasks and images of a cluster since its creation."""

    def __init__(self, client: Client) -> None:
        self._client = client
        # Tasks done, and all tasks, by group.
        self._groups, self._images = self._fetch()
        self._done_before = {name: done for name, (done, _) in self._groups.items()}
        self._images_before = self._images
        # Tasks of groups that ended and were started again, by another query.
        self._ended = 0

    def counts(self) -> _Counts:
        """Current counts; the last ones if the scheduler can't be reached."""
        with contextlib.suppress(Exception):
            groups, self._images = self._fetch()
            for name, (done, tasks) in self._groups.items():
                # Keep a group that has disappeared as done; one with fewer done is a new run.
                if groups.setdefault(name, (tasks, tasks))[0] < done == tasks:
                    self._ended += tasks
            self._groups = groups
        before = sum(self._done_before.values())
        done = self._ended + sum(done for done, _ in self._groups.values()) - before
        tasks = self._ended + sum(tasks for _, tasks in self._groups.values()) - before
        decoded, bad = (self._images[name] - self._images_before[name] for name in _images)
        return _Counts(done, tasks, decoded, bad)

    def _fetch(self) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
        state: tuple[dict[str, tuple[int, int]], dict[str, int]]
        state = self._client.run_on_scheduler(Portable(_scheduler_state), [*_images])
        return state


def _scheduler_state(
    metrics: list[str], dask_scheduler: Scheduler
) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Tasks done and all tasks, by group; counts of images, by metric."""
    groups = {}
    pending = ("waiting", "queued", "no-worker", "processing")
    for name, group in dask_scheduler.task_groups.items():
        left = sum(group.states[state] for state in pending)
        tasks = sum(group.states.values())
        groups[name] = (tasks - left, tasks)
    images = dict.fromkeys(metrics, 0)
    for key, count in dask_scheduler.cumulative_worker_metrics.items():
        name = key[-2] if isinstance(key, tuple) else None
        if name in images:
            images[name] += int(count)
    return groups, images


class _Writer:
    """Thread that writes the line repeatedly."""

    def __init__(self, out: TextIO, moving: bool, local: _LocalTasks) -> None:
        self._out, self._moving, self._local = out, moving, local
        client = client_that_computes()
        self._cluster = None
        if client is not None:
            with contextlib.suppress(ValueError):  # it may be configured to run no functions
                self._cluster = _ClusterCounter(client)
        self._images_before = dict(_images)
        self._started = self._written = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="image-ingest-progress", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Write the last line."""
        self._ended.set()
        self._thread.join()
        if time.monotonic() - self._started < _PATIENCE:
            return
        if self._cluster is not None:
            time.sleep(_HEARTBEAT)
        self._write(self._counts())
        if self._moving:
            self._out.write("\n")
            self._out.flush()

    def _run(self) -> None:
        if self._ended.wait(_PATIENCE):
            return
        while not self._ended.wait(_EVERY):
            counts = self._counts()
            if self._moving or time.monotonic() - self._written >= _IN_FILE:
                self._write(counts)

    def _write(self, counts: _Counts) -> None:
        self._written = time.monotonic()
        if not counts.tasks:
            return
        line = _line(counts, time.monotonic() - self._started)
        if self._moving:
            line = f"{_bar(counts)} {line}"
            width = max(_WIDTH, shutil.get_terminal_size().columns - 1)
            self._out.write(f"\r{line[:width].ljust(width)}")
        else:
            self._out.write(f"{line}\n")
        self._out.flush()

    def _counts(self) -> _Counts:
        if self._cluster is not None:
            return self._cluster.counts()
        done, left = self._local.tasks()
        decoded, bad = (_images[name] - self._images_before[name] for name in _images)
        return _Counts(done, done + left, decoded, bad)


def _line(counts: _Counts, seconds: float) -> str:
    parts = [f"{counts.done:,}/{counts.tasks:,} tasks in {seconds:.0f} s"]
    if counts.decoded:
        parts.append(f"{counts.decoded:,} images ({counts.decoded / seconds:,.0f}/s)")
    if counts.bad:
        parts.append(f"{counts.bad:,} bad")
    if counts.done < counts.tasks and counts.done:
        left = seconds * (counts.tasks - counts.done) / counts.done
        parts.append(f"about {left:.0f} s left")
    return ", ".join(parts)


def _bar(counts: _Counts) -> str:
    full = _WIDTH * counts.done // counts.tasks
    return f"[{'#' * full}{'-' * (_WIDTH - full)}]"
