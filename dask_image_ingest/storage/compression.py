"""Decompression of whole shards, by gzip or Zstandard.

A small file may decompress to any size: memory holds the first bytes, a temporary file the rest.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pyarrow as pa

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage.disk_cache import SpillFile
from dask_image_ingest.storage.reader import ByteReader, MemoryReader

# Most bytes of a decompressed shard in memory.
_IN_MEMORY = 256 << 20

# Bytes decompressed at once; a corrupt stream loses at most as many of the valid ones.
_STEP = 1 << 14


@contextmanager
def decompressed(stored: ByteReader, url: str) -> Iterator[ByteReader]:
    """Decompress a shard by its magic bytes; pass an uncompressed one through.

    Raises
    ------
    ShardError
        If the disk has no room for it. The message names ``url``.
    """
    name = _compression(bytes(stored[:4]))
    if name is None:
        yield stored
        return
    stream = _DecompressedReader(name, url)
    try:
        stream.fill(io.BytesIO(stored[:]))
        whole = stream.in_memory()
        yield MemoryReader(whole) if len(whole) == len(stream) and not stream.damage else stream
    finally:
        stream.close()


def _compression(magic: bytes) -> str | None:
    if magic.startswith(b"\x1f\x8b"):
        return "gzip"
    if magic == b"\x28\xb5\x2f\xfd" or (magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5):
        # The second is a skippable frame, with which parallel compressors begin.
        return "Zstandard"
    return None


class _DecompressedReader(ByteReader):
    """Reader of a decompressed shard: its first bytes in memory, the rest in a file."""

    def __init__(self, name: str, url: str) -> None:
        self._url = url
        self._name = name
        self._size = 0
        self._in_memory = bytearray()
        self._spilled = SpillFile()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> bytes:
        start, stop, _ = part.indices(self._size)
        limit = len(self._in_memory)
        data = bytes(memoryview(self._in_memory)[start:stop])
        if stop <= limit:
            return data
        return data + self._spilled.read(max(start - limit, 0), stop - max(start, limit))

    def fill(self, stored: io.BytesIO) -> None:
        """Decompress the stream up to its end, or up to where it is corrupt (see `damage`)."""
        steps = _steps(self._name, stored)
        while True:
            try:
                step = next(steps, b"")
            except (EOFError, OSError, zlib.error) as error:
                self.damage = (
                    f"the {self._name} stream breaks off after {self._size} decompressed bytes "
                    f"({error})"
                )
                return
            if not step:
                return
            self._append(step)

    def in_memory(self) -> memoryview:
        return memoryview(self._in_memory).toreadonly()

    def close(self) -> None:
        self._spilled.close()

    def _append(self, step: bytes) -> None:
        room = _IN_MEMORY - len(self._in_memory)
        self._in_memory += step[:room]
        if room < len(step):
            try:
                self._spilled.write(step[room:])
            except OSError as error:
                raise ShardError(
                    f"{self._url} decompresses to more than {self._size:,} bytes, for which there "
                    f"is no room: {error}. Set temporary-directory in Dask's configuration to a "
                    "folder of a larger disk"
                ) from error
        self._size += len(step)


def _steps(name: str, stored: io.BytesIO) -> Iterator[bytes]:
    """Decompressed bytes, at most `_STEP` at a time."""
    if name == "gzip":
        return iter(partial(gzip.GzipFile(fileobj=stored).read1, _STEP), b"")
    stream = pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), "zstd")
    return iter(partial(stream.read, _STEP), b"")
