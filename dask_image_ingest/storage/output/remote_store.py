"""Remote output folder of fsspec: complete files are uploaded, and appear at once."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedRandom
from typing import Any

import dask
import pyarrow as pa

from dask_image_ingest.errors import ExportError
from dask_image_ingest.storage.fsspec_compat import FileSystem, file_system
from dask_image_ingest.storage.output.store import (
    EXPORT_ADVICE,
    STAGING,
    Check,
    WriteAdvice,
    translate_write_errors,
)

# Protocols whose uploads appear when they are complete. Elsewhere a file is sent under another name
# and then renamed.
_WHOLE_UPLOADS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "memory"})


@dataclass(frozen=True)
class RemoteStore:
    """A folder on a file system of fsspec."""

    url: str
    storage_options: dict[str, Any] | None = field(default=None, hash=False)
    advice: WriteAdvice = EXPORT_ADVICE

    def locate(self, name: str) -> str:
        return f"{self.url}/{name}"

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file, whole, unless there is one; say whether there was none.

        Where an object store knows the condition «if there is none», it decides.
        """
        if self.read(name) is not None:
            return False
        with translate_write_errors(self.locate(name), self.advice, anything=True):
            self._make_folder(name)
            try:
                self._fs.pipe_file(self._path(name), content, mode="create")
            except Exception:  # a condition that does not hold has many names
                found = self.read(name)
                if found is None:
                    raise
                # Where the answer to the first try was lost, the second finds what that one wrote.
                return found == content
        return True

    def put(self, name: str, content: bytes, check: Check | None = None) -> None:
        with self.scratch() as file:
            file.write(content)
            self.commit(file, name, check)

    @contextmanager
    def scratch(self) -> Iterator[BufferedRandom]:
        """A file on this machine, without a name: it goes with the process."""
        folder = dask.config.get("temporary-directory", None)
        where = f"a temporary file in {folder or tempfile.gettempdir()}"
        with translate_write_errors(where, self.advice), tempfile.TemporaryFile(dir=folder) as file:
            yield file

    def commit(self, file: BufferedRandom, name: str, check: Check | None = None) -> None:
        """Upload what was written to a scratch file; it appears when it is complete."""
        file.flush()
        size = os.fstat(file.fileno()).st_size
        # So that it can be read by name, though it has none.
        source = f"/proc/self/fd/{file.fileno()}"
        with translate_write_errors(self.locate(name), self.advice, anything=True):
            target = self._path(name)
            self._make_folder(name)
            if self._uploads_are_whole:
                if check is not None:
                    check()
                self._fs.put_file(source, target)
            else:
                aside = f"{STAGING}/{uuid.uuid4().hex}.tmp"
                self._make_folder(aside)
                self._fs.put_file(source, self._path(aside))
                if check is not None:
                    check()
                self._fs.mv(self._path(aside), target)
            self._fs.invalidate_cache()
            arrived = self._fs.info(target)["size"]
        if arrived not in (size, None):
            raise ExportError(
                f"{self.locate(name)} has {arrived} bytes after {size} were sent: its server is at "
                f"fault; {self.advice.retry_hint}"
            )

    def fsync(self) -> None:
        """Do nothing: uploads are durable when they return."""

    def read(self, name: str) -> bytes | None:
        with translate_write_errors(self.locate(name), self.advice, anything=True):
            self._fs.invalidate_cache()
            with suppress(FileNotFoundError):
                content: bytes = self._fs.cat_file(self._path(name))
                return content
        return None

    def open(self, name: str) -> pa.NativeFile:
        return pa.PythonFile(self._fs.open(self._path(name), "rb"), mode="r")

    def size(self, name: str) -> int | None:
        with translate_write_errors(self.locate(name), self.advice, anything=True):
            self._fs.invalidate_cache()
            with suppress(FileNotFoundError):
                size: int = self._fs.info(self._path(name))["size"]
                return size
        return None

    def sizes(self, folder: str = "") -> dict[str, int]:
        with translate_write_errors(self.url, self.advice, anything=True):
            self._fs.invalidate_cache()
            try:
                entries = self._fs.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return {}
        return {
            entry["name"].rstrip("/").rpartition("/")[2]: entry["size"]
            for entry in entries
            if entry["type"] == "file"
        }

    def remove(self, names: Iterable[str]) -> None:
        with translate_write_errors(self.url, self.advice, anything=True):
            there = [name for name in names if self._fs.exists(self._path(name))]
            if there:
                self._fs.rm([self._path(name) for name in there])

    def remove_empty_staging(self) -> None:
        if not self._uploads_are_whole:
            with suppress(Exception):  # each file system has its own for a folder that is in use
                self._fs.rmdir(self._path(STAGING))

    def remove_staging(self) -> None:
        with translate_write_errors(self.url, self.advice, anything=True):
            self._fs.invalidate_cache()
            if self._fs.exists(self._path(STAGING)):
                self._fs.rm(self._path(STAGING), recursive=True)

    @property
    def _fs(self) -> FileSystem:
        return file_system(self.url, self.storage_options)[0]

    @property
    def _uploads_are_whole(self) -> bool:
        protocol = self._fs.protocol
        return not _WHOLE_UPLOADS.isdisjoint([protocol] if isinstance(protocol, str) else protocol)

    def _path(self, name: str = "") -> str:
        root = file_system(self.url, self.storage_options)[1].rstrip("/")
        return f"{root}/{name}" if name else root

    def _make_folder(self, name: str) -> None:
        # An object store has no folders, and might make a bucket of one.
        if not self._uploads_are_whole:
            self._fs.makedirs(self._fs._parent(self._path(name)), exist_ok=True)
