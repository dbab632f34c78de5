"""A shard's URL → its bytes: read or fetched as they are asked for, or decompressed."""

import functools
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeAlias

import fsspec
import pyarrow as pa
from fsspec.core import url_to_fs

from dask_image_ingest.errors import (
    ArgumentError,
    MissingDependencyError,
    ShardError,
)
from dask_image_ingest.storage.faults import guarded
from dask_image_ingest.storage.lazy_bytes import LazyBytes
from dask_image_ingest.storage.local import LocalBytes
from dask_image_ingest.storage.url import local_path

__all__ = [
    "BrokenStream",
    "FileSystem",
    "RemoteBytes",
    "file_system",
    "open_shard",
]


FileSystem: TypeAlias = fsspec.AbstractFileSystem

# One request fetches this much, about what a connection transfers in the time that it takes to
# answer; the last 128 MiB are kept, so that a usual shard is fetched once.
_REQUEST_SIZE = 4 << 20
_REQUESTS_KEPT = 32

# A corrupt stream loses at most what one of these steps gives.
_STEP = 1 << 14


@contextmanager
def open_shard(url: str, storage_options: dict[str, Any] | None = None) -> Iterator[LazyBytes]:
    """Open a shard for :func:`~dask_image_ingest.tar.index_tar` and ``read_member``.

    A shard is read, or fetched in ranges if it is a remote one, as its bytes are asked for; one
    that is compressed (gzip or Zstandard, told by its first bytes) is decompressed into memory. If
    the compressed stream breaks off, the content ends there and has an attribute ``broken`` that
    says why.

    Raises
    ------
    ShardNotFoundError
        If there is no such shard (any more).
    ShardError
        If the shard cannot be read, now or while it is open, or if a local one has changed when it
        is closed.
    """
    path = local_path(url)
    if path is None:
        yield _decompress(_remote(url, storage_options))
        return
    with closing(LocalBytes(path)) as stored:
        yield _decompress(stored)
        stored.refuse_changes()


class BrokenStream:
    """What could be decompressed of a shard whose compressed stream is damaged."""

    def __init__(self, data: memoryview, broken: str) -> None:
        self.broken = broken
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, part: slice, /) -> memoryview:
        return self._data[part]


class RemoteBytes:
    """The bytes of a remote shard, fetched in ranges and kept for a while.

    Parameters
    ----------
    fs, path
        Where the shard is.
    size
        How many bytes it has.
    url
        What errors call the shard.
    """

    def __init__(self, fs: FileSystem, path: str, size: int, url: str) -> None:
        self._fs = fs
        self._path = path
        self._size = size
        self._url = url
        self._whole: bytes | None = None
        self._request = functools.lru_cache(_REQUESTS_KEPT)(self._fetch)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> bytes:
        start, stop, _ = part.indices(self._size)
        if start >= stop:
            return b""
        if stop - start > _REQUEST_SIZE:
            return self._fetch(start, stop)
        pieces = []
        while start < stop:
            first = start - start % _REQUEST_SIZE
            piece = self._request(first, min(first + _REQUEST_SIZE, self._size))
            pieces.append(piece[start - first : stop - first])
            start = first + _REQUEST_SIZE
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _fetch(self, start: int, stop: int) -> bytes:
        if self._whole is None:
            data = guarded(self._url, self._fs.cat_file, self._path, start=start, end=stop)
            if len(data) <= stop - start:
                return self._complete(data, stop - start)
            # The server knows no ranges and sends the whole shard each time: once is enough.
            self._whole = self._complete(data, self._size)
        return self._whole[start:stop]

    def _complete(self, data: bytes, size: int) -> bytes:
        if len(data) != size:
            raise ShardError(
                f"{self._url} has changed or its server is at fault: {size} bytes were asked for "
                f"and {len(data)} came"
            )
        return data


def file_system(url: str, storage_options: dict[str, Any] | None) -> tuple[FileSystem, str]:
    """Find the file system of a remote shard, and the shard's path there."""
    try:
        return url_to_fs(url, **(storage_options or {}))
    except ImportError as error:
        raise MissingDependencyError(f"{url} cannot be read: {error}.") from error
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"{url} cannot be read, with these storage_options: {error}") from error
    except Exception as error:  # some file systems connect already
        raise ShardError(f"{url} cannot be read: {type(error).__name__}: {error}") from error


def _remote(url: str, storage_options: dict[str, Any] | None) -> LazyBytes:
    fs, path = file_system(url, storage_options)
    size = guarded(url, fs.info, path)["size"]
    if size is None:
        return guarded(url, fs.cat_file, path)
    return RemoteBytes(fs, path, size, url)


def _decompress(stored: LazyBytes) -> LazyBytes:
    magic = bytes(stored[:4])
    if magic.startswith(b"\x1f\x8b"):
        name, steps = "gzip", _gunzip(memoryview(stored[:]))
    elif magic == b"\x28\xb5\x2f\xfd" or (magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5):
        # The second is a skippable frame, which parallel compressors put first.
        name, steps = "Zstandard", _unzstd(stored[:])
    else:
        return stored
    data = bytearray()
    broken = None
    try:
        for step in steps:
            data += step
    except (EOFError, OSError, zlib.error) as error:
        broken = f"the {name} stream breaks off after {len(data)} decompressed bytes ({error})"
    view = memoryview(data).toreadonly()
    return view if broken is None else BrokenStream(view, broken)


def _gunzip(stored: memoryview) -> Iterator[bytes]:
    position = 0
    while position < len(stored):
        member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        while not member.eof:
            if position >= len(stored):
                yield member.flush()
                raise EOFError("unexpected end")
            yield member.decompress(stored[position : position + _STEP])
            position += _STEP
        position = min(position, len(stored)) - len(member.unused_data)
        # Tapes and block devices pad with zeros, which gzip allows.
        while position < len(stored) and not stored[position]:
            position += 1


def _unzstd(stored: Any) -> Iterator[bytes]:
    stream = pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(stored)), "zstd")
    while step := stream.read(_STEP):
        yield step
