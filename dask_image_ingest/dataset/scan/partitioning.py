"""Shards to partitions: which samples of which shards each task reads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from dask_image_ingest.arguments import number_of_bytes, shown, whole_number
from dask_image_ingest.dataset.options import ReadOptions
from dask_image_ingest.dataset.scan.first_shard import FirstShard
from dask_image_ingest.dataset.scan.rows import part_of
from dask_image_ingest.dataset.warning import warn_user
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend, awaits_workers, planned_workers, workers
from dask_image_ingest.index import IndexFile
from dask_image_ingest.passwords import UrlHolder
from dask_image_ingest.storage import Shard, is_pipe

# Seconds for the first worker to join, or for one that died to come back.
_PATIENCE = 10.0

# Of pixels a partition, where nobody knows a worker's memory.
_ASSUMED = 512 << 20

#: What ``shards_per_partition="auto"`` has in a partition at most: samples, bytes of pixels.
_SAMPLES_TOGETHER: Final = 10_000
_PIXELS_TOGETHER: Final = 128 << 20

# Shards that are many: a task each is ten seconds of a processor.
_MANY = 1000


@dataclass(frozen=True, slots=True, repr=False)
class ShardSplit(UrlHolder):
    """Samples of one partition: the ``part``-th of ``parts`` equal parts of a shard.

    ``sidecar`` is the URL of the file beside the shard that has columns for them, ``index`` where
    the shard's index is, if it has one.
    """

    url: str
    part: int = 0
    parts: int = 1
    sidecar: str | None = None
    index: IndexFile | None = None


#: All that a task reads: part of a shard, or several whole ones.
Partition: TypeAlias = tuple[ShardSplit, ...]


def known_rows(partition: Partition) -> int | None:
    """Number of rows of a partition; None where the index of a shard does not tell."""
    rows = 0
    for split in partition:
        if split.index is None or split.index.samples is None:
            return None
        rows += len(part_of(split.index.samples, split.part, split.parts))
    return rows


@dataclass(frozen=True, slots=True)
class ShardsTogether:
    """The most that a partition of several shards has of each; None for no limit."""

    shards: int | None = 1
    samples: int | None = None
    nbytes: int | None = None

    def allows(self, *counts: int) -> bool:
        """True for a partition of so many shards, samples and bytes."""
        limits = (self.shards, self.samples, self.nbytes)
        return all(
            limit is None or count <= limit for count, limit in zip(counts, limits, strict=True)
        )


def parse_partition_size(partition_size: Any, backend: Backend) -> int | None:
    """The argument ``partition_size=`` in bytes; None for one task per shard."""
    if partition_size is None:
        return None
    if isinstance(partition_size, str) and partition_size == "auto":
        return _automatic(backend)
    nbytes = number_of_bytes(partition_size)
    if nbytes is None:
        raise ArgumentError(
            f"partition_size={shown(partition_size)}: pass bytes, such as '512 MiB', 'auto', or "
            "None for one task per shard"
        )
    return min(nbytes, backend.largest_partition)


def _automatic(backend: Backend) -> int:
    """Size of a partition by the memory of the workers; one that starts is waited for."""
    end = time.monotonic() + _PATIENCE
    while awaits_workers() and time.monotonic() < end:
        time.sleep(0.1)
    there = workers()
    # Where nobody knows, the memory of this machine says nothing: it may be a login node.
    why = do = ""
    if awaits_workers():
        why, do = "no worker has joined", "wait before the read: client.wait_for_workers(1)"
    elif there and backend.device == "cpu" and not any(each["memory_limit"] for each in there):
        why, do = "no worker has a memory limit", "start them with --memory-limit"
    # Shards are taken to decode to as much as the first one, and some decode to more.
    size = min(_ASSUMED if why else backend.partition_memory(), backend.largest_partition // 2)
    if why:
        warn_user(
            f"{why}, so partition_size='auto' takes {size >> 20} MiB of pixels, a sixteenth of a "
            f"worker of 8 GiB. Pass partition_size=, or {do}"
        )
    elif len(there) == 1 < (planned := planned_workers()):
        warn_user(
            f"1 of {planned} workers has joined, so partition_size='auto' takes {size >> 20} MiB "
            "of pixels, by its memory. If others have less, pass partition_size=, or wait for them "
            f"before the read: client.wait_for_workers({planned})"
        )
    return size


def parse_shards_per_partition(shards: Any, largest: int | None) -> ShardsTogether:
    """The argument ``shards_per_partition=``, where partitions hold ``largest`` bytes at most."""
    if isinstance(shards, str) and shards == "auto":
        most = _PIXELS_TOGETHER if largest is None else min(_PIXELS_TOGETHER, largest)
        return ShardsTogether(None, _SAMPLES_TOGETHER, most)
    advice = f"pass a number from 1 on, or 'auto' for up to about {_SAMPLES_TOGETHER:,} samples"
    most = whole_number("shards_per_partition", shards, 1, advice)
    return ShardsTogether(most, None, largest)


def make_partitions(
    shards: Sequence[Shard],
    first: FirstShard,
    options: ReadOptions,
    largest: int | None,
    together: ShardsTogether,
    indexes: Mapping[str, IndexFile],
) -> tuple[Partition, ...]:
    """Partitions that decode to ``largest`` bytes at most, if all shards are as the first.

    A larger shard is in parts, no more than it has images: a smaller part could not hold any.
    Several shards are together in one partition as far as ``together`` allows.
    """
    if together.shards == 1 and len(shards) > _MANY:
        _hint(len(shards), first, options)
    partitions: list[Partition] = []
    held: list[ShardSplit] = []
    samples = nbytes = 0
    for split, its_samples, its_bytes in _splits(
        shards, first, options, largest, together, indexes
    ):
        samples, nbytes = samples + its_samples, nbytes + its_bytes
        if held and (split.parts > 1 or not together.allows(len(held) + 1, samples, nbytes)):
            partitions.append(tuple(held))
            held, samples, nbytes = [], its_samples, its_bytes
        held.append(split)
        if split.parts > 1:
            partitions.append((split,))
            held, samples, nbytes = [], 0, 0
    return (*partitions, tuple(held)) if held else tuple(partitions)


def _hint(count: int, first: FirstShard, options: ReadOptions) -> None:
    """Warn of a task for each of many small shards, ten of which would be one by ``"auto"``."""
    samples = first.samples
    if 10 * samples <= _SAMPLES_TOGETHER and 10 * first.decoded_bytes(options) <= _PIXELS_TOGETHER:
        warn_user(
            f"{count:,} shards of about {samples} samples are a task each, and a task costs Dask 5 "
            "to 10 ms of a processor. shards_per_partition='auto' reads several shards in one"
        )


def _splits(
    shards: Sequence[Shard],
    first: FirstShard,
    options: ReadOptions,
    largest: int | None,
    together: ShardsTogether,
    indexes: Mapping[str, IndexFile],
) -> Iterator[tuple[ShardSplit, int, int]]:
    """Each shard or part of one, with about how many samples and bytes of pixels it has."""
    looks = largest is not None or together.nbytes is not None
    decoded = first.decoded_bytes(options) if looks else 0
    images = first.images(options.image_extensions)
    for shard in shards:
        # A server that doesn't tell a shard's size: taken to be as large as the first.
        known = shard.size >= 0 and first.shard.size > 0
        size, of = (shard.size, first.shard.size) if known else (1, 1)
        parts = 1
        # The command of a pipe would run once for each part.
        if decoded and largest is not None and first.shard.size > 0 and not is_pipe(shard.url):
            parts = _ceil_divide(decoded * size, of * largest)
            parts = min(parts, _ceil_divide(images * size, of)) or 1
        split = ShardSplit(shard.url, 0, parts, shard.sidecar_url, indexes.get(shard.url))
        for part in range(parts):
            samples = first.samples * size // of
            yield replace(split, part=part), samples, decoded * size // of


def _ceil_divide(whole: int, share: int) -> int:
    return -(-whole // share)
