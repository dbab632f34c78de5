"""Shards that are compressed, by gzip or Zstandard: decompressed at once, or as far as is read."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from dask_image_ingest.storage.announce import announce, is_fetched
from dask_image_ingest.storage.lazy_bytes import LazyBytes

__all__ = ["BrokenStream", "CompressedBytes", "decompress"]

# A corrupt stream loses at most what one of these steps gives.
_STEP = 1 << 14

# What is fetched of a remote shard that is read from its beginning: this, then more each time.
_FIRST_AHEAD, _GROWTH = 1 << 20, 4


def decompress(stored: LazyBytes, wholly: bool = True) -> LazyBytes:
    """The content of a shard, told by its first bytes to be compressed or not.

    Parameters
    ----------
    wholly
        Without it, a remote one is fetched and decompressed as far as it is read.
    """
    magic = bytes(stored[:4])
    if magic.startswith(b"\x1f\x8b"):
        name = "gzip"
    elif magic == b"\x28\xb5\x2f\xfd" or (magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5):
        # The second is a skippable frame, which parallel compressors put first.
        name = "Zstandard"
    else:
        return stored
    if not wholly and is_fetched(stored):
        return CompressedBytes(stored, name)
    stream = _Stream(io.BytesIO(stored[:]), name)
    stream.read_to(None)
    view = memoryview(stream.data).toreadonly()
    return view if stream.broken is None else BrokenStream(view, stream.broken)


class BrokenStream:
    """What could be decompressed of a shard whose compressed stream is damaged."""

    def __init__(self, data: memoryview, broken: str) -> None:
        self.broken = broken
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, part: slice, /) -> memoryview:
        return self._data[part]


class CompressedBytes:
    """A remote shard that is decompressed as far as it is read; only its length needs all of it."""

    def __init__(self, stored: LazyBytes, name: str) -> None:
        self._stored_size = len(stored)
        self._file = _StoredFile(stored)
        self._stream = _Stream(self._file, name)

    def __len__(self) -> int:
        self._stream.read_to(None)
        return len(self._stream.data)

    def __getitem__(self, part: slice, /) -> bytes:
        if part.stop is None or part.stop < 0 or (part.start or 0) < 0:
            return bytes(self._stream.data[slice(*part.indices(len(self)))])
        self._stream.read_to(part.stop)
        return bytes(self._stream.data[part])

    def has(self, nbytes: int) -> bool:
        """Whether it decompresses to so many bytes at least."""
        self._stream.read_to(nbytes)
        return len(self._stream.data) >= nbytes

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

    def __init__(self, stored: Any, name: str) -> None:
        self.data = bytearray()
        self.broken: str | None = None
        self._name = name
        self._steps = _gunzip(stored) if name == "gzip" else _unzstd(stored)

    def read_to(self, stop: int | None) -> None:
        """Decompress at least so many bytes, None for all, if there are as many."""
        try:
            while stop is None or len(self.data) < stop:
                step = next(self._steps, None)
                if step is None:
                    break
                self.data += step
        except (EOFError, OSError, zlib.error) as error:
            self.broken = (
                f"the {self._name} stream breaks off after {len(self.data)} decompressed bytes "
                f"({error})"
            )


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
