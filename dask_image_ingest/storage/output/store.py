"""Output folders, on disk and in object stores: files appear complete, or not at all.

On a disk, files are written to the staging folder, synced, then renamed; a link at their name is
replaced, not followed. Elsewhere complete files are uploaded. Stores are pickled to workers.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedRandom
from typing import Any, ClassVar, TypeAlias

import dask
import pyarrow as pa

from dask_image_ingest.errors import ArgumentError, DaskImageIngestError, ExportError
from dask_image_ingest.storage.fsspec_files import entries_in, file_system, find_below
from dask_image_ingest.storage.shard import OBJECT_STORES, FileSystem, as_folder, local_path
from dask_image_ingest.url_secrets import error_text

#: Subfolder for unfinished files, which readers of shards skip.
STAGING = "_staging"

# Suffix of files that are being written; locked as long as they are.
_TEMPORARY = ".tmp"

#: Raises if the caller must not write any more.
Check: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True)
class WriteAdvice:
    """Advice in errors of writing: how to retry, and what to do if a folder is read-only."""

    retry_hint: str
    elsewhere: str = "choose another folder"


EXPORT_ADVICE = WriteAdvice("run it again, to_webdataset() with resume=True")
CHECKPOINT_ADVICE = WriteAdvice("run it again, checkpoint() goes on where it stopped")
PARQUET_ADVICE = WriteAdvice("run it again, to_parquet_images() with overwrite=True")
HASHES_ADVICE = WriteAdvice("run it again")
INDEX_ADVICE = WriteAdvice(
    "run it again, write_index() goes on where it stopped",
    "pass folder= to have the indexes elsewhere",
)

PAGE_ADVICE = WriteAdvice("write the page again", "choose another folder for the page")


def parsed(content: bytes | None) -> dict[str, Any]:
    """A small file's JSON object; empty if there is no file, or anything else in it."""
    try:
        found = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def translate_write_errors(
    where: str, advice: WriteAdvice, anything: bool = False, done: str = "written"
) -> Iterator[None]:
    """Translate errors of an output folder into `ExportError` with advice.

    Parameters
    ----------
    where
        The file or folder, for the message.
    advice
        How to go on, for the message.
    anything
        Translate every exception, not only ``OSError``: remote file systems have their own.
    done
        What cannot be done with the file or folder, for the message.

    Raises
    ------
    ExportError
    """
    try:
        yield
    except (DaskImageIngestError, MemoryError):
        raise
    except OSError as error:
        raise ExportError(f"{where} cannot be {done}: {_advice(error, advice)}") from error
    except Exception as error:
        if not anything:
            raise
        raise ExportError(
            f"{where} cannot be {done}: {error_text(error)}. {_how_to_resume(advice)}"
        ) from error


def _advice(error: OSError, advice: WriteAdvice) -> str:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{reason}. What is finished stays; make room, and {advice.retry_hint}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        elsewhere = advice.elsewhere[0].upper() + advice.elsewhere[1:]
        return f"{reason}. {elsewhere}, or get the right to write to this one"
    return f"{reason}. {_how_to_resume(advice)}"


def _how_to_resume(advice: WriteAdvice) -> str:
    return f"What is finished stays; once the cause is gone, {advice.retry_hint}"


