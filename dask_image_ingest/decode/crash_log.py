"""Log of crashes: partitions to decode under guard, and images not to decode.

On a cluster the scheduler keeps it, for all machines: its plugin annotates tasks that were on a
worker when it died, and its metadata list the images. Without a cluster a crash ends the whole
process, so the log is in files, for the next run: one for each partition that is being decoded,
locked by its process, and one for each image. A partition's file without a lock is a crash.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dask
from distributed import Worker, get_worker
from distributed.utils import sync

from dask_image_ingest.client import HAS_KILLED
from dask_image_ingest.storage import LazyBytes

_METADATA = "image-ingest-crashes"

_REFRESH_SECONDS = 5.0  # age at which a worker fetches the log from its scheduler again
_TIMEOUT = 60.0  # seconds for a request to the scheduler

_CRASHED = "crashed-"

_DECODERS = ("pillow", "imagecodecs", "tifffile", "nvidia-dali-cuda120", "nvidia-dali-cuda130")


@contextmanager
def in_progress(name: str) -> Iterator[bool]:
    """Log a partition as in progress while the context is active.

    Yields whether an earlier process crashed during the same partition. If no file can be written,
    or another process has the same partition in progress, nothing is logged and the result is
    False.
    """
    worker = _worker()
    if worker is not None:
        yield _has_killed(worker)
        return
    path = os.path.join(folder(), f"decoding-{name}")
    try:
        file, crashed_before = _open_locked(path)
    except OSError:
        yield False
        return
    try:
        yield crashed_before
    finally:
        with suppress(OSError):
            os.unlink(path)
        os.close(file)


def remember(data: bytes, death: str) -> None:
    """Log an image as one that kills its decoder; ``death`` says how, such as "SIGSEGV"."""
    worker, name = _worker(), _crash_name(data)
    if worker is None:
        with suppress(OSError):
            Path(folder(), name).write_text(death, "ascii")
    else:
        keys = [_METADATA, _decoders(), name]
        _call_scheduler(worker, worker.scheduler.set_metadata, keys=keys, value=death)
        _read_scheduler.cache_clear()


def crashers() -> Crashers:
    """Images that are known to kill their decoder."""
    worker = _worker()
    if worker is None:
        return Crashers(_read_folder())
    return Crashers(_read_scheduler(worker, time.monotonic() // _REFRESH_SECONDS))


class Crashers:
    """Images that kill their decoder. Images are hashed only if one of the same size is known.

    Parameters
    ----------
    deaths
        How the process dies, by the image's `_crash_name`.
    """

    def __init__(self, deaths: Mapping[str, str]) -> None:
        self._deaths = deaths
        self._sizes = frozenset(int(name.split("-")[1]) for name in deaths)

    def __bool__(self) -> bool:
        return bool(self._deaths)

    def death(self, data: LazyBytes) -> str | None:
        """Signal or exit status of the decoder that this image kills; None if not known."""
        if len(data) not in self._sizes:
            return None
        return self._deaths.get(_crash_name(bytes(data[:])))


def folder() -> str:
    """Folder of the log: private to the user, one for each set of decoder versions.

    It is in the configuration value ``image-ingest.crash-journal``, or else in the folder for
    temporary files.
    """
    parent = dask.config.get("image-ingest.crash-journal", None)
    if parent is None:
        parent = dask.config.get("temporary-directory", None) or tempfile.gettempdir()
    path = os.path.join(parent, f"dask-image-ingest-{os.getuid()}-{_decoders()}")
    with suppress(OSError):
        os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.lstat(path)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            return path
    return os.devnull  # no file can be opened in it


@functools.lru_cache(maxsize=1)
def _read_scheduler(worker: Worker, interval: float) -> Mapping[str, str]:
    """The log that a worker's scheduler keeps, fetched once in each ``interval``."""
    keys = [_METADATA, _decoders()]
    return _call_scheduler(worker, worker.scheduler.get_metadata, keys=keys, default={}) or {}


def _worker() -> Worker | None:
    """The worker whose task this thread runs; None outside a cluster."""
    try:
        return get_worker()
    except ValueError:
        return None


def _has_killed(worker: Worker) -> bool:
    """True if a worker died while it ran this thread's task."""
    with suppress(ValueError, KeyError, AttributeError):
        task = worker.state.tasks[worker.get_current_task()]
        return bool((task.annotations or {}).get(HAS_KILLED))
    return False


def _call_scheduler(worker: Worker, function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function of the worker's scheduler; None if it can't be reached."""
    with suppress(OSError, TimeoutError, RuntimeError):
        return sync(worker.loop, function, callback_timeout=_TIMEOUT, **arguments)
    return None


def _read_folder() -> dict[str, str]:
    with suppress(OSError):
        paths = Path(folder()).glob(f"{_CRASHED}*")
        return {path.name: path.read_text("ascii", "replace") for path in paths}
    return {}


def _open_locked(path: str) -> tuple[int, bool]:
    """Create or open a file and lock it: its descriptor, and whether a crash left it behind.

    Raises
    ------
    OSError
        If another process has it locked, or no file can be written.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # If its owner finished and deleted it before the lock, try again.
            if os.fstat(file).st_nlink:
                # A file that was just created is empty; its owner writes to it under the lock.
                crashed_before = bool(os.pread(file, 1, 0))
                os.pwrite(file, b"1", 0)
                return file, crashed_before
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _crash_name(data: bytes) -> str:
    return f"{_CRASHED}{len(data)}-{hashlib.blake2b(data, digest_size=16).hexdigest()}"


@functools.cache
def _decoders() -> str:
    """Digest of the decoders' versions: another version may decode an image without a crash."""
    versions = []
    for package in _DECODERS:
        with suppress(PackageNotFoundError):
            versions.append(f"{package}-{version(package)}")
    return hashlib.blake2b(" ".join(versions).encode(), digest_size=4).hexdigest()
