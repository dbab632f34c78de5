"""Log of crashed decoders: partitions to guard, images to leave alone.

A crash takes the process with it, so that only files can tell of it: one for each partition that is
being decoded, locked by its process. A file that is there and not locked was left behind by a
process that died. All worker processes of a machine share the folder, since the scheduler may give
the partition to any of them next. The scheduler of a cluster remembers for all its machines, which
need not share a folder.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dask

from dask_image_ingest.decode.crash_guard.scheduler_log import (
    known_crashes,
    task_has_killed,
    tell_of_crash,
)

_CRASHED = "crashed-"


@contextmanager
def in_progress(name: str) -> Iterator[bool]:
    """Note that a partition is being decoded, for as long as the context lasts.

    Gives whether an earlier process died with the same partition underway, by a file here or by
    what the scheduler says. Where no file can be written, or another process is at the same
    partition, nothing is noted, and work goes on.
    """
    has_killed = task_has_killed()
    path = os.path.join(folder(), f"decoding-{name}")
    try:
        file, left_behind = _begin(path)
    except OSError:
        yield has_killed
        return
    try:
        yield left_behind or has_killed
    finally:
        with suppress(OSError):
            os.unlink(path)
        os.close(file)


def remember(data: bytes, death: str) -> None:
    """Note that decoding this image kills the process, so that nobody tries again."""
    name = _crash_name(data)
    with suppress(OSError):
        Path(folder(), name).write_text(death, "ascii")
    tell_of_crash(_decoders(), name, death)


def crashers() -> Crashers:
    """The images that are known to kill a process."""
    try:
        names = [name for name in os.listdir(folder()) if name.startswith(_CRASHED)]
    except OSError:
        names = []
    return Crashers(dict.fromkeys(names) | {**known_crashes(_decoders())})


class Crashers:
    """Images that kill a process; asking costs nothing while there are none of an image's size.

    Parameters
    ----------
    deaths
        By an image's name, how the process dies; None where a file says it.
    """

    def __init__(self, deaths: Mapping[str, str | None]) -> None:
        self._deaths = deaths
        self._sizes = frozenset(int(name.split("-")[1]) for name in deaths)

    def __bool__(self) -> bool:
        return bool(self._deaths)

    def death(self, data: Any) -> str | None:
        """The known death of a process that decodes this image; None if there is none."""
        if len(data) not in self._sizes:
            return None
        name = _crash_name(bytes(data))
        if name not in self._deaths:
            return None
        if (death := self._deaths[name]) is not None:
            return death
        try:
            return Path(folder(), name).read_text("ascii", "replace")
        except OSError:
            return None


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
