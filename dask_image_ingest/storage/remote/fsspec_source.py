"""Remote shards of any protocol that fsspec supports."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import datetime
from typing import Any

from dask_image_ingest.errors import ShardError, ShardNotFoundError, safe_cause
from dask_image_ingest.storage.fsspec_compat import info_of, translate_errors
from dask_image_ingest.storage.remote.fetch import Head, Retries, RetryableError, call_with_retry
from dask_image_ingest.storage.settings import configured_settings
from dask_image_ingest.storage.shard import FileSystem
from dask_image_ingest.texts import error_text

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

# Attributes with the HTTP status in errors of aiohttp, Azure and gcsfs.
_STATUS_ATTRIBUTES = ("status", "status_code", "code")

# Errors of interrupted connections, of aiohttp, botocore, Azure and requests.
_INTERRUPTIONS = frozenset(
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
    """A shard on an fsspec file system.

    Several threads call only asynchronous file systems at once; others are called in turn.
    """

    def __init__(self, fs: FileSystem, path: str, url: str) -> None:
        self.url = url
        self._fs = fs
        self._path = path
        self._size = 0
        self.version = ""
        # Needs no reset after a fork: a source belongs to the task that opened the shard, and that
        # task continues in the parent.
        self._lock = nullcontext() if fs.async_impl else threading.Lock()

    def head(self, nbytes: int, stall_timeout: float | None = None) -> Head:
        info = self._request(info_of, self._fs, self._path)
        if info["size"] is None:
            whole = self._request(self._fs.cat_file, self._path)
            return Head(whole, len(whole))
        self._size, self.version = info["size"], version_of(info)
        wanted = min(nbytes, self._size)
        data = self._request(self._fs.cat_file, self._path, start=0, end=wanted) if wanted else b""
        if len(data) > wanted:  # the range was ignored
            if len(data) != self._size:
                raise self._changed(self._size, len(data))
        elif len(data) < wanted:
            raise self._short(0, wanted, len(data))
        return Head(data, self._size)

    def stream(self, start: int, stop: int, stall_timeout: float | None = None) -> Iterator[bytes]:
        data = self._request(self._fs.cat_file, self._path, start=start, end=stop)
        if len(data) != stop - start:
            raise self._short(start, stop, len(data))
        yield data

    def refuse_changes(self) -> None:
        if not self.version:
            return
        try:
            self._fs.invalidate_cache(self._fs._parent(self._path))
            info = self._request(self._fs.info, self._path)
        except (RetryableError, ShardNotFoundError):
            return  # no change was seen
        if version_of(info) != self.version:
            raise ShardError(
                f"{self.url} has changed while it was read, and what was read may be of two "
                "versions. Read it again when it is complete"
            )

    def is_version(self, version: str) -> bool:
        # Some file systems leave out the quotes of an ETag.
        return not self.version or not version or self.version.strip('"') == version.strip('"')

    def _short(self, start: int, stop: int, received: int) -> Exception:
        """Error of too few bytes; retryable if the version shows that the shard is unchanged."""
        self.refuse_changes()
        if self.version:
            return RetryableError(f"{received} of the {stop - start} bytes from {start} on came")
        return self._changed(stop - start, received)

    def _changed(self, wanted: int, received: int) -> ShardError:
        return ShardError(
            f"{self.url} has changed or its server is at fault: {wanted} bytes were requested and "
            f"{received} received"
        )

    def _request(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return _request(self.url, call, *args, **kwargs)


def call_fsspec(url: str, call: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a file system, with retries.

    Raises
    ------
    ShardNotFoundError, ShardError
    """
    retries = Retries(url, configured_settings().retry_limit)
    return call_with_retry(lambda: _request(url, call, *args, **kwargs), retries)


def _request(url: str, call: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return translate_errors(url, call, *args, **kwargs)
    except (ShardError, ShardNotFoundError) as error:
        cause = error.__cause__
        if cause is None:
            raise
        if isinstance(error, ShardError) and _is_temporary(cause):
            # fsspec's HTTP file system raises FileNotFoundError from whatever went wrong.
            hidden = cause.__cause__ if isinstance(cause, FileNotFoundError) else None
            reason = hidden or cause
            raise RetryableError(error_text(reason)) from safe_cause(cause)
        error.__cause__ = safe_cause(cause)
        raise


def version_of(info: dict[str, Any]) -> str:
    """Version of a file, from fsspec's info; empty without one."""
    version = next((info[name] for name in _VERSIONS if info.get(name)), "")
    # ls and info of one file system may differ: a datetime from one, a number from the other.
    return str(version.timestamp() if isinstance(version, datetime) else version)


def _is_temporary(error: BaseException | None) -> bool:
    """True for an error of a file system that may be temporary, by its chain of causes."""
    depth = 0
    while error is not None and depth < 5:
        statuses = (getattr(error, name, None) for name in _STATUS_ATTRIBUTES)
        status = next((status for status in statuses if isinstance(status, int)), 0)
        if status:
            return status in (408, 425, 429) or status >= 500
        if isinstance(error, ConnectionRefusedError):
            return False
        if isinstance(error, (ConnectionError, TimeoutError, asyncio.TimeoutError)):
            return True
        if type(error).__name__ in _INTERRUPTIONS:
            return True
        error, depth = error.__cause__, depth + 1
    return False
