"""Assignment of samples to shards, independent of the frame's partitions.

A plan is a table with one row per sample in the order of writing (155 bytes if it has four
members), and the row at which each shard begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.export.export_options import Options
from dask_image_ingest.export.plan.locate import Located
from dask_image_ingest.export.tar_layout import header_sizes, padding, room_for_members
from dask_image_ingest.url_secrets import url_identity

# Rows that are processed at once, to bound memory.
_CHUNK = 1 << 16


@dataclass(frozen=True)
class ShardPlan:
    """Samples in the order of writing.

    Attributes
    ----------
    rows
        ``key``, ``offset``, ``part``, ``batch`` and ``row`` as in `StagedRows`, ``members`` and
        ``image`` as in `Located`, and ``source``, a position in ``sources``.
    sources
        The source shards.
    starts
        The row at which each new shard begins.
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
        """For the task of each shard, its rows with the facts of their sources."""
        for start, count in zip(self.starts.tolist(), self.counts, strict=True):
            rows = self.rows.slice(start, count)
            sources = [self.sources[code] for code in rows.column("source").to_numpy()]
            for name in ("url", "version", "expanded"):
                values = pa.array([getattr(source, name) for source in sources], pa.string())
                rows = rows.append_column(name, values)
            part = rows.column("part").cast(pa.string())
            rows = rows.set_column(rows.column_names.index("part"), "part", part)
            yield rows.drop_columns(["source"]).combine_chunks().to_batches()[0]

    @cached_property
    def samples_digest(self) -> str:
        """Digest of the samples, their order and members, and the limits of shards."""
        digest = hashlib.sha256()
        names = [url_identity(source.url) for source in self.sources]
        for start in range(0, len(self.rows), _CHUNK):
            rows = self.rows.slice(start, _CHUNK)
            codes = rows.column("source").to_numpy()
            members = rows.column("members").combine_chunks()
            flat = members.flatten()
            for texts in (
                rows.column("key").to_pylist(),
                [names[code] for code in codes],
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
        """Digest of the source shards and their versions."""
        versions = sorted(
            f"{url_identity(source.url)}\0{source.version}" for source in self.sources
        )
        return hashlib.sha256("\n".join(versions).encode()).hexdigest()


def make_plan(
    rows: pa.Table, sources: Sequence[Located], options: Options
) -> tuple[ShardPlan, np.ndarray]:
    """Order samples and assign them to shards.

    Parameters
    ----------
    rows, sources
        As in the plan, in the order of the frame; ``rows`` also has ``number``, the row's position
        in the frame.

    Returns
    -------
    ShardPlan
    numpy.ndarray
        Numbers of the rows that are in no shard, since theirs has their key already.
    """
    if options.shuffle is not None:
        rows = rows.take(pa.array(_shuffled(rows, sources, options.shuffle)))
    sizes = _tar_bytes(rows) if options.bytes_per_shard else None
    keys = _path_codes(rows.column("key"))
    repeated = []
    kept = np.arange(len(rows))
    while True:  # without the repeated rows, others move to another shard, and may be repeated
        starts = _starts(len(kept), None if sizes is None else sizes[kept], options)
        repeats = _repeated(keys[kept], starts)
        if not repeats.any():
            break
        repeated.append(kept[repeats])
        kept = kept[~repeats]
    numbers = rows.column("number").to_numpy()
    rejected = numbers[np.concatenate(repeated)] if repeated else numbers[:0]
    plan = ShardPlan(rows.take(pa.array(kept)).drop_columns(["number"]), sources, starts)
    return plan, rejected


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
    """Bytes of each sample in a tar, with headers and padding; int64."""
    sizes_of_chunks = []
    for start in range(0, len(rows), _CHUNK):
        part = rows.slice(start, _CHUNK)
        members = part.column("members").combine_chunks()
        flat = members.flatten()
        keys = part.column("key").take(members.value_parent_indices())
        names = pc.binary_join_element_wise(keys, flat.field("extension"), ".").to_pylist()
        sizes = flat.field("size").to_numpy()
        nbytes = header_sizes(names, sizes) + sizes + padding(sizes)
        offsets = members.offsets.to_numpy()
        sizes_of_chunks.append(np.add.reduceat(nbytes, offsets[:-1] - offsets[0]))
    return np.concatenate(sizes_of_chunks) if sizes_of_chunks else np.zeros(0, np.int64)


def _path_codes(keys: pa.ChunkedArray) -> np.ndarray:
    """A code for each key; equal for keys that unpack to the same file."""
    paths = pc.replace_substring_regex(keys, r"(^|/)(\./)+", r"\1")
    return paths.combine_chunks().dictionary_encode().indices.to_numpy()


def _repeated(keys: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Mask of the rows whose key an earlier row of the same shard has."""
    repeats = np.zeros(len(keys), bool)
    if len(keys) > 1 and len(np.unique(keys)) < len(keys):
        shards = np.searchsorted(starts, np.arange(len(keys)), side="right")
        order = np.lexsort([np.arange(len(keys)), keys, shards])
        same = (np.diff(keys[order]) == 0) & (np.diff(shards[order]) == 0)
        repeats[order[1:][same]] = True
    return repeats


def _shuffled(rows: pa.Table, sources: Sequence[Located], seed: int) -> np.ndarray:
    """Random order that depends only on the seed and on each sample's source and offset.

    Not on the order of the frame, which after a merge depends on partitions.
    """
    codes = rows.column("source").to_numpy()
    hashed = np.array(
        [_hash(f"{seed}\0{url_identity(source.url)}") for source in sources], np.uint64
    )
    offsets = rows.column("offset")
    places = pc.fill_null(offsets, 0).to_numpy().astype(np.uint64)
    for row in np.flatnonzero(pc.is_null(offsets).to_numpy()):
        places[row] = _hash(rows.column("key")[int(row)].as_py())
    return np.lexsort([places, codes, _mix(hashed[codes] ^ _mix(places))])


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Hash 64-bit integers by splitmix64: the same on every machine and in every release."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
