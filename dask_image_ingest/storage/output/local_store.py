"""Local output folder: files are written to the staging folder, synced, then renamed.

No symbolic link is followed that somebody put at a name which is written: a rename replaces it, and
a staging folder that is a link is replaced, too.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedRandom

import pyarrow as pa

from dask_image_ingest.errors import ExportError
from dask_image_ingest.storage.output.store import (
    EXPORT_ADVICE,
    STAGING,
    Check,
    WriteAdvice,
    translate_write_errors,
)

# Suffix of files that are being written; locked as long as they are.
_TEMPORARY = ".tmp"


@dataclass(frozen=True)
class LocalStore:
    """A local output folder."""

    url: str
    advice: WriteAdvice = EXPORT_ADVICE

    def locate(self, name: str) -> str:
        return os.path.join(self.url, name)

    def _path(self, name: str) -> str:
        """The path of a file, in a staging folder that is no link."""
        if name.startswith(STAGING):
            with suppress(FileNotFoundError):
                if os.path.islink(self.locate(STAGING)):
                    os.unlink(self.locate(STAGING))
        return self.locate(name)

    def create(self, name: str, content: bytes) -> bool:
        target = self._path(name)
        with self.scratch(name) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            try:
                os.link(file.name, target)
            except FileExistsError:
                return False
            except OSError:  # a file system without hard links
                if os.path.lexists(target):
                    return False
                os.replace(file.name, target)
        self.fsync()
        return True

    def put(self, name: str, content: bytes, check: Check | None = None) -> None:
        with self.scratch(name) as file:
            file.write(content)
            self.commit(file, name, check)

    @property
    def can_append(self) -> bool:
        return True

    def append(self, name: str, content: bytes) -> None:
        path = self._path(name)
        with translate_write_errors(path, self.advice):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "ab", opener=_open_no_link) as file:
                file.write(content)

    @contextmanager
    def scratch(self, name: str = "") -> Iterator[BufferedRandom]:
        """A temporary file in the staging folder, so that a commit is a rename."""
        where = self.locate(name) if name else self.url
        # Around the file, since closing it writes, too, and may find the disk full.
        with translate_write_errors(where, self.advice), _created(self._path(STAGING)) as file:
            try:
                yield file
            finally:
                with suppress(OSError):  # committed; else the next run removes it
                    os.unlink(file.name)

    def commit(self, file: BufferedRandom, name: str, check: Check | None = None) -> None:
        with translate_write_errors(self.locate(name), self.advice):
            file.flush()
            # A lost completion mark only costs that its shard is checked or written again.
            if not name.startswith(f"{STAGING}/done-"):
                os.fsync(file.fileno())
            if check is not None:
                check()
            os.replace(file.name, self._path(name))

    def move(self, name: str, to: str) -> None:
        with translate_write_errors(self.locate(to), self.advice):
            os.replace(self._path(name), self._path(to))

    def fsync(self) -> None:
        # A new name is durable once its folder is synced.
        for path in (self._path(STAGING), self.url):
            with translate_write_errors(self.url, self.advice), suppress(FileNotFoundError):
                folder = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Translate errors of a read, but for that of a missing file."""
        where = self.locate(name) if name else self.url
        try:
            with translate_write_errors(where, self.advice, done="read"):
                yield
        except ExportError as error:
            if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
                raise error.__cause__ from None
            raise

    def read(self, name: str) -> bytes | None:
        try:
            with self._reading(name), open(self._path(name), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def open(self, name: str) -> pa.NativeFile:
        # Not a memory map: access to one of a truncated file kills the process.
        with self._reading(name):
            return pa.OSFile(self._path(name))

    def size(self, name: str) -> int | None:
        try:
            with self._reading(name):
                return os.stat(self._path(name)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def sizes(self, folder: str = "") -> dict[str, int]:
        try:
            with self._reading(folder), os.scandir(self._path(folder)) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def names(self) -> list[str]:
        found = []
        with self._reading(""):
            for top, folders, files in os.walk(self.url, onerror=_refuse_unlisted):
                links = [name for name in folders if os.path.islink(os.path.join(top, name))]
                paths = (os.path.join(top, name) for name in files + links)
                found += [os.path.relpath(path, self.url) for path in paths]
        return [name for name in found if not name.startswith(f"{STAGING}/")]

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with (
                translate_write_errors(self.locate(name), self.advice),
                suppress(FileNotFoundError),
            ):
                os.unlink(self._path(name))

    def remove_empty_staging(self) -> None:
        names: Iterable[str] = ()
        with suppress(OSError):  # the next call removes them
            names = self.sizes(STAGING)
        for name in names:
            if name.endswith(_TEMPORARY):
                with suppress(OSError), open(self._path(f"{STAGING}/{name}"), "rb") as file:
                    # Its writer holds a lock; a killed one has lost it.
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(file.name)
        with suppress(OSError):
            os.rmdir(self.locate(STAGING))

    def remove_staging(self) -> None:
        with translate_write_errors(self.url, self.advice), suppress(FileNotFoundError):
            shutil.rmtree(self._path(STAGING))


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _refuse_unlisted(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # else nothing is there to be named
        raise error


def _created(folder: str) -> BufferedRandom:
    """Create a file in a folder that other processes may remove whenever it is empty."""
    for _ in range(100):
        # The folder was removed before the file was in it, or while makedirs ran.
        with suppress(FileNotFoundError, FileExistsError):
            file = _create_locked(folder)
            if os.path.exists(file.name):
                return file
            file.close()  # it was taken for a file of a dead writer before it was locked
    return _create_locked(folder)


def _create_locked(folder: str) -> BufferedRandom:
    os.makedirs(folder, exist_ok=True)
    # A name of its own each time: a remover that opened a file before goes by the name.
    path = os.path.join(folder, f"{uuid.uuid4().hex}{_TEMPORARY}")
    file = open(path, "x+b")  # noqa: SIM115 - fails if there is a link
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH)
    return file
