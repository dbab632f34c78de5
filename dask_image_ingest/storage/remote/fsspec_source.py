"""Remote shards of any protocol that fsspec knows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import datetime
from typing import Any

from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.storage.fsspec_compat import FileSystem, translate_errors
from dask_image_ingest.storage.remote.fetch import Fault, Head, Retries, call_with_retry
from dask_image_ingest.storage.settings import settings

# Keys holding a file's version, most reliable first: hashes of its content, then times.
_VERSIONS = (
    "ETag",
    "etag",
    "Content-MD5",
    "generation",
    "blob_id",  # Hugging Face
    "sha",  # GitHub
    "CRC",  # zip
    "mtime",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "updated",
    "modified",
    "modify",  # FTP
    "modificationTime",  # WebHDFS
    "created",
)

# What the errors of aiohttp, Azure and gcsfs call the status of an answer.
_STATUS = ("status", "status_code", "code")

# Connections that broke off, as aiohttp, botocore, Azure and requests call them.
_PASSING = frozenset(
    {
        "ChunkedEncodingError",
        "ClientPayloadError",
        "IncompleteRead",
        "IncompleteReadError",
        "ServerDisconnectedError",
        "ServiceRequestError",
        "ServiceResponseError",
    }
)


class FsspecSource:
    """A shard on a file system of fsspec.

    Only those with asynchronous requests of their own are asked by many threads at once.
    """

    def __init__(self, fs: FileSystem, path: str, url: str) -> None:
        self.url = url
        self._fs = fs
        self._path = path
        self._size = 0
        self.version = ""
        # A forked process inherits none that it could use: a source lives as long as a task has
        # its shard open, and that task goes on in the parent.
        self._turn = nullcontext() if fs.async_impl else threading.Lock()

    def head(self, nbytes: int, stall_timeout: float | None = None) -> Head:
        info = self._ask(self._fs.info, self._path)
        if info["size"] is None:
            whole = self._ask(self._fs.cat_file, self._path)
            return Head(whole, len(whole))
        self._size, self.version = info["size"], version_of(info)
        wanted = min(nbytes, self._size)
        data = self._ask(self._fs.cat_file, self._path, start=0, end=wanted) if wanted else b""
        if len(data) > wanted:  # it knows no ranges
            if len(data) != self._size:
                raise self._changed(self._size, len(data))
        elif len(data) < wanted:
            raise self._short(0, wanted, len(data))
        return Head(data, self._size)

    def stream(self, start: int, stop: int, stall_timeout: float | None = None) -> Iterator[bytes]:
        data = self._ask(self._fs.cat_file, self._path, start=start, end=stop)
        if len(data) != stop - start:
            raise self._short(start, stop, len(data))
        yield data

    def refuse_changes(self) -> None:
        if not self.version:
            return
        try:
            self._fs.invalidate_cache(self._fs._parent(self._path))
            now = self._ask(self._fs.info, self._path)
        except (Fault, ShardNotFoundError):
            return  # nothing was read after this
        if version_of(now) != self.version:
            raise ShardError(
                f"{self.url} has changed while it was read, and what was read may be of two "
                "versions. Read it again when it is complete"
            )

    def is_version(self, version: str) -> bool:
        # Some file systems leave out the quotes of an ETag.
        return not self.version or not version or self.version.strip('"') == version.strip('"')

    def _short(self, start: int, stop: int, came: int) -> Exception:
        self.refuse_changes()
        if self.version:
            return Fault(f"{came} of the {stop - start} bytes from {start} on came")
        return self._changed(stop - start, came)

    def _changed(self, wanted: int, came: int) -> ShardError:
        return ShardError(
            f"{self.url} has changed or its server is at fault: {wanted} bytes were asked for and "
            f"{came} came"
        )

    def _ask(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            return _ask(self.url, call, *args, **kwargs)


def call_fsspec(url: str, call: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a file system, again while it fails temporarily.

    Raises
    ------
    ShardNotFoundError, ShardError
    """
    retries = Retries(url, settings().retry_limit)
    return call_with_retry(lambda: _ask(url, call, *args, **kwargs), retries)


def _ask(url: str, call: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return translate_errors(url, call, *args, **kwargs)
    except ShardError as error:
        cause = error.__cause__
        if _is_passing(cause):
            # fsspec says of a web address that there is no such file, whatever went wrong.
            hidden = cause.__cause__ if isinstance(cause, FileNotFoundError) else None
            fault = hidden or cause
            raise Fault(f"{type(fault).__name__}: {fault}") from cause
        raise


def version_of(info: dict[str, Any]) -> str:
    """Version of a file, from fsspec's info; empty without one."""
    version = next((info[name] for name in _VERSIONS if info.get(name)), "")
    # A file system may give one time as a datetime here and as a number there.
    return str(version.timestamp() if isinstance(version, datetime) else version)


def _is_passing(error: BaseException | None) -> bool:
    """True for an error of a file system that may be temporary."""
    seen = 0
    while error is not None and seen < 5:
        status = next(
            (s for name in _STATUS if isinstance(s := getattr(error, name, None), int)), 0
        )
        if status:
            return status in (408, 425, 429) or status >= 500
        if isinstance(error, ConnectionRefusedError):
            return False
        if isinstance(error, (ConnectionError, TimeoutError, asyncio.TimeoutError)):
            return True
        if type(error).__name__ in _PASSING:
            return True
        error, seen = error.__cause__, seen + 1
    return False
