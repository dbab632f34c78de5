"""A shard is opened: by its index where it has one that holds, else by a walk through its tar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from dask_image_ingest.dataset.indexed import IndexedRows
from dask_image_ingest.dataset.metadata import SampleRows
from dask_image_ingest.dataset.options import ReadOptions
from dask_image_ingest.dataset.schema import Component
from dask_image_ingest.dataset.sidecar import Sidecar
from dask_image_ingest.dataset.walked import Walked, keep_walked
from dask_image_ingest.dataset.warning import warn_of_unusable
from dask_image_ingest.errors import ShardError
from dask_image_ingest.index import (
    IndexFile,
    StoredIndex,
    UnusableIndexError,
    index_by_members,
    open_stored,
)
from dask_image_ingest.storage import LazyBytes, find_shards, open_late, open_shard
from dask_image_ingest.tar import TarIndex, index_tar

__all__ = ["known_members", "known_samples", "open_rows"]


@contextmanager
def open_rows(
    url: str,
    index: IndexFile | None,
    options: ReadOptions,
    components: Sequence[Component] = (),
    sidecar: Sidecar | None = None,
    warn: bool = True,
    keep: bool = False,
) -> Iterator[SampleRows]:
    """All samples of a shard; ``warn`` of an index that is not used, ``keep`` what a walk finds.

    It is kept where the shard itself has each member in one piece.

    Raises
    ------
    ShardError, ShardNotFoundError
    """
    storage_options = options.storage_options
    with ExitStack() as opened:
        stored = known_samples(opened, index, storage_options, warn)
        if index is not None and stored is not None:
            late = opened.enter_context(open_late(index.shard, storage_options))
            yield IndexedRows(url, late, stored, options, components, sidecar)
            return
        # Looked up before the walk: a shard that is replaced meanwhile is seen to have changed.
        listed = find_shards(url, storage_options)[0] if keep else None
        content = opened.enter_context(open_shard(url, storage_options))
        found = known_members(content, index, storage_options, warn) or index_tar(content, url)
        yield SampleRows(url, content, found, options, components, sidecar)
        is_stored = listed is not None and len(content) == listed.size and not found.sparse
    # Once the shard is closed, which it was not if that found it changed.
    if listed is not None and is_stored:
        keep_walked(Walked(listed, found))


def known_samples(
    opened: ExitStack, index: IndexFile | None, storage_options: dict[str, Any] | None, warn: bool
) -> StoredIndex | None:
    """Our own index of a shard, which ``opened`` closes; None if there is none that holds.

    Raises
    ------
    ShardError
        If it is required.
    """
    if index is None or index.kind != "own":
        return None
    try:
        return opened.enter_context(open_stored(index.url, index.shard, storage_options))
    except (UnusableIndexError, ShardError) as error:
        if index.required:
            raise ShardError(
                f"the index {index.url} can't be used: {error}. Write it with write_index(), or "
                "leave out index=True"
            ) from error
        if warn:
            warn_of_unusable(error, index)
    return None


def known_members(
    content: LazyBytes, index: IndexFile | None, storage_options: dict[str, Any] | None, warn: bool
) -> TarIndex | None:
    """The samples of an open shard by what another tool has written beside it, if that holds."""
    if index is None or index.kind == "own":
        return None
    try:
        return index_by_members(content, index, storage_options)
    except UnusableIndexError as error:
        if warn:
            warn_of_unusable(error, index)
    return None
