"""Log of crashed decoders: partitions to guard, images to leave alone.

On a cluster the scheduler keeps it, for all machines: its plugin tells a task that it was with a
worker when that died, and its metadata name the images. Elsewhere a crash takes all with it, and
only files tell of it to who runs the same again: one for each partition that is being decoded,
locked by its process. A file that is there and not locked was left behind by a process that died.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dask
from distributed import Worker, get_worker
from distributed.utils import sync

from dask_image_ingest.scheduler_plugin import HAS_KILLED

_METADATA = "image-ingest-crashes"

_SECONDS_BETWEEN = 5.0  # from one question of a worker to its scheduler to the next
_TIMEOUT = 60.0

_CRASHED = "crashed-"


@contextmanager
def in_progress(name: str) -> Iterator[bool]:
    """Note that a partition is being decoded, for as long as the context lasts.

    Gives whether an earlier process died with the same partition underway. Where no file can be
    written, or another process is at the same partition, nothing is noted, and work goes on.
    """
    worker = _worker()
    if worker is not None:
        yield _has_killed(worker)
        return
    path = os.path.join(folder(), f"decoding-{name}")
    try:
        file, left_behind = _begin(path)
    except OSError:
        yield False
        return
    try:
        yield left_behind
    finally:
        with suppress(OSError):
            os.unlink(path)
        os.close(file)


def remember(data: bytes, death: str) -> None:
    """Note that decoding this image kills the process, so that nobody tries again."""
    worker, name = _worker(), _crash_name(data)
    if worker is None:
        with suppress(OSError):
            Path(folder(), name).write_text(death, "ascii")
    else:
        keys = [_METADATA, _decoders(), name]
        _ask(worker, worker.scheduler.set_metadata, keys=keys, value=death)
        _known.asked = 0.0


def crashers() -> Crashers:
    """The images that are known to kill a process."""
    worker = _worker()
    return Crashers(_of_folder() if worker is None else _known.of(worker))


class Crashers:
    """Images that kill a process; asking costs nothing while there are none of an image's size.

    Parameters
    ----------
    deaths
        By an image's name, how the process dies.
    """

    def __init__(self, deaths: Mapping[str, str]) -> None:
        self._deaths = deaths
        self._sizes = frozenset(int(name.split("-")[1]) for name in deaths)

    def __bool__(self) -> bool:
        return bool(self._deaths)

    def death(self, data: Any) -> str | None:
        """The known death of a process that decodes this image; None if there is none."""
        if len(data) not in self._sizes:
            return None
        return self._deaths.get(_crash_name(bytes(data)))


def folder() -> str:
    """The folder of the journal, this user's own, one for each set of decoders.

    The configuration value ``image-ingest.crash-journal``, else a folder for temporary files.
    """
    above = dask.config.get("image-ingest.crash-journal", None)
    if above is None:
        above = dask.config.get("temporary-directory", None) or tempfile.gettempdir()
    path = os.path.join(above, f"dask-image-ingest-{os.getuid()}-{_decoders()}")
    with suppress(OSError):
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            return path
    return os.devnull  # in which nothing can be opened


class _Known:
    """The last answer of a worker's scheduler, which is asked every few seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._crashes: Mapping[str, str] = {}
        self.asked = 0.0

    def of(self, worker: Worker) -> Mapping[str, str]:
        """Images that kill, and how."""
        with self._lock:
            if worker is not self._worker or time.monotonic() > self.asked + _SECONDS_BETWEEN:
                self._worker, self.asked = worker, time.monotonic()
                keys = [_METADATA, _decoders()]
                answer = _ask(worker, worker.scheduler.get_metadata, keys=keys, default={})
                self._crashes = answer or {}
            return self._crashes


_known = _Known()


def _worker() -> Worker | None:
    """The worker of a cluster for which this thread runs a task."""
    try:
        return get_worker()
    except ValueError:
        return None


def _has_killed(worker: Worker) -> bool:
    """True if a worker died while it ran the task of this thread."""
    with suppress(ValueError, KeyError, AttributeError):
        task = worker.state.tasks[worker.get_current_task()]
        return bool((task.annotations or {}).get(HAS_KILLED))
    return False


def _ask(worker: Worker, question: Any, **what: Any) -> Any:
    """The answer of a worker's scheduler; None if there is none."""
    with suppress(OSError, TimeoutError, RuntimeError):
        return sync(worker.loop, question, callback_timeout=_TIMEOUT, **what)
    return None


def _of_folder() -> dict[str, str]:
    with suppress(OSError):
        found = Path(folder()).glob(f"{_CRASHED}*")
        return {path.name: path.read_text("ascii", "replace") for path in found}
    return {}


def _begin(path: str) -> tuple[int, bool]:
    """A file of this name, locked, and whether somebody else has begun it and not come to an end.

    Raises
    ------
    OSError
        If somebody is at it now, or no file can be written.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between opening and locking, whoever had it may have come to an end.
            if os.fstat(file).st_nlink:
                left_behind = bool(os.pread(file, 1, 0))
                # Under the lock: a file that somebody has just made is empty.
                os.pwrite(file, b"1", 0)
                return file, left_behind
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _crash_name(data: bytes) -> str:
    return f"{_CRASHED}{len(data)}-{hashlib.blake2b(data, digest_size=16).hexdigest()}"


@functools.cache
def _decoders() -> str:
    """The versions of the decoders: another one may get along with an image."""
    versions = []
    for package in ("pillow", "nvidia-dali-cuda120", "nvidia-dali-cuda130"):
        with suppress(PackageNotFoundError):
            versions.append(f"{package}-{version(package)}")
    return hashlib.blake2b(" ".join(versions).encode(), digest_size=4).hexdigest()
