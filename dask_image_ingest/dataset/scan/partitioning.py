"""Map shards to partitions: split large shards, group small ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from dask_image_ingest.arguments import number_of_bytes, shown, whole_number
from dask_image_ingest.dataset.read_options import ReadOptions
from dask_image_ingest.dataset.scan.first_shard import FirstShard
from dask_image_ingest.dataset.scan.rows import part_of
from dask_image_ingest.errors import ArgumentError, warn_user
from dask_image_ingest.frames import (
    Backend,
    workers,
)
from dask_image_ingest.index import IndexFile
from dask_image_ingest.storage import Shard, is_pipe
from dask_image_ingest.url_secrets import UrlHolder, url_identity

# Bytes of pixels per partition if the memory of workers is unknown.
_DEFAULT_SIZE = 512 << 20

#: Limits of a partition with ``shards_per_partition="auto"``: samples, bytes of pixels.
_SAMPLES_TOGETHER: Final = 10_000
_PIXELS_TOGETHER: Final = 128 << 20

# Bits of a label that count the rows of a shard. The other 38 of a non-negative int64 are a digest.
_ROW_BITS = 24

# Number of shards from which on tasks for single small shards cost ten seconds of a processor.
_MANY_SHARDS = 1000


@dataclass(frozen=True, slots=True, repr=False)
class ShardSplit(UrlHolder):
    """One of ``parts`` equal parts of a shard; ``part`` counts from 0.

    ``shard`` is the shard as it was listed: a task reads no other version of it or its sidecar.
    ``index`` is its index file, or None; it says nothing of the rows, and is not compared.
    ``first_label`` is the label of the shard's first row. Of an image file, ``part`` is the number
    of its row.
    """

    shard: Shard
    part: int = 0
    parts: int = 1
    index: IndexFile | None = field(default=None, compare=False)
    first_label: int = field(default=0, compare=False)

    @property
    def url(self) -> str:
        """The URL of the shard."""
        return self.shard.url


#: All that a task reads: part of a shard, or several whole ones, or image files.
Partition: TypeAlias = tuple[ShardSplit, ...]


def digest_of_url(url: str) -> int:
    """A number below 2**62 for a file, the same for all URLs that differ in secrets alone."""
    identity = url_identity(url).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big") >> 2


def first_labels(urls: Iterable[str]) -> dict[str, int]:
    """The label of the first row of each shard of a read; the next rows have the next labels.

    All reads of a shard agree on it, as it is a digest of the URL. In one of 5,000 reads of 10,000
    shards, two have the same digest: the second by URL then gets the next free number.
    """
    labels: dict[str, int] = {}
    last = -1
    for digest, url in sorted((digest_of_url(url) >> _ROW_BITS, url) for url in urls):
        last = max(digest, last + 1)
        labels[url] = last << _ROW_BITS
    return labels


def known_rows(partition: Partition) -> int | None:
    """Number of rows of a partition; None if a shard has no index with its samples counted."""
    rows = 0
    for split in partition:
        if split.index is None or split.index.samples is None:
            return None
        rows += len(part_of(split.index.samples, split.part, split.parts))
    return rows


@dataclass(frozen=True, slots=True)
class ShardsTogether:
    """Limits of a partition of several shards; None for no limit."""

    shards: int | None = 1
    samples: int | None = None
    nbytes: int | None = None

    def allows(self, *counts: int) -> bool:
        """True if these counts (shards, samples, bytes of pixels) are within the limits."""
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
    """Size of a partition by the memory of the workers."""
    joined = workers()
    # Without a worker, the memory of this machine says nothing: it may be a login node.
    why = do = ""
    if joined == []:
        why, do = "no worker has joined", "wait before the read: client.wait_for_workers(1)"
    elif joined and backend.device == "cpu" and not any(w["memory_limit"] for w in joined):
        why, do = "no worker has a memory limit", "start them with --memory-limit"
    # Half of the largest: sizes are estimated by the first shard, and others may decode to more.
    size = min(_DEFAULT_SIZE if why else backend.partition_memory(), backend.largest_partition // 2)
    if why:
        warn_user(
            f"{why}, so partition_size='auto' takes {size >> 20} MiB of pixels, a sixteenth of a "
            f"worker of 8 GiB. Pass partition_size=, or {do}"
        )
    return size


def parse_shards_per_partition(shards: Any, largest: int | None) -> ShardsTogether:
    """The argument ``shards_per_partition=``, for partitions of at most ``largest`` bytes."""
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
    """Make partitions that decode to at most ``largest`` bytes, if all shards are like the first.

    A larger shard is split, at most into one part per image. Consecutive smaller shards share a
    partition as far as ``together`` allows.
    """
    if together.shards == 1 and len(shards) > _MANY_SHARDS:
        _warn_of_small_tasks(len(shards), first, options)
    partitions: list[Partition] = []
    group: list[ShardSplit] = []
    samples = nbytes = 0  # of the group
    for split, split_samples, split_bytes in _splits(
        shards, first, options, largest, together, indexes
    ):
        samples, nbytes = samples + split_samples, nbytes + split_bytes
        if group and (split.parts > 1 or not together.allows(len(group) + 1, samples, nbytes)):
            partitions.append(tuple(group))
            group, samples, nbytes = [], split_samples, split_bytes
        group.append(split)
        if split.parts > 1:
            partitions.append((split,))
            group, samples, nbytes = [], 0, 0
    return (*partitions, tuple(group)) if group else tuple(partitions)


def _warn_of_small_tasks(count: int, first: FirstShard, options: ReadOptions) -> None:
    """Warn of a task per shard, if ``"auto"`` would group at least ten shards into one task."""
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
    """Each shard or part of one, with estimates of its samples and bytes of pixels.

    Samples and bytes are scaled by the size of the shard relative to the first.
    """
    needs_bytes = largest is not None or together.nbytes is not None
    decoded = first.decoded_bytes(options) if needs_bytes else 0
    images = first.count_images(options.images[0].extensions)
    labels = first_labels(shard.url for shard in shards)
    for shard in shards:
        # A shard of unknown size is taken to be as large as the first.
        known = shard.size >= 0 and first.shard.size > 0
        size, first_size = (shard.size, first.shard.size) if known else (1, 1)
        parts = 1
        # A pipe is not split: its command would run once per part.
        if decoded and largest is not None and first.shard.size > 0 and not is_pipe(shard.url):
            parts = _ceil_divide(decoded * size, first_size * largest)
            parts = min(parts, _ceil_divide(images * size, first_size)) or 1
        split = ShardSplit(shard, 0, parts, indexes.get(shard.url), labels[shard.url])
        for part in range(parts):
            samples = first.samples * size // first_size
            yield replace(split, part=part), samples, decoded * size // first_size


def _ceil_divide(whole: int, share: int) -> int:
    return -(-whole // share)
