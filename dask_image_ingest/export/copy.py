"""Members from where they are to where they will be: each source opened once, read in order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa

from dask_image_ingest.errors import ShardError
from dask_image_ingest.export.choose import COLUMN, EXPANDED, SOURCE
from dask_image_ingest.export.header import Chunk
from dask_image_ingest.export.job import Job
from dask_image_ingest.export.layout import Layout
from dask_image_ingest.export.locate import version_of
from dask_image_ingest.export.output import AT_ONCE, Output
from dask_image_ingest.storage import LazyBytes, announce, find_shards, open_shard

__all__ = ["copy_members"]

# Members no farther apart are read together: so many bytes take no more time than a call does.
_GAP = 8 << 10

# Larger members are read in pieces.
_LARGE = 16 << 20

# Bytes at an offset.
Read = Callable[[int, int], Chunk]


def copy_members(
    file: int, layout: Layout, batch: pa.RecordBatch, columns: pa.Table | None, job: Job
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
    output = Output(file, layout)
    for (url, version), members in _by(batch, ("url", "version"), layout, SOURCE):
        with _open_source(url, version, job) as content:
            offsets, sizes = layout.offsets[members], layout.sizes[members]
            ends = (offsets + sizes).tolist()
            announce(content, zip(offsets.tolist(), ends, strict=True))
            _copy(members, layout, partial(_read, content), output)
    for (name,), members in _by(batch, ("expanded",), layout, EXPANDED):
        with job.place.open(name) as expanded:
            _copy(members, layout, lambda at, size: expanded.read_at(size, at), output)
    made = np.flatnonzero((layout.where == COLUMN) & (layout.sizes > 0)).tolist()
    for extension in sorted({layout.extensions[member] for member in made}):
        if columns is None:
            raise AssertionError("members are made of columns, and no column was kept")
        values = columns.column(f"made:{extension}")
        for member in made:
            if layout.extensions[member] == extension:
                output.write(member, values[int(layout.sample[member])].as_buffer())
    return output.finish()


def _copy(members: np.ndarray, layout: Layout, read: Read, output: Output) -> None:
    """Write some members of one source, in the order in which they lie there."""
    order = members[np.argsort(layout.offsets[members], kind="stable")]
    starts = layout.offsets[order].tolist()
    ends = (layout.offsets[order] + layout.sizes[order]).tolist()
    numbers = order.tolist()
    for first, stop in _together(starts, ends):
        start, end = starts[first], ends[stop - 1]
        if end - start > _LARGE:
            output.write_large(numbers[first], _pieces(read, start, end))
            continue
        data = memoryview(read(start, end - start))
        for number in range(first, stop):
            content = data[starts[number] - start : ends[number] - start]
            output.write(numbers[number], content)


def _together(starts: list[int], ends: list[int]) -> Iterator[tuple[int, int]]:
    """Which members are read together: the first of them, and the one after the last."""
    gaps = np.asarray(starts[1:]) - ends[:-1]
    apart = np.flatnonzero((gaps > _GAP) | (gaps < 0)) + 1
    for first, last in pairwise([0, *apart.tolist(), len(starts)]):
        while first < last:
            fitting = bisect_right(ends, starts[first] + AT_ONCE, first, last)
            stop = max(fitting, first + 1)
            yield first, stop
            first = stop


def _read(content: LazyBytes, offset: int, size: int) -> Chunk:
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
def _open_source(url: str, version: str, job: Job) -> Iterator[LazyBytes]:
    with open_shard(url, job.source_options) as content:
        now = version_of(find_shards(url, job.source_options)[0])
        if now != version:
            raise ShardError(
                f"{url} has changed since its samples were read. Read it again, and export that"
            )
        yield content
