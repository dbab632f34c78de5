"""Local output folder: files are written to the staging folder, synced, then renamed."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedRandom

import pyarrow as pa

from dask_image_ingest.storage.output.store import (
    EXPORT_ADVICE,
    STAGING,
    Check,
    WriteAdvice,
    translate_write_errors,
)


@dataclass(frozen=True)
class LocalStore:
    """A local output folder."""

    url: str
    advice: WriteAdvice = EXPORT_ADVICE

    def locate(self, name: str) -> str:
        return os.path.join(self.url, name)

    def create(self, name: str, content: bytes) -> bool:
        target = self.locate(name)
        with self.scratch() as file:
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
        with self.scratch() as file:
            file.write(content)
            self.commit(file, name, check)

    @contextmanager
    def scratch(self) -> Iterator[BufferedRandom]:
        """A temporary file in the staging folder, so that a commit is a rename."""
        path = self.locate(f"{STAGING}/{uuid.uuid4().hex}.tmp")
        try:
            # Around the file, since closing it writes, too, and may find the disk full.
            with translate_write_errors(self.url, self.advice), _created(path) as file:
                yield file
        finally:
            with suppress(OSError):  # committed; else the next run removes it
                os.unlink(path)

    def commit(self, file: BufferedRandom, name: str, check: Check | None = None) -> None:
        with translate_write_errors(self.locate(name), self.advice):
            file.flush()
            # A lost completion mark only costs that its shard is checked or written again.
            if not name.startswith(f"{STAGING}/done-"):
                os.fsync(file.fileno())
            if check is not None:
                check()
            os.replace(file.name, self.locate(name))

    def fsync(self) -> None:
        # A new name is durable once its folder is synced.
        with translate_write_errors(self.url, self.advice):
            folder = os.open(self.url, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def read(self, name: str) -> bytes | None:
        try:
            with open(self.locate(name), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def open(self, name: str) -> pa.NativeFile:
        # Not a memory map: access to one of a truncated file kills the process.
        return pa.OSFile(self.locate(name))

    def size(self, name: str) -> int | None:
        try:
            return os.stat(self.locate(name)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def sizes(self, folder: str = "") -> dict[str, int]:
        try:
            with os.scandir(self.locate(folder)) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with (
                translate_write_errors(self.locate(name), self.advice),
                suppress(FileNotFoundError),
            ):
                os.unlink(self.locate(name))

    def remove_empty_staging(self) -> None:
        with suppress(OSError):
            os.rmdir(self.locate(STAGING))

    def remove_staging(self) -> None:
        with translate_write_errors(self.url, self.advice), suppress(FileNotFoundError):
            shutil.rmtree(self.locate(STAGING))


def _created(path: str) -> BufferedRandom:
    """Create a file and its folder, which other processes may remove whenever it is empty."""
    for _ in range(100):
        # The folder was removed before the file was in it, or while makedirs ran.
        with suppress(FileNotFoundError, FileExistsError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return open(path, "x+b")
    return open(path, "x+b")
