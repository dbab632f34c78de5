"""Open a shard: by its index if that is valid, else by a scan of its tar headers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from dask_image_ingest.dataset.options import ReadOptions
from dask_image_ingest.dataset.scan.samples import SampleRows
from dask_image_ingest.dataset.scan.sidecar import Sidecar
from dask_image_ingest.dataset.schema.columns import Component, image_member
from dask_image_ingest.dataset.warning import warn_of_unusable
from dask_image_ingest.errors import ShardError
from dask_image_ingest.frames import encoded_memory
from dask_image_ingest.index import (
    IndexFile,
    StoredIndex,
    UnusableIndexError,
    open_stored,
)
from dask_image_ingest.storage import (
    ByteReader,
    MemoryReader,
    Shard,
    find_shards,
    open_late,
    open_shard,
)
from dask_image_ingest.tar import ShardIndex, index_head, index_tar


@dataclass(frozen=True, slots=True)
class CachedScan:
    """The index of a scanned shard, and the shard as it was listed just before the scan."""

    shard: Shard
    index: ShardIndex


_cache = threading.local()


def cache_scan(scan: CachedScan | None) -> None:
    """Cache a scan for a later step of the task in this thread; replaces the one before."""
    _cache.scan = scan


def take_cached_scan() -> CachedScan | None:
    """Take the scan cached last in this thread out of the cache."""
    scan: CachedScan | None = getattr(_cache, "scan", None)
    _cache.scan = None
    return scan


# A shard is read as a whole if of its first ``_HEAD`` bytes at least ``_LEAST_SEEN`` are complete
# members, of which at most ``_MOST_UNUSED`` are bytes that the query does not need.
_HEAD, _LEAST_SEEN, _MOST_UNUSED = 4 << 20, 0.5, 0.25


@contextmanager
def open_rows(
    shard: Shard,
    index: IndexFile | None,
    options: ReadOptions,
    components: Sequence[Component] = (),
    sidecar: Sidecar | None = None,
    warn: bool = True,
    keep: bool = False,
    whole: bool = False,
) -> Iterator[SampleRows]:
    """Open all samples of the listed version of a shard; ``warn`` of an index that is not used.

    ``keep`` caches what a header scan finds, if each member is one range of the shard's bytes.
    ``whole`` says that every image will be read.
    """
    url, storage_options = shard.url, options.storage_options
    with ExitStack() as opened:
        stored = known_samples(opened, index, storage_options, warn)
        if index is not None and stored is not None:
            late = opened.enter_context(open_late(index.shard, storage_options))
            yield SampleRows(url, late, stored, options, components, sidecar)
            return
        # As a lookup of this one shard tells its version, which an export compares: a listing of
        # a folder may tell another.
        alone = find_shards(url, storage_options)[0] if keep else None
        content = opened.enter_context(open_shard(url, storage_options, shard))
        if whole:
            needed = functools.partial(_memory_if_needed, content, url, options, components)
            content.prefetch_into(0, len(content), needed)
        scanned = index_tar(content, url)
        in_memory, reader = content.in_memory(), content
        if len(in_memory) == len(content):
            reader = MemoryReader(in_memory, content.listed_as(url))
        yield SampleRows(url, reader, scanned, options, components, sidecar)
        is_plain = alone is not None and len(content) == alone.size and not scanned.sparse
    # Only now: closing the shard raises if it changed.
    if alone is not None and is_plain:
        cache_scan(CachedScan(alone, scanned))


def _memory_if_needed(
    content: ByteReader,
    url: str,
    options: ReadOptions,
    components: Sequence[Component],
    nbytes: int,
) -> Any:
    """Memory for a whole shard; None if its first bytes show that much of it is not needed."""
    head = bytes(content[:_HEAD])
    index, _ = index_head(head, url)
    extensions = {component.extension for component in components}
    seen = unused = 0
    for sample in index.samples:
        image = image_member(sample, options.image_extensions)
        for extension, (offset, size) in sample.members.items():
            seen = max(seen, offset + size)
            unused += 0 if extension == image or extension in extensions else size
    if index.sparse or seen < _LEAST_SEEN * len(head) or unused > _MOST_UNUSED * seen:
        return None
    return encoded_memory(nbytes)


def known_samples(
    opened: ExitStack, index: IndexFile | None, storage_options: dict[str, Any] | None, warn: bool
) -> StoredIndex | None:
    """The stored index of a shard, closed by ``opened``; None if there is none, or it is invalid.

    Raises
    ------
    ShardError
        If an index is required, and invalid.
    """
    if index is None:
        return None
    try:
        return opened.enter_context(open_stored(index, storage_options))
    except (UnusableIndexError, ShardError) as error:
        give_up(index, error, warn)
    return None


def give_up(index: IndexFile, error: Exception, warn: bool) -> None:
    """Warn that a shard is read without its index, which can't be used.

    Raises
    ------
    ShardError
        If the index is required.
    """
    if index.required:
        raise ShardError(
            f"the index {index.url} can't be used: {error}. Write it with write_index(), or "
            "leave out index=True"
        ) from error
    if warn:
        warn_of_unusable(error, index)
