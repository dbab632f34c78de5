"""A shard's URL → its bytes: read or fetched as they are asked for, or decompressed."""

import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pyarrow as pa

from dask_image_ingest.storage.cached import cached_copy
from dask_image_ingest.storage.lazy_bytes import LazyBytes
from dask_image_ingest.storage.local import LocalBytes
from dask_image_ingest.storage.pipe import is_pipe, run_pipe
from dask_image_ingest.storage.remote import open_remote
from dask_image_ingest.storage.shard import Shard, changed
from dask_image_ingest.storage.url import local_path

__all__ = ["BrokenStream", "open_shard"]

# A corrupt stream loses at most what one of these steps gives.
_STEP = 1 << 14


@contextmanager
def open_shard(
    url: str, storage_options: dict[str, Any] | None = None, listed: Shard | None = None
) -> Iterator[LazyBytes]:
    """Open a shard for :func:`~dask_image_ingest.tar.index_tar` and ``read_member``.

    A shard is read, or fetched in ranges if it is a remote one, as its bytes are asked for; one
    that is compressed (gzip or Zstandard, told by its first bytes) is decompressed into memory, and
    what a ``pipe:`` command writes is kept there until the shard is closed. If
    the compressed stream breaks off, the content ends there and has an attribute ``broken`` that
    says why. If the shard was ``listed``, it has to be that version.

    Raises
    ------
    ArgumentError
        If it is a command, and commands are not allowed.
    ShardNotFoundError
        If there is no such shard (any more).
    ShardError
        If the shard cannot be read, now or while it is open, if it is not the one that was listed,
        or if it has changed when it is closed.
    """
    if is_pipe(url):
        yield _decompress(run_pipe(url, storage_options))
        return
    path = local_path(url) or cached_copy(url, storage_options)
    if path is None:
        with open_remote(url, storage_options, listed) as fetched:
            yield _decompress(fetched)
        return
    with closing(LocalBytes(path)) as stored:
        if listed is not None and not stored.is_version(listed):
            raise changed(url)
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
