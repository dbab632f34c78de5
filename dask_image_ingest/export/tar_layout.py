"""Layout of a shard: the headers of its members and where each of them lies, before a byte is read.

Headers are USTAR with no owner and no time, so that the same members always give the same bytes.
What USTAR cannot say (a name that is long or not ASCII, a size of 8 GiB or more) has a PAX header
in front.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress

import numpy as np
import pyarrow as pa

from dask_image_ingest.index import wds2idx_text

BLOCK = tarfile.BLOCKSIZE

# Two blocks of zeros end an archive, and zeros up to a whole record, as in those of GNU tar.
_END, _RECORD = 2 * BLOCK, tarfile.RECORDSIZE

# What a plain header holds.
_LONGEST, _LARGEST = 100, 8**11 - 1

Chunk = memoryview | bytearray | bytes

_TEMPLATE = np.frombuffer(tarfile.TarInfo().tobuf(tarfile.USTAR_FORMAT), np.uint8)
_SIZE, _CHECKSUM = slice(124, 135), slice(148, 156)


def headers(names: Sequence[str], sizes: np.ndarray, samples: np.ndarray) -> list[Chunk]:
    """The header of each member, with a PAX header in front where it needs one.

    Plain ones are made all at once: 40,000 of them take 60 ms, and ``TarInfo.tobuf`` takes 900.
    ``samples`` numbers the sample of each member.
    """
    encoded = [name.encode() for name in names]
    plain = np.array([len(name) <= _LONGEST and name.isascii() for name in encoded], bool)
    plain &= sizes <= _LARGEST
    blocks = _plain_headers(list(compress(encoded, plain)), sizes[plain])
    made = (blocks[at : at + BLOCK] for at in range(0, len(blocks), BLOCK))
    return [
        next(made)
        if is_plain
        else _odd_header(names[number], int(sizes[number]), int(samples[number]))
        for number, is_plain in enumerate(plain.tolist())
    ]


def header_sizes(names: Sequence[str], sizes: np.ndarray) -> np.ndarray:
    """Sizes of the headers that :func:`headers` makes."""
    taken = np.full(len(names), BLOCK, np.int64)
    for number, name in enumerate(names):
        if len(name) > _LONGEST or not name.isascii() or sizes[number] > _LARGEST:
            taken[number] = len(_odd_header(name, int(sizes[number]), 0))
    return taken


def padding(sizes: np.ndarray) -> np.ndarray:
    """Padding after each member, in bytes."""
    return -sizes % BLOCK


def tar_size(members: int) -> int:
    """The size of an archive whose members, with headers and padding, take this many bytes."""
    return -(-(members + _END) // _RECORD) * _RECORD


def room_for_members(limit: int) -> int:
    """Bytes for members, with headers and padding, in an archive of at most this size."""
    return max(limit // _RECORD * _RECORD - _END, 0)


def _plain_headers(names: list[bytes], sizes: np.ndarray) -> bytes:
    blocks = np.tile(_TEMPLATE, (len(names), 1))
    blocks[:, :_LONGEST] = np.array(names, f"S{_LONGEST}").view(np.uint8).reshape(-1, _LONGEST)
    blocks[:, _SIZE] = _octal(sizes, 11)
    # The checksum counts its own eight bytes as blanks.
    blocks[:, _CHECKSUM] = ord(" ")
    # Behind the size all plain headers are the same.
    sums = blocks[:, : _SIZE.stop].sum(axis=1, dtype=np.int64)
    sums += int(blocks[:1, _SIZE.stop :].sum(dtype=np.int64))
    blocks[:, 148:154] = _octal(sums, 6)
    blocks[:, 154] = 0
    return blocks.tobytes()


def _octal(numbers: np.ndarray, digits: int) -> np.ndarray:
    shifts = 3 * np.arange(digits - 1, -1, -1)
    return ((numbers[:, None] >> shifts & 7) + ord("0")).astype(np.uint8)


def _odd_header(name: str, size: int, sample: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    if name.isascii():
        with suppress(ValueError):  # too long even if split at a slash, or too large
            return info.tobuf(tarfile.USTAR_FORMAT)
    records = _pax_record(b"path", name.encode())
    if size > _LARGEST:
        records += _pax_record(b"size", str(size).encode())
    extended = tarfile.TarInfo("././@PaxHeader")
    extended.type, extended.size = tarfile.XHDTYPE, len(records)
    # For readers that know no PAX, as DALI's: a name with the right extension that is the same for
    # all members of a sample, and for those of no other one.
    extension = name[name.find(".", name.rfind("/") + 1) + 1 :].encode()[:60]
    info.name = f"PaxHeaders/{sample:08d}.{extension.decode(errors='ignore')}"
    info.size = size if size <= _LARGEST else 0
    return b"".join(
        (
            extended.tobuf(tarfile.USTAR_FORMAT),
            records,
            bytes(-len(records) % BLOCK),
            info.tobuf(tarfile.USTAR_FORMAT, "utf-8"),
        )
    )


def _pax_record(keyword: bytes, value: bytes) -> bytes:
    """A record, which begins with its own length."""
    rest = b" %b=%b\n" % (keyword, value)
    length = len(rest)
    while length != len(rest) + len(str(length)):
        length = len(rest) + len(str(length))
    return str(length).encode() + rest


@dataclass(frozen=True)
class Layout:
    """A shard before it is written; arrays and lists have an entry for each member, in order.

    Attributes
    ----------
    names
        As they stand in the tar.
    sample
        The row of the batch that a member belongs to.
    extensions
        Of the members.
    where, offsets, sizes
        Where a member's bytes are now (``SOURCE``, ``EXPANDED`` or ``COLUMN``), and how many.
    headers, positions
        What stands in front of a member, and where that begins in the shard.
    places
        Where its bytes begin in the shard.
    images
        For each sample, which member is its image; -1 where it has none.
    size
        Of the shard.
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
    size: int


def lay_out(batch: pa.RecordBatch) -> Layout:
    """Lay out the samples of a batch one behind the other."""
    members = batch.column("members")
    flat = members.flatten()
    starts = members.offsets.to_numpy() - members.offsets[0].as_py()
    sample = np.repeat(np.arange(len(batch)), np.diff(starts))
    keys = batch.column("key").to_pylist()
    extensions = flat.field("extension").to_pylist()
    names = [f"{keys[row]}.{e}" for row, e in zip(sample.tolist(), extensions, strict=True)]
    sizes = flat.field("size").to_numpy()
    made = headers(names, sizes, sample)
    lengths = np.array([len(header) for header in made], np.int64)
    ends = np.cumsum(lengths + sizes + padding(sizes))
    positions = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(names)]
    images = batch.column("image").fill_null(-1).to_numpy()
    return Layout(
        names=names,
        sample=sample,
        extensions=extensions,
        where=flat.field("where").to_numpy(),
        offsets=flat.field("offset").to_numpy(),
        sizes=sizes,
        headers=made,
        positions=positions,
        places=positions + lengths,
        images=np.where(images < 0, -1, images + starts[:-1]),
        size=tar_size(int(ends[-1]) if len(ends) else 0),
    )


def index_file(layout: Layout, samples: int) -> bytes:
    """The text of an ``.idx`` file, version 1.2: a line of each sample's members."""
    members = zip(
        layout.sample.tolist(),
        layout.extensions,
        layout.places.tolist(),
        layout.sizes.tolist(),
        layout.names,
        strict=True,
    )
    return wds2idx_text(samples, members)
