"""Decompression of whole shards, by gzip or Zstandard.

A small file may decompress to any size, so memory holds the beginning and a file the rest.
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

# In bytes: what of a decompressed shard is held in memory.
_IN_MEMORY = 256 << 20

# In bytes: a corrupt stream loses at most one of these steps.
_STEP = 1 << 14


@contextmanager
def decompressed(stored: ByteReader, url: str) -> Iterator[ByteReader]:
    """Decompress a shard whose first bytes are those of gzip or Zstandard; pass others through.

    Raises
    ------
    ShardError
        If neither memory nor the disk has room for it. ``url`` is what errors call it.
    """
    name = _compression(bytes(stored[:4]))
    if name is None:
        yield stored
        return
    stream = _Stream(name, url)
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
        # The second is a skippable frame, which parallel compressors put first.
        return "Zstandard"
    return None


class _Stream(ByteReader):
    """A decompressed shard: its beginning in memory, and the rest in a file."""

    def __init__(self, name: str, url: str) -> None:
        self._url = url
        self._name = name
        self._size = 0
        self._beginning = bytearray()
        self._rest = SpillFile()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> bytes:
        start, stop, _ = part.indices(self._size)
        held = len(self._beginning)
        beginning = bytes(memoryview(self._beginning)[start:stop])
        if stop <= held:
            return beginning
        return beginning + self._rest.read(max(start - held, 0), stop - max(start, held))

    def fill(self, stored: io.BytesIO) -> None:
        """Decompress all of it, or as much as can be decompressed."""
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
        return memoryview(self._beginning).toreadonly()

    def close(self) -> None:
        self._rest.close()

    def _append(self, step: bytes) -> None:
        room = _IN_MEMORY - len(self._beginning)
        self._beginning += step[:room]
        if room < len(step):
            try:
                self._rest.write(step[room:])
            except OSError as error:
                raise ShardError(
                    f"{self._url} decompresses to more than {self._size:,} bytes, for which there "
                    f"is no room: {error}. Set temporary-directory in Dask's configuration to a "
                    "folder of a larger disk"
                ) from error
        self._size += len(step)


def _steps(name: str, stored: io.BytesIO) -> Iterator[bytes]:
    if name == "gzip":
        return iter(partial(gzip.GzipFile(fileobj=stored).read1, _STEP), b"")
    stream = pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), "zstd")
    return iter(partial(stream.read, _STEP), b"")
