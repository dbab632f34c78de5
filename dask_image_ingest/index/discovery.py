"""Discovery of indexes, by listing the folders of the shards."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Collection, Sequence
from typing import Any, Literal

from dask_image_ingest.arguments import is_utf8, shown
from dask_image_ingest.errors import ArgumentError, ShardError, ShardNotFoundError
from dask_image_ingest.index.index_file import IndexTable, UnusableIndexError
from dask_image_ingest.index.open_index import IndexFile, open_table
from dask_image_ingest.storage import (
    COMBINED_INDEX,
    INDEX_SUFFIX,
    Listings,
    Shard,
    by_folder,
    folder_entries,
    folder_of,
    inside,
    is_pipe,
    local_path,
    shard_name,
)
from dask_image_ingest.url_secrets import without_secrets

logger = logging.getLogger("dask_image_ingest")


def find_indexes(
    shards: Sequence[Shard],
    where: Literal["auto"] | bool | str,
    storage_options: dict[str, Any] | None,
    listings: Listings | None = None,
) -> dict[str, IndexFile]:
    """Find the index of each shard that has one; by the shard's URL.

    Prefers the folder's combined index if it has the listed version of the shard, else takes the
    shard's own.

    Parameters
    ----------
    where
        ``"auto"``: beside the shards, by one listing of each folder. True: beside the shards, each
        of which must have one; nothing is listed. False: nowhere. Else a folder.
    listings
        Listings to reuse.

    Raises
    ------
    ArgumentError
        If ``where`` is given and a shard can have no index, or if the folder does not exist.
    ShardError
        If the folder cannot be listed.
    """
    if where is False:
        return {}
    if where != "auto":
        for shard in shards:
            refuse_unindexed(shard.url, f"index={where!r}")
    folder = where if isinstance(where, str) and where != "auto" else None
    listings = {} if listings is None else listings
    indexes = {}
    for location, group in by_folder(shards) if folder is None else [(folder, shards)]:
        members = [(shard, shard_name(shard.url)) for shard in group]
        names: Collection[str]
        if where is True:
            names = {COMBINED_INDEX, *(name + INDEX_SUFFIX for _, name in members)}
        elif folder is None:
            names = _beside(location, group, storage_options, listings)
        else:
            names = _in_folder(folder, group, storage_options)
        combined = inside(location, COMBINED_INDEX)
        table = _table(combined, storage_options) if COMBINED_INDEX in names else None
        for shard, name in members:
            own = name + INDEX_SUFFIX
            holds = table is not None and table.holds(name, shard)
            if table is not None and (holds or (name in table.names and own not in names)):
                # A stale entry is kept, so that the read warns of it.
                samples = table.samples(name) if holds else None
                index = IndexFile(combined, shard, where is True, name, table.file, samples)
                indexes[shard.url] = index
            elif own in names:
                indexes[shard.url] = IndexFile(index_place(shard.url, folder), shard, where is True)
    if folder is not None and not indexes:
        warnings.warn(
            without_secrets(
                f"index={folder!r} holds an index of none of the {len(shards)} shards, which are "
                "read without. write_index(..., folder=) writes indexes there"
            ),
            stacklevel=3,
        )
    return indexes


def _table(url: str, storage_options: dict[str, Any] | None) -> IndexTable | None:
    try:
        return open_table(url, storage_options)
    except UnusableIndexError as error:
        warnings.warn(without_secrets(f"the index {url} is not used: {error}"), stacklevel=4)
    except (ShardError, ShardNotFoundError) as error:
        logger.debug("%s cannot be read: %s", url, error)
    return None


def _beside(
    folder: str, shards: Sequence[Shard], storage_options: dict[str, Any] | None, listings: Listings
) -> Collection[str]:
    """Names in a folder of shards; empty if it can't be listed."""
    try:
        return folder_entries(folder, shards, storage_options, listings)
    except Exception as error:  # each file system has exceptions of its own
        logger.debug("%s cannot be listed: %s", folder, error)
        return set()


def _in_folder(
    folder: str, shards: Sequence[Shard], storage_options: dict[str, Any] | None
) -> Collection[str]:
    """Names in a folder of indexes that the user has named."""
    try:
        return folder_entries(folder, shards, storage_options)
    except ShardNotFoundError as error:
        raise ArgumentError(
            f"index={folder!r}: there is no such folder, or its server lists none"
        ) from error


def parse_index(index: Any) -> Literal["auto"] | bool | str:
    """Check the argument ``index=``; expand a local folder.

    Raises
    ------
    ArgumentError
    """
    path = os.fspath(index) if isinstance(index, os.PathLike) else index
    if isinstance(path, bool) or path == "auto":
        return path
    if not isinstance(path, str) or not path or "\0" in path or not is_utf8(path):
        raise ArgumentError(
            f"index={shown(index)}: pass 'auto', True, False, or the folder that the indexes are in"
        )
    local = local_path(path)
    if local is not None:
        return os.path.abspath(os.path.expanduser(local))
    return folder_of(inside(path, ""))[0]


def index_place(url: str, folder: str | None) -> str:
    """Path or URL of a shard's index."""
    beside, name = folder_of(url)
    if folder is None:
        return inside(beside, name + INDEX_SUFFIX)
    return inside(folder, shard_name(url) + INDEX_SUFFIX)


def refuse_unindexed(url: str, argument: str) -> None:
    """Refuse a shard that can have no index, naming the ``argument`` that asks for one.

    Raises
    ------
    ArgumentError
    """
    why = _why_none(url)
    if why:
        raise ArgumentError(f"{argument}: {url} can have no index: {why}")


def _why_none(url: str) -> str:
    """Reason why a shard can have no index; empty if it can."""
    return "it is a command, whose output has no version" if is_pipe(url) else ""
