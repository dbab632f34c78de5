"""Readers of shards: bytes-like objects that read on slicing; their errors and threads."""

from __future__ import annotations

import io
import os
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.storage.shard import Shard, local_path
from dask_image_ingest.url_secrets import error_text

Result = TypeVar("Result")

# Errors if no server answers, or if its name does not resolve.
_UNREACHED = (ConnectionError, socket.gaierror)

#: Start and stop of a byte range.
Range: TypeAlias = tuple[int, int]

#: Allocator: returns a buffer of at least that many bytes, or None if there is no room.
Memory: TypeAlias = Callable[[int], Any]


class LazyBytes(Protocol):
    """Protocol of ``bytes``, ``memoryview``, readers, and views of readers."""

    def __len__(self) -> int:
        """Size in bytes."""
        ...

    def __getitem__(self, part: slice, /) -> bytes | bytearray | memoryview:
        """Read a range; as with ``bytes``, it is cut off at the end."""
        ...


class ByteReader:
    """The bytes of an open shard: sliced like ``bytes``; thread-safe.

    Attributes
    ----------
    shard
        The open version as a listing would show it; None for decompressed shards and the output of
        ``pipe:`` commands.
    damage
        Why the bytes end too early; None if they don't.
    is_remote
        Whether reading costs requests.
    file_id
        File system and inode of an open local file, empty without one. A copy has another.
    """

    shard: Shard | None = None
    damage: str | None = None
    is_remote: ClassVar[bool] = False
    file_id: str = ""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, part: slice, /) -> bytes | bytearray | memoryview:
        raise NotImplementedError

    def prefetch(self, ranges: Iterable[Range], gap: int | None = None) -> None:
        """Prefetch these ranges, roughly in order, and from now on nothing else.

        Ranges that lie at most ``gap`` bytes apart are one request; None for the setting ``gap``.
        """

    def prefetch_scan(self) -> None:
        """Expect a scan of the headers, followed by reads of the members it finds.

        Members between headers are fetched as well where that is faster than skipping them.
        """

    def prefetch_into(self, start: int, stop: int, memory: Memory) -> None:
        """Read a range into one buffer of ``memory``, in background threads."""

    def in_memory(self) -> bytes | memoryview:
        """The first bytes of the shard, as many as are in memory now."""
        return b""

    def listed_as(self, url: str) -> Shard | None:
        """The open version, if this reads the shard at ``url`` itself (not decompressed)."""
        return self.shard if self.shard is not None and self.shard.url == url else None

    def close(self) -> None:
        """Release files, memory and pending requests."""


class MemoryReader(ByteReader):
    """Reader of a shard that is in memory."""

    def __init__(self, data: bytes | memoryview, shard: Shard | None = None) -> None:
        self._data = data
        self.shard = shard

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, part: slice, /) -> bytes | memoryview:
        return self._data[part]

    def in_memory(self) -> bytes | memoryview:
        """The whole shard."""
        return self._data


def as_reader(content: LazyBytes) -> ByteReader:
    """Wrap ``bytes`` or a ``memoryview`` in a reader; return readers unchanged."""
    if isinstance(content, ByteReader):
        return content
    if isinstance(content, (bytes, bytearray)):
        content = memoryview(content)
    assert isinstance(content, memoryview)
    return MemoryReader(content)


class ReaderFile(io.RawIOBase):
    """A read-only file over a reader, or anything else that is sliced like ``bytes``."""

    def __init__(self, content: LazyBytes) -> None:
        super().__init__()
        self._content = content
        self._position = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The current position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to ``offset``, as in any file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._content)}
        if base[whence] + offset < 0:
            raise ValueError(f"position {base[whence] + offset} is before the file's beginning")
        self._position = base[whence] + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to ``size`` bytes, or all up to the end."""
        whole = size is None or size < 0
        stop = len(self._content) if whole else self._position + (size or 0)
        data = bytes(self._content[self._position : stop])
        self._position += len(data)
        return data

    def readinto(self, buffer: Any, /) -> int:
        """Read into ``buffer``, as much as it holds."""
        view = memoryview(buffer).cast("B")
        data = self._content[self._position : self._position + len(view)]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def translate_errors(url: str, read: Callable[..., Result], *args: object, **kw: object) -> Result:
    """Call ``read``; translate its errors into a ``ShardError`` that names the shard."""
    try:
        return read(*args, **kw)
    except MemoryError:
        raise
    except Exception as error:  # each remote file system has exceptions of its own
        reason = reason_of(error)
        if isinstance(reason, FileNotFoundError):
            raise ShardNotFoundError(f"{url} is not found") from error
        unreached = any(isinstance(cause, _UNREACHED) for cause in (reason, reason.__cause__))
        why = "its server cannot be reached: " if unreached and local_path(url) is None else ""
        raise ShardError(f"{url} cannot be read: {why}{error_text(reason)}") from error


def reason_of(error: BaseException) -> BaseException:
    """The error, or its cause: fsspec's HTTP raises FileNotFoundError from whatever went wrong."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or cause is None:
        return error
    is_failure = isinstance(cause, (OSError, TypeError, ValueError)) and not isinstance(
        cause, FileNotFoundError
    )
    return cause if is_failure or getattr(cause, "status", 404) not in (404, 410) else error


_pools_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def request_threads(connections: int) -> ThreadPoolExecutor:
    """The pool of that many threads, shared by all open shards of this process."""
    with _pools_lock:
        if connections not in _pools:
            _pools[connections] = ThreadPoolExecutor(connections, "image-ingest-remote")
        return _pools[connections]


def _reset_pools() -> None:
    """Start anew in a forked process: it has no threads, and the lock may be held for ever."""
    global _pools_lock
    _pools_lock = threading.Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_reset_pools)
