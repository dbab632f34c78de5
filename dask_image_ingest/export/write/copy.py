"""Copying members into a shard: each source is opened once and read in order."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa

from dask_image_ingest.errors import ShardError
from dask_image_ingest.export.member_selection import COLUMN, EXPANDED, SOURCE
from dask_image_ingest.export.options import ExportContext
from dask_image_ingest.export.tar_layout import Chunk, Layout
from dask_image_ingest.storage import ByteReader, find_shards, open_shard

# Members no farther apart are read together: so many bytes take no more time than a call does.
_GAP = 8 << 10

# Larger members are read in pieces.
_LARGE = 16 << 20

# Bytes at an offset.
Read = Callable[[int, int], Chunk]


def copy_members(
    file: int,
    layout: Layout,
    batch: pa.RecordBatch,
    columns: pa.Table | None,
    context: ExportContext,
) -> str:
    """Write every member of a layout, with its header in front and zeros behind, to a file.

    Parameters
    ----------
    file
        A descriptor of an empty file, to write and to read.
    columns
        The bytes of members that are made, as ``made:<extension>``, a row for each sample.

    Returns
    -------
    str
        The SHA-256 of the file, as hexadecimal digits.

    Raises
    ------
    ShardError
        If a source has changed since its members were located.
    """
    tar = TarWriter(file, layout)
    for (url, version), members in _by(batch, ("url", "version"), layout, SOURCE):
        with _open_source(url, version, context) as content:
            offsets, sizes = layout.offsets[members], layout.sizes[members]
            ends = (offsets + sizes).tolist()
            content.prefetch(zip(offsets.tolist(), ends, strict=True))
            _copy(members, layout, partial(_read, content), tar)
    for (name,), members in _by(batch, ("expanded",), layout, EXPANDED):
        with context.output.open(name) as expanded:
            _copy(members, layout, lambda at, size: expanded.read_at(size, at), tar)
    made = np.flatnonzero((layout.where == COLUMN) & (layout.sizes > 0)).tolist()
    for extension in sorted({layout.extensions[member] for member in made}):
        if columns is None:
            raise AssertionError("members are made of columns, and no column was kept")
        values = columns.column(f"made:{extension}")
        for member in made:
            if layout.extensions[member] == extension:
                tar.write(member, values[int(layout.sample[member])].as_buffer())
    return tar.finish()


def _copy(members: np.ndarray, layout: Layout, read: Read, tar: TarWriter) -> None:
    """Write some members of one source, in the order in which they lie there."""
    order = members[np.argsort(layout.offsets[members], kind="stable")]
    starts = layout.offsets[order].tolist()
    ends = (layout.offsets[order] + layout.sizes[order]).tolist()
    numbers = order.tolist()
    for first, stop in _together(starts, ends):
        start, end = starts[first], ends[stop - 1]
        if end - start > _LARGE:
            tar.write_large(numbers[first], _pieces(read, start, end))
            continue
        data = memoryview(read(start, end - start))
        for number in range(first, stop):
            content = data[starts[number] - start : ends[number] - start]
            tar.write(numbers[number], content)


def _together(starts: list[int], ends: list[int]) -> Iterator[tuple[int, int]]:
    """Coalesce members that are read together; yields the first, and the one after the last."""
    gaps = np.asarray(starts[1:]) - ends[:-1]
    apart = np.flatnonzero((gaps > _GAP) | (gaps < 0)) + 1
    for first, last in pairwise([0, *apart.tolist(), len(starts)]):
        while first < last:
            fitting = bisect_right(ends, starts[first] + AT_ONCE, first, last)
            stop = max(fitting, first + 1)
            yield first, stop
            first = stop


def _read(content: ByteReader, offset: int, size: int) -> Chunk:
    return content[offset : offset + size]


def _pieces(read: Read, start: int, end: int) -> Iterator[Chunk]:
    for piece in range(start, end, _LARGE):
        yield read(piece, min(_LARGE, end - piece))


def _by(
    batch: pa.RecordBatch, columns: tuple[str, ...], layout: Layout, where: int
) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Members that are at one kind of place, by what some columns say of their samples."""
    members = np.flatnonzero((layout.where == where) & (layout.sizes > 0))
    said = list(zip(*(batch.column(name).to_pylist() for name in columns), strict=True))
    groups: dict[tuple[str, ...], list[int]] = {}
    for member, row in zip(members.tolist(), layout.sample[members].tolist(), strict=True):
        groups.setdefault(said[row], []).append(member)
    for group, found in groups.items():
        yield group, np.array(found)


@contextmanager
def _open_source(url: str, version: str, context: ExportContext) -> Iterator[ByteReader]:
    with open_shard(url, context.source_options) as content:
        now = find_shards(url, context.source_options)[0].state
        if now != version:
            raise ShardError(
                f"{url} has changed since its samples were read. Read it again, and export that"
            )
        yield content


#: Bytes that are read, hashed and written at once: many for a call, and few enough that they stay
#: in the processor's cache, and that the C library has memory for the next ones: a new page costs
#: more than what is done with its bytes.
AT_ONCE = 256 << 10

# So often the disk is told to begin, so that little is left to wait for when the file is synced.
_BEHIND = 4 << 20

_ZEROS = memoryview(bytes(512))


class TarWriter:
    """A new file that the members of a layout are written to, in whatever order they come.

    Those that follow each other are joined, hashed and written together; what comes out of order is
    read once more and hashed in the end. Empty members are written with the one that follows.
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
    """Headers in front of each member, with positions; the last is the archive's end.

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
