"""Partition files: their names, and the part of a shard that each stands for.

The name says all that a run has to know of the runs before it: which shard, in which state, went
through which operations, and which part of it this is. So no file of a checkpoint can be taken for
another, and what is there can be told from a listing alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dask_image_ingest.storage import Shard

_NAME = re.compile(r"([0-9a-f]{32})-(\d{5,})-of-(\d{5,})\.parquet")


@dataclass(frozen=True, slots=True)
class VersionedSplit:
    """The ``part``-th of ``parts`` equal parts of a shard, or several whole ones.

    As they were when the frame was made: a `ShardSplit` says where a task reads; this says in which
    version, or which partition of an earlier checkpoint stands for the shard.
    """

    shards: tuple[Shard, ...]
    part: int = 0
    parts: int = 1


def digest_of(*parts: str) -> str:
    """A digest of words, and of where one ends and the next begins."""
    told = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.blake2b(told.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def shard_of(query: str, shards: Sequence[Shard]) -> str:
    """Prefix of the partition files of a shard, or of several together, for a query's digest."""
    files = (file for shard in shards for file in (shard, shard.sidecar) if file is not None)
    told = (word for file in files for word in (file.url, str(file.size), file.version))
    return digest_of(query, *told)


def part_name(query: str, split: VersionedSplit) -> str:
    """The file of a partition."""
    return _name(shard_of(query, split.shards), split.part, split.parts)


def _name(shard: str, part: int, parts: int) -> str:
    return f"{shard}-{part:05d}-of-{parts:05d}.parquet"


def is_part(name: str, shards: Iterable[str] | None = None) -> bool:
    """True if a file is a partition of any checkpoint, or of one of these shards."""
    match = _NAME.fullmatch(name)
    return match is not None and (shards is None or match[1] in shards)


def choose_splits(
    splits: Sequence[VersionedSplit], query: str, there: Mapping[str, int], keep_own: bool
) -> list[VersionedSplit]:
    """The partitions that a checkpoint has for those of a frame.

    A frame's own boundaries follow the memory of the machine it is made on. Where a whole shard is
    wanted and some of it is stored in other parts, these win; so nothing is computed twice.

    Parameters
    ----------
    splits
        The frame's partitions.
    query
        The digest of what is done to each.
    there
        The files that are there.
    keep_own
        Whether the frame's own boundaries have to stay.
    """
    if keep_own:
        return list(splits)
    stored: dict[str, dict[int, int]] = {}
    for match in filter(None, map(_NAME.fullmatch, there)):
        counts = stored.setdefault(match[1], {})
        counts[int(match[3])] = counts.get(int(match[3]), 0) + 1
    chosen: list[VersionedSplit] = []
    start = 0
    while start < len(splits):
        first = splits[start]
        whole = [VersionedSplit(first.shards, part, first.parts) for part in range(first.parts)]
        if list(splits[start : start + first.parts]) != whole:
            chosen.append(first)
            start += 1
            continue
        counts = stored.get(shard_of(query, first.shards), {})
        # The more of a shard is there, the better; of equals, the frame's own.
        parts = max(
            [first.parts, *counts],
            key=lambda parts: (counts.get(parts, 0) / parts, parts == first.parts),
        )
        chosen += [VersionedSplit(first.shards, part, parts) for part in range(parts)]
        start += first.parts
    return chosen
