"""Writing of a shard: its layout, computed before a byte is read, and a tar of copied members.

Members are copied from their sources, each opened once and read in order; they are written in any
order, and only those in flight are in memory. Headers are USTAR without owner and time, so that the
same members always give the same bytes. A PAX header comes first where USTAR can't express a name
(long, or not ASCII) or a size (8 GiB or more).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import compress, pairwise
from tarfile import BLOCKSIZE, RECORDSIZE
from typing import TypeVar

import numpy as np
import pyarrow as pa

from dask_image_ingest.computing import WRITTEN, count
from dask_image_ingest.errors import ShardError
from dask_image_ingest.export.files import (
    SHARD_ROWS,
    ExportContext,
    ShardRecord,
    done_name,
    file_names,
    has_recorded_sizes,
    parquet_bytes,
    read_batch,
    take_rows,
)
from dask_image_ingest.export.member_selection import COLUMN, EXPANDED, SOURCE
from dask_image_ingest.storage import ByteReader, MemoryReader, find_shards, open_shard
from dask_image_ingest.storage.output import parsed, refuse_other_run
from dask_image_ingest.url_secrets import url_identity

# An archive ends with two blocks of zeros, padded to a whole record, as by GNU tar.
_END = 2 * BLOCKSIZE

# Longest name and largest size in a plain header.
_LONGEST, _LARGEST = 100, 8**11 - 1

Chunk = memoryview | bytearray | bytes

_TEMPLATE = np.frombuffer(tarfile.TarInfo().tobuf(tarfile.USTAR_FORMAT), np.uint8)
_SIZE, _CHECKSUM = slice(124, 135), slice(148, 156)


def headers(names: Sequence[str], sizes: np.ndarray, samples: np.ndarray) -> list[Chunk]:
    """The header of each member, preceded by a PAX header if it needs one.

    Plain headers are vectorized: 40,000 take 60 ms, with ``TarInfo.tobuf`` 900 ms. ``samples`` has
    the sample number of each member.
    """
    plain = _fits_plain_header(names, sizes)
    blocks = _plain_headers([name.encode() for name in compress(names, plain)], sizes[plain])
    plain_headers = (blocks[at : at + BLOCKSIZE] for at in range(0, len(blocks), BLOCKSIZE))
    return [
        next(plain_headers)
        if is_plain
        else _extended_header(names[number], int(sizes[number]), int(samples[number]))
        for number, is_plain in enumerate(plain.tolist())
    ]


_Sizes = TypeVar("_Sizes", int, np.ndarray)


def padding(sizes: _Sizes) -> _Sizes:
    """Bytes of padding after content of this size."""
    return -sizes % BLOCKSIZE


def tar_size(members: int) -> int:
    """Size of an archive, given the bytes of its members with headers and padding."""
    return -(-(members + _END) // RECORDSIZE) * RECORDSIZE


def room_for_members(limit: int) -> int:
    """Most bytes of members, with headers and padding, in an archive of at most ``limit`` bytes."""
    return max(limit // RECORDSIZE * RECORDSIZE - _END, 0)


def _fits_plain_header(names: Sequence[str], sizes: np.ndarray) -> np.ndarray:
    """Mask of the members that a header without PAX can express."""
    fits = np.array([len(name) <= _LONGEST and name.isascii() for name in names], bool)
    return fits & (sizes <= _LARGEST)


def _plain_headers(names: list[bytes], sizes: np.ndarray) -> bytes:
    blocks = np.tile(_TEMPLATE, (len(names), 1))
    blocks[:, :_LONGEST] = np.array(names, f"S{_LONGEST}").view(np.uint8).reshape(-1, _LONGEST)
    blocks[:, _SIZE] = _octal(sizes, 11)
    # The eight bytes of the checksum itself count as blanks.
    blocks[:, _CHECKSUM] = ord(" ")
    # After the size, all plain headers are equal: sum the first one only.
    sums = blocks[:, : _SIZE.stop].sum(axis=1, dtype=np.int64)
    sums += int(blocks[:1, _SIZE.stop :].sum(dtype=np.int64))
    blocks[:, 148:154] = _octal(sums, 6)
    blocks[:, 154] = 0
    return blocks.tobytes()


def _octal(numbers: np.ndarray, digits: int) -> np.ndarray:
    shifts = 3 * np.arange(digits - 1, -1, -1)
    return ((numbers[:, None] >> shifts & 7) + ord("0")).astype(np.uint8)


def _extended_header(name: str, size: int, sample: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    if name.isascii():
        with suppress(ValueError):  # too long even when split at a slash, or too large
            return info.tobuf(tarfile.USTAR_FORMAT)
    # A short name for readers without PAX support, such as DALI's, so that they still group the
    # member correctly: unique to the sample, with the right extension.
    extension = name[name.find(".", name.rfind("/") + 1) + 1 :].encode()[:60]
    info.name = f"PaxHeaders/{sample:08d}.{extension.decode(errors='ignore')}"
    info.pax_headers = {"path": name}
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8")


@dataclass(frozen=True)
class Layout:
    """Layout of a shard; arrays and lists have one entry per member, in order of the shard."""

    names: Sequence[str]  # in the tar
    sample: np.ndarray  # the row of the batch that the member belongs to
    extensions: Sequence[str]
    where: np.ndarray  # where its bytes are now: ``SOURCE``, ``EXPANDED`` or ``COLUMN``
    offsets: np.ndarray
    sizes: np.ndarray
    headers: Sequence[Chunk]
    positions: np.ndarray  # offset of its header in the new shard
    places: np.ndarray  # offset of its bytes in the new shard
    images: np.ndarray  # for each sample, the number of the member that is its image; -1 for none
    end: int  # of the last member
    size: int  # of the shard


def lay_out(batch: pa.RecordBatch) -> Layout:
    """Lay out the samples of a batch, one after the other."""
    members = batch.column("members")
    flat = members.flatten()
    starts = members.offsets.to_numpy() - members.offsets[0].as_py()
    sample = np.repeat(np.arange(len(batch)), np.diff(starts))
    keys = batch.column("key").to_pylist()
    extensions = flat.field("extension").to_pylist()
    names = [f"{keys[row]}.{e}" for row, e in zip(sample.tolist(), extensions, strict=True)]
    sizes = flat.field("size").to_numpy()
    member_headers = headers(names, sizes, sample)
    lengths = np.array([len(header) for header in member_headers], np.int64)
    ends = np.cumsum(lengths + sizes + padding(sizes))
    positions = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(names)]
    end = int(ends[-1]) if len(ends) else 0
    images = batch.column("image").fill_null(-1).to_numpy()
    return Layout(
        names=names,
        sample=sample,
        extensions=extensions,
        where=flat.field("where").to_numpy(),
        offsets=flat.field("offset").to_numpy(),
        sizes=sizes,
        headers=member_headers,
        positions=positions,
        places=positions + lengths,
        images=np.where(images < 0, -1, images + starts[:-1]),
        end=end,
        size=tar_size(end),
    )


#: Bytes that are read, hashed and written at once. Few enough to stay in the CPU's cache, and for
#: the C library to reuse the memory: a page fault costs more than all work on a page.
AT_ONCE = 256 << 10

# Writeback is started every so many bytes, so that the final fsync has little to wait for.
_BEHIND = 4 << 20

_ZEROS = memoryview(bytes(BLOCKSIZE))


class TarWriter:
    """Writer of a new tar with a given layout, whose members may arrive in any order.

    Consecutive members are joined, hashed and written together; bytes that arrive out of order are
    read again and hashed in the end.
    """

    def __init__(self, file: int, layout: Layout) -> None:
        self._file = file
        self._layout = layout
        self._sizes = layout.sizes.tolist()
        self._positions = layout.positions.tolist()
        self._padding = padding(layout.sizes).tolist()
        #: Chunks that are not written yet, which belong at `_begin` to `_end` of the file.
        self._pending: list[Chunk] = []
        self._begin = self._end = 0
        self._digest = hashlib.sha256()
        #: The file is hashed up to here.
        self._hashed = 0
        #: Writeback was started up to here.
        self._sent = 0
        self._written = 0

    def write(self, member: int, pieces: Iterable[Chunk]) -> None:
        """Write one member, now or together with those that follow; few pieces are in memory."""
        position = self._positions[member]
        if position != self._end or position - self._begin >= AT_ONCE:
            self._flush(position)
        header = self._layout.headers[member]
        self._pending.append(header)
        size = 0
        for piece in pieces:
            self._pending.append(piece)
            size += len(piece)
            if len(piece) >= AT_ONCE:
                self._flush(position + len(header) + size)
        if size != self._sizes[member]:
            raise ShardError(
                f"{self._layout.names[member]} has {size} bytes where {self._sizes[member]} were "
                "planned"
            )
        self._pending.append(_ZEROS[: self._padding[member]])
        self._end = position + len(header) + size + self._padding[member]

    def finish(self) -> str:
        """Write the end of the archive; the SHA-256 of the whole as hexadecimal digits."""
        layout = self._layout
        if self._end != layout.end:
            self._flush(layout.end)
        self._pending.append(bytes(layout.size - layout.end))
        self._flush(layout.size)
        if self._written != layout.size:
            raise AssertionError(f"{self._written} bytes of {layout.size} were written")
        buffer = memoryview(bytearray(AT_ONCE if self._hashed < self._written else 0))
        while size := os.preadv(self._file, [buffer], self._hashed):
            self._digest.update(buffer[:size])
            self._hashed += size
        return self._digest.hexdigest()

    def _flush(self, next_position: int) -> None:
        """Write the pending chunks; the next ones belong at ``next_position``."""
        block = memoryview(b"".join(self._pending))
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
            # On Linux this starts writeback of dirty pages without waiting for it.
            count = self._hashed - self._sent
            os.posix_fadvise(self._file, self._sent, count, os.POSIX_FADV_DONTNEED)
            self._sent = self._hashed
        self._pending = []
        self._begin = self._end = next_position


# Members at most so many bytes apart are read together, which costs less than another call.
_GAP = 8 << 10

# Larger members are read in pieces of this size.
_LARGE = 16 << 20

# In place of a source of which only empty members are copied.
_EMPTY = MemoryReader(memoryview(b""))

# Reads bytes, given offset and size.
Read = Callable[[int, int], Chunk]


def copy_members(
    file: int,
    layout: Layout,
    batch: pa.RecordBatch,
    columns: pa.Table | None,
    context: ExportContext,
) -> str:
    """Write every member of a layout, with header and padding, to an empty file; its SHA-256.

    ``columns`` has the bytes of members from columns, as ``made:<extension>``, for each sample.
    """
    tar = TarWriter(file, layout)
    for (url, version), members in _group_members(batch, ("url", "version"), layout, SOURCE):
        offsets, sizes = layout.offsets[members], layout.sizes[members]
        source = _open_source(url, version, context) if sizes.any() else nullcontext(_EMPTY)
        with source as content:
            ends = (offsets + sizes).tolist()
            ranges = zip(offsets.tolist(), ends, strict=True)
            content.prefetch((start, end) for start, end in ranges if start < end)
            _copy(members, layout, lambda at, size: content[at : at + size], tar)
    for (name,), members in _group_members(batch, ("expanded",), layout, EXPANDED):
        with context.output.open(name) as expanded:
            _copy(members, layout, lambda at, size: expanded.read_at(size, at), tar)
    from_columns = np.flatnonzero(layout.where == COLUMN).tolist()
    for extension in sorted({layout.extensions[member] for member in from_columns}):
        if columns is None:
            raise AssertionError("there are members from columns, and no column was staged")
        values = columns.column(f"made:{extension}")
        for member in from_columns:
            if layout.extensions[member] == extension:
                tar.write(member, [memoryview(values[int(layout.sample[member])].as_buffer())])
    return tar.finish()


def _copy(members: np.ndarray, layout: Layout, read: Read, tar: TarWriter) -> None:
    """Copy some members of one source, in the order of the source."""
    order = members[np.argsort(layout.offsets[members], kind="stable")]
    starts = layout.offsets[order].tolist()
    ends = (layout.offsets[order] + layout.sizes[order]).tolist()
    numbers = order.tolist()
    for first, stop in _coalesce(starts, ends):
        start, end = starts[first], ends[stop - 1]
        if end - start > _LARGE:
            tar.write(
                numbers[first],
                (read(at, min(_LARGE, end - at)) for at in range(start, end, _LARGE)),
            )
            continue
        data = memoryview(read(start, end - start))
        for number in range(first, stop):
            tar.write(numbers[number], [data[starts[number] - start : ends[number] - start]])


def _coalesce(starts: list[int], ends: list[int]) -> Iterator[tuple[int, int]]:
    """Coalesce members into reads: yields the first member of each, and the one after its last."""
    gaps = np.asarray(starts[1:]) - ends[:-1]
    apart = np.flatnonzero((gaps > _GAP) | (gaps < 0)) + 1
    for first, last in pairwise([0, *apart.tolist(), len(starts)]):
        while first < last:
            stop = max(bisect_right(ends, starts[first] + AT_ONCE, first, last), first + 1)
            yield first, stop
            first = stop


def _group_members(
    batch: pa.RecordBatch, columns: tuple[str, ...], layout: Layout, where: int
) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Group the members of this ``where`` by columns of their samples; numbers of each."""
    members = np.flatnonzero(layout.where == where)
    values = list(zip(*(batch.column(name).to_pylist() for name in columns), strict=True))
    groups: dict[tuple[str, ...], list[int]] = {}
    for member, row in zip(members.tolist(), layout.sample[members].tolist(), strict=True):
        groups.setdefault(values[row], []).append(member)
    for group, numbers in groups.items():
        yield group, np.array(numbers)


