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
    """A folder that is written to through the operating system."""

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
            except OSError:  # a file system without links
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
        """A file beside those that there will be, so that it can be renamed to one of them."""
        path = self.locate(f"{STAGING}/{uuid.uuid4().hex}.tmp")
        try:
            # Closing writes too: what the disk has no room for is told there.
            with translate_write_errors(self.url, self.advice), _created(path) as file:
                yield file
        finally:
            with suppress(OSError):  # gone, or left for the next run to remove
                os.unlink(path)

    def commit(self, file: BufferedRandom, name: str, check: Check | None = None) -> None:
        with translate_write_errors(self.locate(name), self.advice):
            file.flush()
            if not name.startswith(f"{STAGING}/done-"):  # what these say may be lost
                os.fsync(file.fileno())
            if check is not None:
                check()
            os.replace(file.name, self.locate(name))

    def fsync(self) -> None:
        # A new name is on the disk only when its folder is.
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
        # Not mapped: to look at what was cut off meanwhile would end the process.
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
    """A new file in a folder that others may remove at any moment, as long as it is empty."""
    for _ in range(100):
        # Gone before the file is in it, or between the two looks of makedirs.
        with suppress(FileNotFoundError, FileExistsError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return open(path, "x+b")
    return open(path, "x+b")
