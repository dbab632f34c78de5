"""Assignment of samples to shards, made of pointers and independent of partitions.

A plan is a table of one row for each sample in the order in which they are written, 155 bytes for
one of four members, and the row at which each shard begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.export.options import Options
from dask_image_ingest.export.plan.locate import Located
from dask_image_ingest.export.tar_layout import header_sizes, padding, room_for_members

# Rows whose names are made together.
_CHUNK = 1 << 16


@dataclass(frozen=True)
class ShardPlan:
    """Samples in the order in which they are written.

    Attributes
    ----------
    rows
        ``key``, ``offset``, ``part``, ``batch`` and ``row`` of the staged rows, ``members`` and
        ``image`` of what was located, and ``source``, which counts in ``sources``.
    sources
        The shards that they come from.
    starts
        The row at which each shard begins.
    """

    rows: pa.Table
    sources: Sequence[Located]
    starts: np.ndarray

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.starts)

    @property
    def counts(self) -> list[int]:
        """Number of samples of each shard."""
        counts: list[int] = np.diff(self.starts, append=len(self.rows)).tolist()
        return counts

    def batches(self) -> Iterator[pa.RecordBatch]:
        """A batch for the task of each shard."""
        for start, count in zip(self.starts.tolist(), self.counts, strict=True):
            rows = self.rows.slice(start, count)
            codes = rows.column("source").to_numpy()
            of_source = {
                "url": pa.array([self.sources[code].url for code in codes], pa.string()),
                "version": pa.array([self.sources[code].version for code in codes], pa.string()),
                "expanded": pa.array([self.sources[code].expanded for code in codes], pa.string()),
            }
            for name, values in of_source.items():
                rows = rows.append_column(name, values)
            part = rows.column("part").cast(pa.string())
            rows = rows.set_column(rows.column_names.index("part"), "part", part)
            yield rows.drop_columns(["source"]).combine_chunks().to_batches()[0]

    @cached_property
    def samples_digest(self) -> str:
        """Stands for the samples and their order, and the members of each."""
        digest = hashlib.sha256()
        for start in range(0, len(self.rows), _CHUNK):
            rows = self.rows.slice(start, _CHUNK)
            codes = rows.column("source").to_numpy()
            members = rows.column("members").combine_chunks()
            flat = members.flatten()
            for texts in (
                rows.column("key").to_pylist(),
                [self.sources[code].url for code in codes],
                flat.field("extension").to_pylist(),
            ):
                digest.update("\0".join(texts).encode("utf-8", "surrogatepass"))
            for numbers in (
                members.value_lengths(),
                flat.field("size"),
                pc.fill_null(rows.column("offset"), -1),
            ):
                digest.update(numbers.to_numpy(zero_copy_only=False).astype("<i8").tobytes())
        digest.update(np.asarray(self.starts, "<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def sources_digest(self) -> str:
        """Stands for the shards that the samples come from, as they were."""
        told = sorted(f"{source.url}\0{source.version}" for source in self.sources)
        return hashlib.sha256("\n".join(told).encode()).hexdigest()


def make_plan(
    rows: pa.Table, sources: Sequence[Located], options: Options
) -> tuple[ShardPlan, np.ndarray]:
    """Put samples in order and into shards.

    Parameters
    ----------
    rows, sources
        As in the plan, in the order of the frame; and ``number``, the row of the frame.

    Returns
    -------
    ShardPlan
    numpy.ndarray
        The rows of the frame whose key their shard has already, and which are in no shard.
    """
    if options.shuffle is not None:
        rows = rows.take(pa.array(_shuffled(rows, sources, options.shuffle)))
    sizes = _tar_bytes(rows) if options.bytes_per_shard else None
    keys = _as_paths(rows.column("key"))
    repeated = []
    kept = np.arange(len(rows))
    while True:
        starts = _starts(len(kept), None if sizes is None else sizes[kept], options)
        repeats = _repeated(keys[kept], starts)
        if not repeats.any():
            break
        repeated.append(kept[repeats])
        kept = kept[~repeats]
    numbers = rows.column("number").to_numpy()
    left_out = numbers[np.concatenate(repeated)] if repeated else numbers[:0]
    plan = ShardPlan(rows.take(pa.array(kept)).drop_columns(["number"]), sources, starts)
    return plan, left_out


def _starts(count: int, sizes: np.ndarray | None, options: Options) -> np.ndarray:
    """The row at which each shard begins."""
    most = options.samples_per_shard or count or 1
    if sizes is None:
        return np.arange(0, count, most)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    room = room_for_members(options.bytes_per_shard or 0)
    starts = []
    start = 0
    while start < count:
        starts.append(start)
        full = int(np.searchsorted(ends, ends[start] + room, side="right")) - 1
        start = min(max(full, start + 1), start + most)
    return np.array(starts, np.int64)


def _tar_bytes(rows: pa.Table) -> np.ndarray:
    """Bytes of each sample in a tar, with headers and padding."""
    taken = []
    for start in range(0, len(rows), _CHUNK):
        part = rows.slice(start, _CHUNK)
        members = part.column("members").combine_chunks()
        flat = members.flatten()
        keys = part.column("key").take(members.value_parent_indices())
        names = pc.binary_join_element_wise(keys, flat.field("extension"), ".").to_pylist()
        sizes = flat.field("size").to_numpy()
        nbytes = header_sizes(names, sizes) + sizes + padding(sizes)
        offsets = members.offsets.to_numpy()
        taken.append(np.add.reduceat(nbytes, offsets[:-1] - offsets[0]))
    return np.concatenate(taken) if taken else np.zeros(0, np.int64)


def _as_paths(keys: pa.ChunkedArray) -> np.ndarray:
    """A number for each key, the same for keys that lead to the same file when unpacked."""
    paths = pc.replace_substring_regex(keys, r"(^|/)(\./)+", r"\1")
    return paths.combine_chunks().dictionary_encode().indices.to_numpy()


def _repeated(keys: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Mask of the rows whose key an earlier row of their shard has."""
    repeats = np.zeros(len(keys), bool)
    if len(keys) > 1 and len(np.unique(keys)) < len(keys):
        shards = np.searchsorted(starts, np.arange(len(keys)), side="right")
        order = np.lexsort([np.arange(len(keys)), keys, shards])
        same = (np.diff(keys[order]) == 0) & (np.diff(shards[order]) == 0)
        repeats[order[1:][same]] = True
    return repeats


def _shuffled(rows: pa.Table, sources: Sequence[Located], seed: int) -> np.ndarray:
    """An order that depends on the seed and on where samples come from, on nothing else.

    Not on the order of the frame: a merge gives another one with other partitions.
    """
    codes = rows.column("source").to_numpy()
    hashed = np.array([_hash(f"{seed}\0{source.url}") for source in sources], np.uint64)
    offsets = rows.column("offset")
    places = pc.fill_null(offsets, 0).to_numpy().astype(np.uint64)
    for row in np.flatnonzero(pc.is_null(offsets).to_numpy()):
        places[row] = _hash(rows.column("key")[int(row)].as_py())
    return np.lexsort([places, codes, _mix(hashed[codes] ^ _mix(places))])


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Spread 64 bits as splitmix64 does, the same on every machine and in every release."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
