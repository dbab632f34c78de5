"""Remote output folder, by fsspec: complete files are uploaded, and appear at once."""

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
from dask_image_ingest.storage.fsspec_compat import entries_in, file_system, find_below
from dask_image_ingest.storage.output.store import (
    EXPORT_ADVICE,
    STAGING,
    Check,
    WriteAdvice,
    translate_write_errors,
)
from dask_image_ingest.storage.shard import OBJECT_STORES, FileSystem


@dataclass(frozen=True)
class RemoteStore:
    """An output folder on an fsspec file system."""

    url: str
    storage_options: dict[str, Any] | None = field(default=None, hash=False)
    advice: WriteAdvice = EXPORT_ADVICE

    def locate(self, name: str) -> str:
        return f"{self.url}/{name}"

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file atomically unless it exists; True if it was written.

        By a conditional request where the object store has one.
        """
        if self.read(name) is not None:
            return False
        with translate_write_errors(self.locate(name), self.advice, anything=True):
            self._make_folder(name)
            try:
                self._fs.pipe_file(self._path(name), content, mode="create")
            except Exception:  # of a failed condition: each file system has its own
                existing = self.read(name)
                if existing is None:
                    raise
                # Equal if a retried request finds what its lost first attempt wrote.
                return existing == content
        return True

    def put(self, name: str, content: bytes, check: Check | None = None) -> None:
        with self.scratch() as file:
            file.write(content)
            self.commit(file, name, check)

    @property
    def can_append(self) -> bool:
        return False

    def append(self, name: str, content: bytes) -> None:
        raise NotImplementedError(f"{self.locate(name)}: object stores have no appends")

    @contextmanager
    def scratch(self, name: str = "") -> Iterator[BufferedRandom]:
        """An unnamed local file, which vanishes with the process."""
        folder = dask.config.get("temporary-directory", None)
        where = f"a temporary file in {folder or tempfile.gettempdir()}"
        with translate_write_errors(where, self.advice), tempfile.TemporaryFile(dir=folder) as file:
            yield file

    def commit(self, file: BufferedRandom, name: str, check: Check | None = None) -> None:
        """Upload a scratch file; it appears when it is complete."""
        file.flush()
        size = os.fstat(file.fileno()).st_size
        # put_file wants a path, which the unnamed file has only here.
        source = f"/proc/self/fd/{file.fileno()}"
        with translate_write_errors(self.locate(name), self.advice, anything=True):
            target = self._path(name)
            self._make_folder(name)
            if self._uploads_are_atomic:
                if check is not None:
                    check()
                self._fs.put_file(source, target)
            else:
                staged = f"{STAGING}/{uuid.uuid4().hex}.tmp"
                self._make_folder(staged)
                self._fs.put_file(source, self._path(staged))
                if check is not None:
                    check()
                self._fs.mv(self._path(staged), target)
            self._fs.invalidate_cache()
            uploaded = self._fs.info(target)["size"]
        if uploaded not in (size, None):
            raise ExportError(
                f"{self.locate(name)} has {uploaded} bytes after {size} were sent: its server is "
                f"at fault; {self.advice.retry_hint}"
            )

    def move(self, name: str, to: str) -> None:
        with translate_write_errors(self.locate(to), self.advice, anything=True):
            self._fs.mv(self._path(name), self._path(to))
            self._fs.invalidate_cache()

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
                entries = entries_in(self._fs, self._path(folder))
            except FileNotFoundError:
                return {}
        return {name: entry["size"] for name, entry in entries.items() if entry["type"] == "file"}

    def names(self) -> list[str]:
        with translate_write_errors(self.url, self.advice, anything=True):
            self._fs.invalidate_cache()
            found = find_below(self._fs, self._path())
        return [name for name in found if not name.startswith(f"{STAGING}/")]

    def remove(self, names: Iterable[str]) -> None:
        with translate_write_errors(self.url, self.advice, anything=True):
            self._fs.invalidate_cache()
            existing = [path for path in map(self._path, names) if self._fs.exists(path)]
            if existing:
                self._fs.rm(existing)

    def remove_empty_staging(self) -> None:
        if not self._uploads_are_atomic:
            with suppress(Exception):  # not empty: each file system has its own error
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
    def _uploads_are_atomic(self) -> bool:
        protocol = self._fs.protocol
        # Elsewhere a file is uploaded under another name, then renamed.
        return not OBJECT_STORES.isdisjoint([protocol] if isinstance(protocol, str) else protocol)

    def _path(self, name: str = "") -> str:
        root = file_system(self.url, self.storage_options)[1]
        return f"{root}/{name}" if name else root

    def _make_folder(self, name: str) -> None:
        # Not on an object store: it has no folders, and makedirs might create a bucket.
        if not self._uploads_are_atomic:
            self._fs.makedirs(self._fs._parent(self._path(name)), exist_ok=True)
