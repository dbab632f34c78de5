"""Shards that are compressed, by gzip or Zstandard: decompressed at once, or as far as is read.

A small file may decompress to any size, so memory holds the beginning and a file the rest.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage.announce import announce, is_fetched
from dask_image_ingest.storage.lazy_bytes import LazyBytes
from dask_image_ingest.storage.spill import SpillFile

__all__ = ["CompressedBytes", "decompressed"]

# In bytes: what of a decompressed shard is held in memory.
_IN_MEMORY = 256 << 20

# A corrupt stream loses at most what one of these steps gives.
_STEP = 1 << 14

# What is fetched of a remote shard that is read from its beginning: this, then more each time.
_FIRST_AHEAD, _GROWTH = 1 << 20, 4


@contextmanager
def decompressed(stored: LazyBytes, url: str, wholly: bool = True) -> Iterator[LazyBytes]:
    """The content of a shard, told by its first bytes to be compressed or not.

    Parameters
    ----------
    url
        What errors call the shard.
    wholly
        Without it, a remote one is fetched and decompressed as far as it is read.

    Raises
    ------
    ShardError
        If neither memory nor the disk has room for it, now or when it is read.
    """
    name = _compression(bytes(stored[:4]))
    if name is None:
        yield stored
        return
    late = not wholly and is_fetched(stored)
    source: io.IOBase = _StoredFile(stored) if late else io.BytesIO(stored[:])
    stream = _Stream(source, name, url)
    try:
        if late:
            yield CompressedBytes(stored, source, stream)
        else:
            stream.read_to(None)
            yield stream.in_memory() or _Decompressed(stream)
    finally:
        stream.close()


def _compression(magic: bytes) -> str | None:
    if magic.startswith(b"\x1f\x8b"):
        return "gzip"
    if magic == b"\x28\xb5\x2f\xfd" or (magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5):
        # The second is a skippable frame, which parallel compressors put first.
        return "Zstandard"
    return None


class _Decompressed:
    """A shard whose stream is damaged or larger than memory may hold, as far as it goes."""

    def __init__(self, stream: _Stream) -> None:
        self.broken = stream.broken
        self._stream = stream

    def __len__(self) -> int:
        return self._stream.size

    def __getitem__(self, part: slice, /) -> bytes:
        start, stop, _ = part.indices(len(self))
        return self._stream.read(start, stop)


class CompressedBytes:
    """A remote shard that is decompressed as far as it is read; only its length needs all of it."""

    def __init__(self, stored: LazyBytes, file: io.IOBase, stream: _Stream) -> None:
        self._stored_size = len(stored)
        self._file = file
        self._stream = stream

    def __len__(self) -> int:
        self._stream.read_to(None)
        return self._stream.size

    def __getitem__(self, part: slice, /) -> bytes:
        if part.stop is None or part.stop < 0 or (part.start or 0) < 0:
            self._stream.read_to(None)
        else:
            self._stream.read_to(part.stop)
        start, stop, _ = part.indices(self._stream.size)
        return self._stream.read(start, stop)

    def has(self, nbytes: int) -> bool:
        """Whether it decompresses to so many bytes at least."""
        self._stream.read_to(nbytes)
        return self._stream.size >= nbytes

    @property
    def broken(self) -> str | None:
        """Why the stream breaks off, as far as it was read."""
        return self._stream.broken

    @property
    def share(self) -> float:
        """Which share of what is stored was decompressed so far."""
        return self._file.tell() / self._stored_size


class _Stream:
    """What was decompressed so far, and the rest."""

    def __init__(self, stored: Any, name: str, url: str) -> None:
        self.size = 0
        self.broken: str | None = None
        self._url = url
        self._name = name
        self._steps = _gunzip(stored) if name == "gzip" else _unzstd(stored)
        self._beginning = bytearray()
        self._rest = SpillFile()

    def read_to(self, stop: int | None) -> None:
        """Decompress at least so many bytes, None for all, if there are as many."""
        while stop is None or self.size < stop:
            try:
                step = next(self._steps, None)
            except (EOFError, OSError, zlib.error) as error:
                self.broken = (
                    f"the {self._name} stream breaks off after {self.size} decompressed bytes "
                    f"({error})"
                )
                return
            if step is None:
                return
            self._keep(step)

    def in_memory(self) -> memoryview | None:
        """What was decompressed, if it is sound and all of it is in memory."""
        if self.broken is not None or self.size > len(self._beginning):
            return None
        return memoryview(self._beginning).toreadonly()

    def read(self, start: int, stop: int) -> bytes:
        """A range of what was decompressed."""
        held = len(self._beginning)
        beginning = bytes(memoryview(self._beginning)[start:stop])
        if stop <= held:
            return beginning
        return beginning + self._rest.read(max(start - held, 0), stop - max(start, held))

    def close(self) -> None:
        """Give the room of the file back."""
        self._rest.close()

    def _keep(self, step: bytes) -> None:
        room = _IN_MEMORY - len(self._beginning)
        self._beginning += step[:room]
        if room < len(step):
            try:
                self._rest.write(step[room:])
            except OSError as error:
                raise ShardError(
                    f"{self._url} decompresses to more than {self.size:,} bytes, for which there "
                    f"is no room: {error}. Set temporary-directory in Dask's configuration to a "
                    "folder of a larger disk"
                ) from error
        self.size += len(step)


class _StoredFile(io.RawIOBase):
    """A remote shard from its beginning, as a file; more and more is fetched ahead."""

    def __init__(self, stored: LazyBytes) -> None:
        super().__init__()
        self._stored = stored
        self._position = self._ahead = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._position + len(view), len(self._stored))
        if end > self._ahead:
            self._ahead = max(_FIRST_AHEAD, _GROWTH * self._ahead, end)
            announce(self._stored, [(self._position, self._ahead)])
        data = self._stored[self._position : end]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def _gunzip(stored: Any) -> Iterator[bytes]:
    data = stored.read(_STEP)
    while data:
        member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        while not member.eof:
            if not data:
                yield member.flush()
                raise EOFError("unexpected end")
            yield member.decompress(data)
            data = member.unused_data if member.eof else stored.read(_STEP)
        # Tapes and block devices pad with zeros, which gzip allows.
        data = data.lstrip(b"\0")
        while not data and (more := stored.read(_STEP)):
            data = more.lstrip(b"\0")


def _unzstd(stored: Any) -> Iterator[bytes]:
    stream = pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), "zstd")
    while step := stream.read(_STEP):
        yield step
