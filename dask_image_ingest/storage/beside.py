"""Files beside shards, found by one listing of each folder."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.storage.fsspec_files import Listings, list_folder, look_up, shard_of
from dask_image_ingest.storage.listing import find_local_file
from dask_image_ingest.storage.reader import translate_errors
from dask_image_ingest.storage.shard import (
    Shard,
    folder_of,
    inside,
    is_pipe,
    is_web,
    listed_folder,
    local_path,
    split_url,
    without_suffix,
)
from dask_image_ingest.url_secrets import is_signed


def by_folder(shards: Iterable[Shard]) -> list[tuple[str, list[Shard]]]:
    """Shards by their folder, without commands."""
    folders: dict[str, tuple[str, list[Shard]]] = {}
    for shard in shards:
        if not is_pipe(shard.url):
            # The folder is listed by the URL of the first.
            group = folders.setdefault(listed_folder(shard.url), (folder_of(shard.url)[0], []))
            group[1].append(shard)
    return [*folders.values()]


def names_in(folder: str, storage_options: dict[str, Any] | None) -> Collection[str]:
    """Names of the files in a folder.

    Raises
    ------
    ShardNotFoundError, ShardError
        If there is no such folder, or if it can't be listed: many web servers refuse.
    """
    if (path := local_path(folder)) is not None:
        return translate_errors(folder, os.listdir, path)
    return list_folder(folder, storage_options, {})


def names_beside(
    folder: str, names: Iterable[str], storage_options: dict[str, Any] | None, listings: Listings
) -> Collection[str]:
    """Those of these files that are in a folder, none if it can't be listed; locally all names."""
    if local_path(folder) is not None:
        return names_in(folder, storage_options)
    if is_web(folder):  # the query of a shard may be a part of its name: no URL of its own
        try:
            return list_folder(folder, storage_options, listings)
        except (ShardError, ShardNotFoundError):
            return ()
    urls = {inside(folder, name): name for name in names}
    found = look_up([*urls], storage_options, listings, only_listed=True)
    return {name for url, name in urls.items() if found.get(url)}


def find_beside(
    shards: Sequence[Shard],
    suffix: str,
    storage_options: dict[str, Any] | None,
    listings: Listings,
    only_listed: bool = False,
) -> list[Shard | None]:
    """Find the file with this suffix beside each shard; None for each without one.

    Each folder is listed once. On a web server without listings, one file is requested; if it
    exists, the others are taken to exist, with size -1 and no version.

    With ``only_listed``, none are found there, nor in a folder that can't be listed, nor by a
    signed URL, whose signature may be of the shard alone.
    """
    urls = [_beside(shard.url, suffix) for shard in shards]
    remote = [url for url in urls if url is not None and local_path(url) is None]
    if only_listed:
        remote = [url for url in remote if not is_signed(url)]
    looked_up = look_up(remote, storage_options, listings, only_listed)
    infos = {url: info for url, info in looked_up.items() if info and info["type"] != "directory"}
    found: dict[str, Shard | None] = {url: shard_of(url, info) for url, info in infos.items()}
    found |= {url: find_local_file(url) for url in urls if url and local_path(url) is not None}
    return [None if url is None else found.get(url) for url in urls]


def _beside(url: str, suffix: str) -> str | None:
    """The URL of a shard with another suffix; None if its own is no shard's."""
    if is_pipe(url):
        return None
    head, path, tail = ("", url, "") if local_path(url) is not None else split_url(url)
    stem = without_suffix(path)
    return None if stem is None else f"{head}{stem}{suffix}{tail}"
