"""``progress``: tasks and images that are done, bad images and time left, while anything computes.

Each process counts the images that it decodes. A worker tells them to its scheduler as one of
Dask's fine performance metrics, so that its dashboard has them too.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, TextIO

from dask.base import get_scheduler
from dask.callbacks import Callback
from distributed import Client, Scheduler
from distributed.metrics import context_meter

from dask_image_ingest.environment import Portable
from dask_image_ingest.listing_progress import showing_listings

# What takes less long shows nothing; then all is counted twice a second, and a terminal sees it. A
# file, where each time is another line, has one twice a minute.
_PATIENCE, _EVERY, _IN_FILE = 1.0, 0.5, 30.0

# Workers tell their metrics with each heartbeat, twice a second where they are few.
_HEARTBEAT = 0.6

_WIDTH = 10

_DECODED, _BAD = "images decoded", "images not decoded"

_lock = threading.Lock()
_images = {_DECODED: 0, _BAD: 0}
_shown = threading.Lock()


def count_images(decoded: int, bad: int) -> None:
    """Count images that were decoded here, and those that could not be."""
    with _lock:
        _images[_DECODED] += decoded
        _images[_BAD] += bad
    for name, count in ((_DECODED, decoded), (_BAD, bad)):
        if count:
            context_meter.digest_metric(name, count, "count")


@contextlib.contextmanager
def progress(file: TextIO | None = None) -> Iterator[None]:
    """Show what is done, and how long the rest takes, of all that is computed inside.

    A line says how many tasks and images are done, images per second, how many images could not be
    decoded, and an estimate of the time left. What takes less than a second shows nothing. A line::

        48/120 tasks in 61 s, 12,288 images (201/s), 3 bad, about 92 s left

    Parameters
    ----------
    file
        Where to write, by default standard error. A terminal or a notebook has a bar that moves;
        anything else a line every 30 seconds, and one at the end.

    Notes
    -----
    On a cluster the tasks and images of others who use it meanwhile are counted too, and images
    come with the heartbeats of the workers, up to some seconds late. Processes of
    ``scheduler="processes"`` tell no images.

    Examples
    --------
    >>> with progress():
    ...     frame = ddf.compute()
    """
    out = sys.stderr if file is None else file
    if not _shown.acquire(blocking=False):  # by one around this one
        yield
        return
    try:
        moving = out.isatty() or type(out).__module__.startswith("ipykernel")
        with showing_listings(out if moving else None), _Local() as local:
            teller = _Teller(out, moving, local)
            try:
                yield
            finally:
                teller.end()
    finally:
        _shown.release()


class _Counts(NamedTuple):
    done: int
    tasks: int
    decoded: int
    bad: int


class _Local(Callback):
    """Counts the tasks of schedulers in this process."""

    def __init__(self) -> None:
        self._ended = 0
        self._states: dict[int, Any] = {}

    def _start_state(self, dsk: Any, state: Any) -> None:
        self._states[id(state)] = state

    def _finish(self, dsk: Any, state: Any, errored: bool) -> None:
        self._states.pop(id(state), None)
        self._ended += len(state["finished"])

    def tasks(self) -> tuple[int, int]:
        """Tasks that are done, and those that are left."""
        states = list(self._states.values())
        done = sum(len(state["finished"]) for state in states)
        left = sum(len(state[name]) for name in ("ready", "waiting", "running") for state in states)
        return self._ended + done, left


class _Cluster:
    """Counts the tasks and images of a cluster, from now on."""

    def __init__(self, client: Client) -> None:
        self._client = client
        # Of each group of tasks, those that are done and all.
        self._groups, self._images = self._ask()
        self._done_before = {name: done for name, (done, _) in self._groups.items()}
        self._images_before = self._images
        self._ended = 0

    def counts(self) -> _Counts:
        """Ask the scheduler; where that can't be, as after its end, nothing has changed."""
        with contextlib.suppress(Exception):
            groups, self._images = self._ask()
            for name, (done, tasks) in self._groups.items():
                if groups.setdefault(name, (tasks, tasks))[0] < done == tasks:
                    self._ended += tasks  # and the group has come back, in another query
            self._groups = groups
        before = sum(self._done_before.values())
        done = self._ended + sum(done for done, _ in self._groups.values()) - before
        tasks = self._ended + sum(tasks for _, tasks in self._groups.values()) - before
        decoded, bad = (self._images[name] - self._images_before[name] for name in _images)
        return _Counts(done, tasks, decoded, bad)

    def _ask(self) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
        answer: tuple[dict[str, tuple[int, int]], dict[str, int]]
        answer = self._client.run_on_scheduler(Portable(_state_of_scheduler), [*_images])
        return answer


def _state_of_scheduler(
    kinds: list[str], dask_scheduler: Scheduler
) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Tasks done, and all, of each group; images by what became of them."""
    groups = {}
    for name, group in dask_scheduler.task_groups.items():
        left = sum(group.states[each] for each in ("waiting", "queued", "no-worker", "processing"))
        tasks = sum(group.states.values())
        groups[name] = (tasks - left, tasks)
    images = dict.fromkeys(kinds, 0)
    for key, count in dask_scheduler.cumulative_worker_metrics.items():
        name = key[-2] if isinstance(key, tuple) else None
        if name in images:
            images[name] += int(count)
    return groups, images


class _Teller:
    """Writes the line, again and again, in a thread of its own."""

    def __init__(self, out: TextIO, moving: bool, local: _Local) -> None:
        self._out, self._moving, self._local = out, moving, local
        client = getattr(get_scheduler(), "__self__", None)
        self._cluster = None
        if isinstance(client, Client) and not client.asynchronous:
            with contextlib.suppress(ValueError):  # it may be configured to run no functions
                self._cluster = _Cluster(client)
        self._images_before = dict(_images)
        self._began = self._written = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._tell, name="image-ingest-progress", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Write the last line."""
        self._ended.set()
        self._thread.join()
        if time.monotonic() - self._began < _PATIENCE:
            return
        if self._cluster is not None:
            time.sleep(_HEARTBEAT)
        self._write(self._counts())
        if self._moving:
            self._out.write("\n")
            self._out.flush()

    def _tell(self) -> None:
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
        line = _line(counts, time.monotonic() - self._began)
        if self._moving:
            line = f"{_bar(counts)} {line}"
            room = max(_WIDTH, shutil.get_terminal_size().columns - 1)
            self._out.write(f"\r{line[:room].ljust(room)}")
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
