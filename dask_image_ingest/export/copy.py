"""Members from where they are to where they will be: each source opened once, read in order."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from dask_image_ingest.errors import ShardError
from dask_image_ingest.export.choose import COLUMN, EXPANDED, SOURCE
from dask_image_ingest.export.header import Chunk
from dask_image_ingest.export.job import Job
from dask_image_ingest.export.layout import Layout
from dask_image_ingest.export.locate import version_of
from dask_image_ingest.storage import find_shards, open_shard

__all__ = ["copy_members"]

# What one system call takes, and what may be on its way in memory.
_BUFFERS, _BYTES = 1000, 16 << 20

_ZEROS = memoryview(bytes(512))

# Bytes at an offset.
Read = Callable[[int, int], Chunk]


def copy_members(
    file: int, layout: Layout, batch: pa.RecordBatch, columns: pa.Table | None, job: Job
) -> None:
    """Write every member of a layout, with its header in front and zeros behind, to a file.

    Parameters
    ----------
    file
        A descriptor. What lies between the members and the size of the layout are zeros.
    columns
        The bytes of members that are made, as ``made:<extension>``, a row for each sample.

    Raises
    ------
    ShardError
        If a source has changed since its members were located.
    """
    output = _Output(file, layout)
    for member in np.flatnonzero(layout.sizes == 0).tolist():
        output.write(member, b"")
    output.flush()
    for (url, version), members in _by(batch, ("url", "version"), layout, SOURCE):
        with _open_source(url, version, job) as read:
            output.copy(members, read)
    for (name,), members in _by(batch, ("expanded",), layout, EXPANDED):
        with job.place.open(name) as expanded:
            output.copy(members, lambda offset, size: expanded.read_at(size, offset))
    made = np.flatnonzero(layout.where == COLUMN).tolist()
    for extension in sorted({layout.extensions[member] for member in made}):
        if columns is None:
            raise AssertionError("members are made of columns, and no column was kept")
        values = columns.column(f"made:{extension}")
        for member in made:
            if layout.extensions[member] == extension:
                output.write(member, values[int(layout.sample[member])].as_buffer())
        output.flush()
    os.truncate(file, layout.size)


class _Output:
    """A file that members are written to, those that lie side by side in one system call."""

    def __init__(self, file: int, layout: Layout) -> None:
        self._file = file
        self._layout = layout
        self._sizes = layout.sizes.tolist()
        self._positions = layout.positions.tolist()
        self._waiting: list[Chunk] = []
        self._bytes = 0
        self._end = 0

    def copy(self, members: np.ndarray, read: Read) -> None:
        """Write some members, in the order in which they lie in their source."""
        offsets = self._layout.offsets[members]
        order = np.argsort(offsets, kind="stable")
        for member, offset in zip(members[order].tolist(), offsets[order].tolist(), strict=True):
            self.write(member, read(offset, self._sizes[member]))
        self.flush()

    def write(self, member: int, content: Chunk) -> None:
        """Write one member, now or with those that follow."""
        size, position = self._sizes[member], self._positions[member]
        if len(content) != size:
            raise ShardError(
                f"{self._layout.names[member]} has {len(content)} bytes where {size} were planned"
            )
        if position != self._end or len(self._waiting) > _BUFFERS or self._bytes > _BYTES:
            self.flush()
            self._end = position
        header = self._layout.headers[member]
        self._waiting += (header, content, _ZEROS[: -size % 512])
        self._bytes += size
        self._end += len(header) + size + -size % 512

    def flush(self) -> None:
        """Write what waits."""
        waiting = [chunk for chunk in self._waiting if len(chunk)]
        position = self._end - sum(map(len, waiting))
        while waiting:
            try:
                written = os.pwritev(self._file, waiting, position)
            except OSError as error:
                if error.errno == errno.EFAULT:  # a mapped source has become shorter
                    raise ShardError("a source shard changed while it was copied") from error
                raise
            position += written
            while waiting and written >= len(waiting[0]):
                written -= len(waiting.pop(0))
            if written:
                waiting[0] = waiting[0][written:]
        self._waiting = []
        self._bytes = 0


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
def _open_source(url: str, version: str, job: Job) -> Iterator[Read]:
    with open_shard(url, job.source_options) as content:
        now = version_of(find_shards(url, job.source_options)[0])
        if now != version:
            raise ShardError(
                f"{url} has changed since its samples were read. Read it again, and export that"
            )
        yield lambda offset, size: content[offset : offset + size]
