"""Partition files: their names, and the part of a shard that each contains.

The name is a digest of the shard, its version and the operations on it, and the number of the part.
So no file can be mistaken for another, and a listing of the folder tells what is stored.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dask_image_ingest.storage import Shard
from dask_image_ingest.url_secrets import url_identity

_NAME = re.compile(r"([0-9a-f]{32})-(\d{5,})-of-(\d{5,})\.parquet")


@dataclass(frozen=True, slots=True)
class VersionedSplit:
    """The ``part``-th of ``parts`` equal parts of a shard, or several whole shards.

    Unlike a `ShardSplit`, which says where a task reads, this has the version of the shards when
    the frame was made. A shard may stand for a partition of another checkpoint.
    """

    shards: tuple[Shard, ...]
    part: int = 0
    parts: int = 1


def digest_of(*parts: str) -> str:
    """Digest of strings, with their lengths, so that ("ab", "c") and ("a", "bc") differ."""
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def shard_prefix(query: str, shards: Sequence[Shard]) -> str:
    """Prefix of the files of a shard's partitions (or of several shards together) in a query."""
    files = (file for shard in shards for file in (shard, shard.sidecar) if file is not None)
    versions = (
        text for file in files for text in (url_identity(file.url), str(file.size), file.version)
    )
    return digest_of(query, *versions)


def part_name(query: str, split: VersionedSplit) -> str:
    """The file name of a partition."""
    return _name(shard_prefix(query, split.shards), split.part, split.parts)


def _name(shard: str, part: int, parts: int) -> str:
    return f"{shard}-{part:05d}-of-{parts:05d}.parquet"


def is_part(name: str, shards: Iterable[str] | None = None) -> bool:
    """True if the name is that of a partition file; with ``shards``, of one of these prefixes."""
    match = _NAME.fullmatch(name)
    return match is not None and (shards is None or match[1] in shards)


def choose_splits(
    splits: Sequence[VersionedSplit], query: str, files: Mapping[str, int], keep_own: bool
) -> list[VersionedSplit]:
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
    chosen: list[VersionedSplit] = []
    start = 0
    while start < len(splits):
        first = splits[start]
        all_parts = [VersionedSplit(first.shards, part, first.parts) for part in range(first.parts)]
        if list(splits[start : start + first.parts]) != all_parts:
            chosen.append(first)
            start += 1
            continue
        counts = stored.get(shard_prefix(query, first.shards), {})
        # Prefer the boundaries of which most is stored; if equal, the frame's own.
        parts = max(
            [first.parts, *counts],
            key=lambda parts: (counts.get(parts, 0) / parts, parts == first.parts),
        )
        chosen += [VersionedSplit(first.shards, part, parts) for part in range(parts)]
        start += first.parts
    return chosen
