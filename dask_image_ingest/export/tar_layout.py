"""The tar of a shard: the layout, computed before a byte is read, and a writer of its members.

Headers are USTAR without owner and time, so that the same members always give the same bytes.
A PAX header comes first where USTAR can't express a name (long, or not ASCII) or a size (8 GiB or
more).
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from tarfile import BLOCKSIZE, RECORDSIZE
from typing import TypeVar

import numpy as np
import pyarrow as pa

from dask_image_ingest.errors import ShardError

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
    """Layout of a shard; arrays and lists have one entry per member, in order of the shard.

    Attributes
    ----------
    names
        Names in the tar.
    sample
        The row of the batch that the member belongs to.
    extensions
        Extensions, without leading dots.
    where, offsets, sizes
        Where the member's bytes are now (``SOURCE``, ``EXPANDED`` or ``COLUMN``), and how many.
    headers, positions
        The member's header, and its offset in the new shard.
    places
        Offset of the member's bytes in the new shard.
    images
        For each sample, the number of the member that is its image; -1 for none.
    end, size
        End of the last member, and size of the shard, in bytes.
    """

    names: Sequence[str]
    sample: np.ndarray
    extensions: Sequence[str]
    where: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    headers: Sequence[Chunk]
    positions: np.ndarray
    places: np.ndarray
    images: np.ndarray
    end: int
    size: int


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

    def write(self, member: int, *pieces: Chunk) -> None:
        """Write one member, now or together with those that follow."""
        self.write_large(member, pieces)

    def write_large(self, member: int, pieces: Iterable[Chunk]) -> None:
        """Write one member, of which few pieces are in memory."""
        position = self._positions[member]
        if position != self._end:
            self._flush(position)
        self._append(self._layout.headers[member])
        size = 0
        for piece in pieces:
            self._append(piece)
            size += len(piece)
        if size != self._sizes[member]:
            raise ShardError(
                f"{self._layout.names[member]} has {size} bytes where {self._sizes[member]} were "
                "planned"
            )
        self._append(_ZEROS[: self._padding[member]])

    def _append(self, chunk: Chunk) -> None:
        self._pending.append(chunk)
        self._end += len(chunk)
        if self._end - self._begin >= AT_ONCE:
            self._flush(self._end)

    def finish(self) -> str:
        """Write the end of the archive; the SHA-256 of the whole as hexadecimal digits."""
        layout = self._layout
        if self._end != layout.end:
            self._flush(layout.end)
        self._append(bytes(layout.size - layout.end))
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
