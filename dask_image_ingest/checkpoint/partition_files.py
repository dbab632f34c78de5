"""Partition files: their names, and the part of a shard that each contains.

The name is a digest of the shard, its version and the operations on it, and the number of the part.
So no file can be mistaken for another, and a listing of the folder tells what is stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from dask_image_ingest.dataset import Partition, ShardSplit
from dask_image_ingest.export import digest_of
from dask_image_ingest.storage import Shard

_NAME = re.compile(r"([0-9a-f]{32})-(\d{5,})-of-(\d{5,})\.parquet")


def shard_prefix(query: str, shards: Iterable[Shard]) -> str:
    """Prefix of the files of a shard's partitions (or of several shards together) in a query."""
    return digest_of(query, *(shard.identity for shard in shards))


def part_name(query: str, partition: Partition) -> str:
    """The file name of a partition."""
    first = partition[0]
    return _name(shard_prefix(query, shards_of(partition)), first.part, first.parts)


def shards_of(partition: Partition) -> tuple[Shard, ...]:
    """The shards of a partition."""
    return tuple(split.shard for split in partition)


def _name(shard: str, part: int, parts: int) -> str:
    return f"{shard}-{part:05d}-of-{parts:05d}.parquet"


def is_part(name: str, shards: Iterable[str] | None = None) -> bool:
    """True if the name is that of a partition file; with ``shards``, of one of these prefixes."""
    match = _NAME.fullmatch(name)
    return match is not None and (shards is None or match[1] in shards)


def choose_splits(
    splits: Sequence[Partition], query: str, files: Mapping[str, int], keep_own: bool
) -> list[Partition]:
    """Choose the partition boundaries of a checkpoint: stored ones, or those of the frame.

    A frame's boundaries depend on the memory of the machine. If a whole shard is needed, and more
    of it is stored in other parts, these are used, so that nothing is computed twice.

    Parameters
    ----------
    splits
        The frame's partitions.
    query
        Digest of the query.
    files
        The stored files.
    keep_own
        Whether the frame's own boundaries must be kept.
    """
    if keep_own:
        return list(splits)
    # Prefix of a shard → number of its parts → how many of these are stored.
    stored: dict[str, dict[int, int]] = {}
    for match in filter(None, map(_NAME.fullmatch, files)):
        counts = stored.setdefault(match[1], {})
        counts[int(match[3])] = counts.get(int(match[3]), 0) + 1
    chosen: list[Partition] = []
    start = 0
    while start < len(splits):
        first = splits[start]
        all_parts = _parts(first, first[0].parts)
        if list(splits[start : start + len(all_parts)]) != all_parts:
            chosen.append(first)
            start += 1
            continue
        counts = stored.get(shard_prefix(query, shards_of(first)), {})
        # Prefer the boundaries of which most is stored; if equal, the frame's own.
        parts = max(
            [len(all_parts), *counts],
            key=lambda parts: (counts.get(parts, 0) / parts, parts == len(all_parts)),
        )
        chosen += _parts(first, parts)
        start += len(all_parts)
    return chosen


def _parts(partition: Partition, parts: int) -> list[Partition]:
    """The shards of a partition in so many parts."""
    return [
        tuple(ShardSplit(split.shard, part, parts, split.index) for split in partition)
        for part in range(parts)
    ]
