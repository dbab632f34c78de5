"""Shards to partitions: which samples of which shard each task reads."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask_image_ingest.arguments import number_of_bytes, shown
from dask_image_ingest.dataset.options import ReadOptions
from dask_image_ingest.dataset.scan.first_shard import FirstShard
from dask_image_ingest.dataset.warning import warn_user
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend, awaits_workers
from dask_image_ingest.index import IndexFile
from dask_image_ingest.passwords import UrlHolder
from dask_image_ingest.storage import Shard, is_pipe

__all__ = ["ShardSplit", "parse_partition_size", "split_shards"]

# Seconds for the first worker to join, or for one that died to come back.
_PATIENCE = 10.0

# Of pixels a partition, where nobody knows a worker's memory.
_ASSUMED = 512 << 20


@dataclass(frozen=True, slots=True, repr=False)
class ShardSplit(UrlHolder):
    """The samples of one partition: the ``part``-th of ``parts`` equal parts of a shard.

    ``sidecar`` is the URL of the file beside the shard that has columns for them, ``index`` where
    the shard's index is, if it has one.
    """

    url: str
    part: int = 0
    parts: int = 1
    sidecar: str | None = None
    index: IndexFile | None = None

    def rows(self, samples: int) -> range:
        """The numbers of these samples in the shard."""
        return range(samples * self.part // self.parts, samples * (self.part + 1) // self.parts)


def parse_partition_size(partition_size: Any, backend: Backend) -> int | None:
    """The argument ``partition_size=`` in bytes; None for one task per shard.

    Raises
    ------
    ArgumentError
    """
    if partition_size is None:
        return None
    if isinstance(partition_size, str) and partition_size == "auto":
        if not _has_workers():
            # The memory of this machine says nothing: it may be a login node.
            warn_user(
                "no worker has joined the cluster yet, so partition_size='auto' takes "
                f"{_ASSUMED >> 20} MiB of pixels, a sixteenth of a worker of 8 GiB. Pass "
                "partition_size=, or wait before the read: client.wait_for_workers(1)"
            )
            return min(_ASSUMED, backend.largest_partition // 2)
        # Shards are taken to decode to as much as the first one, and some decode to more.
        return min(backend.partition_memory(), backend.largest_partition // 2)
    nbytes = number_of_bytes(partition_size)
    if nbytes is None:
        raise ArgumentError(
            f"partition_size={shown(partition_size)}: pass bytes, such as '512 MiB', 'auto', or "
            "None for one task per shard"
        )
    return min(nbytes, backend.largest_partition)


def _has_workers() -> bool:
    """True if a worker has joined, or there is no cluster; one that starts is waited for."""
    end = time.monotonic() + _PATIENCE
    while awaits_workers():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def split_shards(
    shards: Sequence[Shard],
    first: FirstShard,
    options: ReadOptions,
    largest: int | None,
    indexes: Mapping[str, IndexFile],
) -> tuple[ShardSplit, ...]:
    """Each shard in parts that decode to ``largest`` bytes at most, if all are as the first.

    No more parts than images: a smaller one could not hold any.
    """
    decoded = 0 if largest is None else first.decoded_bytes(options)
    if largest is None or not decoded or first.shard.size <= 0:
        return tuple(_split(shard, indexes) for shard in shards)
    images = first.images(options.image_extensions)
    splits: list[ShardSplit] = []
    for shard in shards:
        if is_pipe(shard.url):
            splits.append(_split(shard, indexes))  # or its command would run once for each part
            continue
        # A server that doesn't tell a shard's size: taken to be as large as the first.
        size = shard.size if shard.size >= 0 else first.shard.size
        parts = _ceil_divide(decoded * size, first.shard.size * largest)
        parts = min(parts, _ceil_divide(images * size, first.shard.size)) or 1
        splits.extend(_split(shard, indexes, part, parts) for part in range(parts))
    return tuple(splits)


def _split(
    shard: Shard, indexes: Mapping[str, IndexFile], part: int = 0, parts: int = 1
) -> ShardSplit:
    return ShardSplit(shard.url, part, parts, shard.sidecar_url, indexes.get(shard.url))


def _ceil_divide(whole: int, share: int) -> int:
    return -(-whole // share)
