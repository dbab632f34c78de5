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
class Walked:
    """A shard as it was just before its walk began, and what that found."""

    shard: Shard
    index: ShardIndex


_latest = threading.local()


def keep_walked(walked: Walked | None) -> None:
    """Keep what was found, and nothing of what was found before."""
    _latest.walked = walked


def take_walked() -> Walked | None:
    """Take the walk that was kept last in this thread, once."""
    walked: Walked | None = getattr(_latest, "walked", None)
    _latest.walked = None
    return walked


# The first bytes of a shard by which the rest is judged, how much of them has to be in whole
# members, and how much of that may be of no use.
_HEAD, _SEEN, _UNUSED = 4 << 20, 0.5, 0.25


@contextmanager
def open_rows(
    url: str,
    index: IndexFile | None,
    options: ReadOptions,
    components: Sequence[Component] = (),
    sidecar: Sidecar | None = None,
    warn: bool = True,
    keep: bool = False,
    whole: bool = False,
) -> Iterator[SampleRows]:
    """All samples of a shard; ``warn`` of an index that is not used, ``keep`` what a walk finds.

    It is kept where the shard itself has each member in one piece. With ``whole``, every image will
    be read.
    """
    storage_options = options.storage_options
    with ExitStack() as opened:
        stored = known_samples(opened, index, storage_options, warn)
        if index is not None and stored is not None:
            late = opened.enter_context(open_late(index.shard, storage_options))
            yield SampleRows(url, late, stored, options, components, sidecar)
            return
        # Looked up before the walk: a shard that is replaced meanwhile is seen to have changed.
        listed = find_shards(url, storage_options)[0] if keep else None
        content = opened.enter_context(open_shard(url, storage_options))
        if whole:
            needed = functools.partial(_memory_if_needed, content, url, options, components)
            content.prefetch_into(0, len(content), needed)
        found = index_tar(content, url)
        read, at_hand = content.in_memory(), content
        if len(read) == len(content):
            at_hand = MemoryReader(read, content.listed_as(url))
        yield SampleRows(url, at_hand, found, options, components, sidecar)
        is_stored = listed is not None and len(content) == listed.size and not found.sparse
    # Once the shard is closed, which it was not if that found it changed.
    if listed is not None and is_stored:
        keep_walked(Walked(listed, found))


def _memory_if_needed(
    content: ByteReader,
    url: str,
    options: ReadOptions,
    components: Sequence[Component],
    nbytes: int,
) -> Any:
    """Memory for a whole shard, if most of what is in it will be read; judged by how it begins."""
    head = bytes(content[:_HEAD])
    index, _ = index_head(head, url)
    extensions = {component.extension for component in components}
    seen = unused = 0
    for sample in index.samples:
        image = image_member(sample, options.image_extensions)
        for extension, (offset, size) in sample.members.items():
            seen = max(seen, offset + size)
            unused += 0 if extension == image or extension in extensions else size
    if index.sparse or seen < _SEEN * len(head) or unused > _UNUSED * seen:
        return None
    return encoded_memory(nbytes)


def known_samples(
    opened: ExitStack, index: IndexFile | None, storage_options: dict[str, Any] | None, warn: bool
) -> StoredIndex | None:
    """The index of a shard, which ``opened`` closes; None if there is none that holds.

    Raises
    ------
    ShardError
        If it is required.
    """
    if index is None:
        return None
    try:
        return opened.enter_context(open_stored(index, storage_options))
    except (UnusableIndexError, ShardError) as error:
        give_up(index, error, warn)
    return None


def give_up(index: IndexFile, error: Exception, warn: bool) -> None:
    """Have a shard read without its index, which can't be used.

    Raises
    ------
    ShardError
        If it is required.
    """
    if index.required:
        raise ShardError(
            f"the index {index.url} can't be used: {error}. Write it with write_index(), or "
            "leave out index=True"
        ) from error
    if warn:
        warn_of_unusable(error, index)