@contextmanager
def _open_source(url: str, version: str, context: ExportContext) -> Iterator[ByteReader]:
    with open_shard(url, context.source_options) as content:
        if find_shards(url, context.source_options)[0].state != version:
            raise ShardError(
                f"{url} has changed since its samples were read. Read it again, and export that"
            )
        yield content


def write_shard(number: int, context: ExportContext) -> ShardRecord:
    """Write a shard, its sidecar and its index, unless an earlier run did.

    Files are committed after all are complete, the shard last: a shard that exists has its sidecar
    and index.
    """
    finished = _finished(number, context)
    if finished:
        return finished
    output, options = context.output, context.options
    *beside, name = file_names(options.template, options.sidecar, options.index, number)
    try:
        batch = read_batch(output, SHARD_ROWS, number)
        columns = take_rows(output, batch)
    except OSError:
        refuse_other_run(output, context.run)  # it has removed the staged files of this run
        raise
    layout = lay_out(batch)
    contents = _contents(beside, batch, layout, columns, f"{context.url}/{name}")
    with output.scratch(name) as file:
        sha256 = copy_members(file.fileno(), layout, batch, columns, context)
        record = {
            "name": name,
            "samples": len(batch),
            "members": len(layout.names),
            "bytes": layout.size,
            "sha256": sha256,
            "beside": [
                {"name": n, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                for n, data in contents.items()
            ],
        }
        check = partial(refuse_other_run, output, context.run)
        for beside_name, content in contents.items():
            output.put(beside_name, content, check)
        output.commit(file, name, check)
    count(WRITTEN, len(batch))
    output.fsync()
    output.put(done_name(number), json.dumps(record).encode(), check)
    return record


def _finished(number: int, context: ExportContext) -> ShardRecord | None:
    """Record of a shard that an earlier run finished; None if files are missing."""
    record = parsed(context.output.read(done_name(number)))
    return record if record and has_recorded_sizes(record, context.output.size) else None


def _contents(
    names: list[str], batch: pa.RecordBatch, layout: Layout, columns: pa.Table | None, url: str
) -> dict[str, bytes]:
    """Contents of the files beside a shard, by name."""
    contents = {}
    for name in names:
        if name.endswith(".idx"):
            members = zip(
                layout.sample.tolist(),
                layout.extensions,
                layout.places.tolist(),
                layout.sizes.tolist(),
                layout.names,
                strict=True,
            )
            contents[name] = _wds2idx_text(len(batch), members)
        elif columns is not None:
            schema = pa.ipc.read_schema(pa.py_buffer(batch.schema.metadata[b"sidecar"]))
            contents[name] = sidecar(columns, schema, layout, url, batch.column("key"))
    return contents


def sidecar(
    columns: pa.Table, schema: pa.Schema, layout: Layout, url: str, keys: pa.Array
) -> bytes:
    """The columns of a shard's samples as a parquet file.

    ``__key__`` is replaced by the new keys, and ``__url__``, ``offset`` and ``nbytes`` by those of
    the image in the new shard at ``url``, null without an image, so that ``decode_images`` finds
    it.
    """
    arrays = [
        columns.column(field.name).cast(field.type)
        if field.name in columns.column_names
        else pa.nulls(len(columns), field.type)
        for field in schema
    ]
    table = pa.table(arrays, schema=schema)
    # Every sample has a member, so index -1 of a missing image is valid; its value is masked.
    absent = layout.images < 0
    replaced = {
        "__key__": keys.cast(schema.field("__key__").type),
        "__url__": pa.array([url_identity(url)] * len(table), pa.string()),
        "offset": pa.array(layout.places[layout.images], pa.int64(), mask=absent),
        "nbytes": pa.array(layout.sizes[layout.images], pa.int64(), mask=absent),
    }
    for name, values in replaced.items():
        number = schema.get_field_index(name)
        if number < 0:
            table = table.append_column(name, values)
        else:
            table = table.set_column(number, name, values)
    return parquet_bytes(table)


_BLANK = re.compile(r"[ \t\n\v\f\r]")


def _wds2idx_text(samples: int, members: Iterable[tuple[int, str, int, int, str]]) -> bytes:
    """An index for DALI as of wds2idx, version 1.2: a line per sample, of its members.

    Parameters
    ----------
    members
        Sample, extension, offset, size and name of each.
    """
    lines: list[list[str]] = [[] for _ in range(samples)]
    for sample, extension, offset, size, name in members:
        # Escaped as by ``tar -t``; readers use the name in messages only.
        shown = _BLANK.sub(lambda blank: f"\\{ord(blank[0]):03o}", name)
        lines[sample].append(f"{extension} {offset} {size} {shown}")
    return "\n".join([f"v1.2 {samples}", *map(" ".join, lines), ""]).encode()