@dataclass(frozen=True)
class LocalStore:
    """A local output folder."""

    url: str
    advice: WriteAdvice = EXPORT_ADVICE
    can_append: ClassVar[bool] = True

    def locate(self, name: str) -> str:
        """The path or URL of a file in the folder; names are relative paths, with slashes."""
        return os.path.join(self.url, name)

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file atomically unless it exists; True if it was written."""
        target = self.locate(name)
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
        """Write a small file atomically; replaces an existing one."""
        with self.scratch(name) as file:
            file.write(content)
            self.commit(file, name, check)

    def append(self, name: str, content: bytes) -> None:
        """Append to a file, which is created if there is none; survives a kill of the process."""
        path = self.locate(name)
        with translate_write_errors(path, self.advice):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "ab", opener=_open_no_link) as file:
                file.write(content)

    @contextmanager
    def scratch(self, name: str = "") -> Iterator[BufferedRandom]:
        """A temporary file for a file of this name, deleted on exit unless committed."""
        where = self.locate(name) if name else self.url
        # Around the file, since closing it writes, too, and may find the disk full.
        with translate_write_errors(where, self.advice), _created(self.locate(STAGING)) as file:
            try:
                yield file
            finally:
                with suppress(OSError):  # committed; else the next run removes it
                    os.unlink(file.name)

    def commit(self, file: BufferedRandom, name: str, check: Check | None = None) -> None:
        """Move a complete scratch file to its final name; calls ``check`` right before."""
        with translate_write_errors(self.locate(name), self.advice):
            file.flush()
            # A lost completion mark only costs that its shard is checked or written again.
            if not name.startswith(f"{STAGING}/done-"):
                os.fsync(file.fileno())
            if check is not None:
                check()
            os.replace(file.name, self.locate(name))

    def move(self, name: str, to: str) -> None:
        """Give a file another name; replaces an existing one."""
        with translate_write_errors(self.locate(to), self.advice):
            os.replace(self.locate(name), self.locate(to))

    def fsync(self) -> None:
        """Make committed files durable: they survive a crash of the machine."""
        # A new name is durable once its folder is synced.
        for path in (self.locate(STAGING), self.url):
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
        """Content of a small file; None if it does not exist."""
        try:
            with self._reading(name), open(self.locate(name), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def open(self, name: str) -> pa.NativeFile:
        """Open a file for random access."""
        # Not a memory map: access to one of a truncated file kills the process.
        with self._reading(name):
            return pa.OSFile(self.locate(name))

    def size(self, name: str) -> int | None:
        """Size of a file; None if it does not exist."""
        try:
            with self._reading(name):
                return os.stat(self.locate(name)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Name → size of the files in the folder, or in a subfolder."""
        try:
            with self._reading(folder), os.scandir(self.locate(folder)) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def names(self) -> list[str]:
        """All files in it and below, but for unfinished ones; links, not where they lead."""
        found = []
        with self._reading(""):
            for top, folders, files in os.walk(self.url, onerror=_refuse_unlisted):
                links = [name for name in folders if os.path.islink(os.path.join(top, name))]
                paths = (os.path.join(top, name) for name in files + links)
                found += [os.path.relpath(path, self.url) for path in paths]
        return [name for name in found if not name.startswith(f"{STAGING}/")]

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; missing ones are ignored."""
        for name in names:
            with (
                translate_write_errors(self.locate(name), self.advice),
                suppress(FileNotFoundError),
            ):
                os.unlink(self.locate(name))

    def remove_empty_staging(self) -> None:
        """Remove the folder of unfinished files, unless another process is writing there."""
        names: Iterable[str] = ()
        if os.path.islink(self.locate(STAGING)):
            return  # somebody else's files are there
        with suppress(OSError):  # the next call removes them
            names = self.sizes(STAGING)
        for name in names:
            if name.endswith(_TEMPORARY):
                with suppress(OSError), open(self.locate(f"{STAGING}/{name}"), "rb") as file:
                    # Its writer holds a lock; a killed one has lost it.
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(file.name)
        with suppress(OSError):
            os.rmdir(self.locate(STAGING))

    def remove_staging(self) -> None:
        """Remove the folder of unfinished files."""
        with translate_write_errors(self.url, self.advice), suppress(FileNotFoundError):
            shutil.rmtree(self.locate(STAGING))


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


@dataclass(frozen=True)
class RemoteStore:
    """An output folder on an fsspec file system."""

    url: str
    storage_options: dict[str, Any] | None = field(default=None, hash=False)
    advice: WriteAdvice = EXPORT_ADVICE
    can_append: ClassVar[bool] = False

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


OutputStore: TypeAlias = LocalStore | RemoteStore


def open_output(
    folder: str, advice: WriteAdvice, storage_options: dict[str, Any] | None
) -> OutputStore:
    """The output store at a path or URL, which may end with a slash.

    Raises
    ------
    ArgumentError
        If it is a chain of file systems, which can't be written.
    """
    local = local_path(folder) if "://" in folder else folder
    if local is not None:
        return LocalStore(os.path.abspath(os.path.expanduser(local)), advice)
    if "::" in folder:
        raise ArgumentError(f"{folder!r} is a chain of file systems, which is read and not written")
    return RemoteStore(as_folder(folder), storage_options, advice)
