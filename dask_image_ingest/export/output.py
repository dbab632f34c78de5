"""The file of a shard: members written where they belong, and hashed on their way if in order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

import numpy as np

from dask_image_ingest.errors import ShardError
from dask_image_ingest.export.header import Chunk
from dask_image_ingest.export.layout import Layout

__all__ = ["AT_ONCE", "Output"]

#: Bytes that are read, hashed and written at once: many for a call, and few enough that they stay
#: in the processor's cache, and that the C library has memory for the next ones: a new page costs
#: more than what is done with its bytes.
AT_ONCE = 256 << 10

# So often the disk is told to begin, so that little is left to wait for when the file is synced.
_BEHIND = 4 << 20

_ZEROS = memoryview(bytes(512))


class Output:
    """A new file that the members of a layout are written to, in whatever order they come.

    Those that follow each other are joined, hashed and written together; what comes out of order is
    read once more and hashed in the end. Empty members are written with the one that follows.

    Parameters
    ----------
    file
        A descriptor, to write and to read.
    """

    def __init__(self, file: int, layout: Layout) -> None:
        self._file = file
        self._layout = layout
        self._sizes = layout.sizes.tolist()
        self._fronts, self._positions = _fronts(layout)
        self._waiting: list[Chunk] = []
        self._begin = self._end = 0  # of what waits
        self._digest = hashlib.sha256()
        self._hashed = self._sent = 0  # up to here
        self._written = 0

    def write(self, member: int, content: Chunk) -> None:
        """Write one member, now or with those that follow."""
        size = self._sizes[member]
        if len(content) != size:
            raise self._wrong_size(member, len(content))
        front = self._fronts[member]
        position = self._positions[member]
        if position != self._end or position - self._begin >= AT_ONCE:
            self._flush(position)
        self._waiting += (front, content, _ZEROS[: -size % 512])
        self._end += len(front) + size + -size % 512

    def write_large(self, member: int, pieces: Iterable[Chunk]) -> None:
        """Write one member that is not in memory as a whole."""
        size = self._sizes[member]
        self._flush(self._positions[member])
        self._waiting.append(self._fronts[member])
        came = 0
        for piece in pieces:
            self._end += len(self._waiting[0])
            self._flush(self._end)
            self._waiting.append(piece)
            came += len(piece)
        if came != size:
            raise self._wrong_size(member, came)
        self._waiting.append(_ZEROS[: -size % 512])
        self._end += sum(map(len, self._waiting))

    def finish(self) -> str:
        """Write the end of the archive, and give the SHA-256 of the whole as hexadecimal digits."""
        position = self._positions[-1]
        if position != self._end:
            self._flush(position)
        end = self._fronts[-1]
        self._waiting += (end, bytes(self._layout.size - position - len(end)))
        self._flush(self._layout.size)
        if self._written != self._layout.size:
            raise AssertionError(f"{self._written} bytes of {self._layout.size} were written")
        buffer = memoryview(bytearray(AT_ONCE if self._hashed < self._written else 0))
        while size := os.preadv(self._file, [buffer], self._hashed):
            self._digest.update(buffer[:size])
            self._hashed += size
        return self._digest.hexdigest()

    def _flush(self, then: int) -> None:
        """Write what waits, and go on elsewhere."""
        block = memoryview(b"".join(self._waiting))
        position = self._begin
        if position == self._hashed:
            self._digest.update(block)
            self._hashed += len(block)
        self._written += len(block)
        while block:
            written = os.pwrite(self._file, block, position)
            block = block[written:]
            position += written
        if self._hashed - self._sent >= _BEHIND:
            # Linux begins to write such pages to the disk, and waits for none.
            count = self._hashed - self._sent
            os.posix_fadvise(self._file, self._sent, count, os.POSIX_FADV_DONTNEED)
            self._sent = self._hashed
        self._waiting = []
        self._begin = self._end = then

    def _wrong_size(self, member: int, size: int) -> ShardError:
        return ShardError(
            f"{self._layout.names[member]} has {size} bytes where {self._sizes[member]} were "
            "planned"
        )


def _fronts(layout: Layout) -> tuple[list[Chunk], list[int]]:
    """What stands in front of each member's bytes and where it begins; and of the archive's end.

    To this belong empty members before it, whole.
    """
    end = layout.places[-1:] + layout.sizes[-1:] + -layout.sizes[-1:] % 512
    fronts: list[Chunk] = [*layout.headers, b""]
    positions: list[int] = [*layout.positions.tolist(), *(end.tolist() or [0])]
    first = None
    for member in np.flatnonzero(layout.sizes == 0).tolist():
        if first is None:
            first = member
        if member + 1 == len(layout.sizes) or layout.sizes[member + 1]:
            fronts[member + 1] = b"".join(fronts[first : member + 2])
            positions[member + 1] = positions[first]
            first = None
    return fronts, positions
