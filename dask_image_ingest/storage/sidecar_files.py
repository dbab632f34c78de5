"""Files beside shards, found by one listing of each folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any
from urllib.parse import unquote

from dask_image_ingest.errors import ShardNotFoundError
from dask_image_ingest.storage.fsspec_compat import (
    Info,
    file_system,
    find_below,
    supports_prefix,
    translate_errors,
)
from dask_image_ingest.storage.listing import find_local_file
from dask_image_ingest.storage.patterns import COMBINED_INDEX, without_suffix
from dask_image_ingest.storage.remote import call_fsspec
from dask_image_ingest.storage.remote_listing import (
    WORTH_A_LISTING,
    Listings,
    exists_remote,
    find_files,
    list_folder,
    shard_of,
)
from dask_image_ingest.storage.shard import Shard, is_web, local_path, split_url
from dask_image_ingest.storage.streams import is_pipe
from dask_image_ingest.url_secrets import is_signed, url_identity

logger = logging.getLogger("dask_image_ingest")


def folder_of(url: str) -> tuple[str, str]:
    """The folder of a shard, and its name in it."""
    path = local_path(url)
    if path is not None:
        return os.path.split(path)
    head, path, tail = split_url(url)
    folder, _, name = path.rpartition("/")
    return head + folder + tail, name


def shard_name(url: str) -> str:
    """The name of a shard in its folder; with the query of a URL, if any, but no signature."""
    name = folder_of(url)[1]
    _, mark, query = url_identity(url).partition("?") if is_web(url) else ("", "", "")
    return f"{name}{mark}{query.replace('/', '%2F')}"


def inside(folder: str, name: str) -> str:
    """The path or URL of a file in a folder, which is one of `folder_of` or `as_folder`."""
    if local_path(folder) is not None:
        return os.path.join(folder, name)
    head, path, tail = split_url(folder)
    return f"{head}{path}/{name}{tail}"


def by_folder(shards: Iterable[Shard]) -> list[tuple[str, list[Shard]]]:
    """Shards by their folder, without commands."""
    folders: dict[str, tuple[str, list[Shard]]] = {}
    for shard in shards:
        if not is_pipe(shard.url):
            folder = folder_of(shard.url)[0]
            # Each URL of the web has its own query, perhaps: their folder is listed by the first.
            same = folder.partition("?")[0] if is_web(folder) else folder
            folders.setdefault(same, (folder, []))[1].append(shard)
    return [*folders.values()]


def folder_entries(
    folder: str,
    shards: Iterable[Shard],
    storage_options: dict[str, Any] | None,
    listings: Listings | None = None,
) -> dict[str, Info]:
    """At least those files in a folder whose names begin as those of ``shards``; by name.

    Parameters
    ----------
    listings
        Listings to reuse, of the same shards; one that has failed is empty. Without them, fsspec's
        cached listings are dropped first.

    Returns
    -------
    dict
        fsspec's info of each file; empty for local files.

    Raises
    ------
    ShardNotFoundError, ShardError
        If there is no such folder, or if it can't be listed: many web servers refuse.
    """
    path = local_path(folder)
    if path is not None:
        return {name: {} for name in translate_errors(folder, os.listdir, path)}
    if listings is None:
        file_system(folder, storage_options)[0].invalidate_cache()
        listings = {}
    if folder in listings:
        return listings[folder]
    names = (shard_name(shard.url) for shard in shards)
    stems = {name.partition(".")[0] or name for name in names}
    fs, _ = file_system(folder, storage_options)
    if len(stems) >= WORTH_A_LISTING or not supports_prefix(fs):
        return list_folder(folder, storage_options, listings)
    listings[folder] = {}  # stays if the request fails
    entries = call_fsspec(folder, _with_prefix, folder, stems, storage_options)
    if not entries and not exists_remote(folder, storage_options):
        raise ShardNotFoundError(f"{folder} is not found")
    listings[folder] = entries
    return entries


def _with_prefix(
    folder: str, stems: Collection[str], storage_options: dict[str, Any] | None
) -> dict[str, Info]:
    """Files by the common prefix of a few stems, and of the combined index.

    So a folder of millions of other files is not listed.
    """
    fs, root = file_system(folder, storage_options)
    fs.invalidate_cache(root)
    common = os.path.commonprefix(sorted(stems))  # noqa: RUF071 - of names in one folder
    entries: dict[str, Info] = {}
    for prefix in (common, COMBINED_INDEX):
        found = find_below(fs, root, prefix).items()
        entries |= {name: info for name, info in found if "/" not in name}
    return entries


def find_beside(
    shards: Iterable[Shard],
    suffix: str,
    storage_options: dict[str, Any] | None,
    listings: Listings,
) -> list[Shard | None]:
    """Find the file with this suffix beside each shard; None for each without one.

    Each folder is listed once. On a web server without listings, one file is requested; if it
    exists, the others are taken to exist, with size -1 and no version.
    """
    urls = [_beside(shard.url, suffix) for shard in shards]
    candidates = list(filter(None, urls))
    files = {url: find_local_file(url) for url in candidates if local_path(url) is not None}
    remote = [url for url in candidates if local_path(url) is None]
    files |= find_files(remote, storage_options, listings)
    return [None if url is None else files[url] for url in urls]


def find_listed(
    shards: Sequence[Shard],
    suffix: str,
    storage_options: dict[str, Any] | None,
    listings: Listings,
) -> list[Shard | None]:
    """Find the file with this suffix beside each shard, by one listing of each folder alone.

    None for each shard without one, and if its folder can't be listed. None for a signed URL, whose
    signature may be of that file alone.
    """
    found: dict[str, Shard | None] = {}
    for folder, members in by_folder(shards):
        try:
            entries = folder_entries(folder, members, storage_options, listings)
        except Exception as error:  # each file system has exceptions of its own
            logger.debug("%s cannot be listed: %s", folder, error)
            continue
        for shard in members:
            url = _beside(shard.url, suffix)
            name = "" if url is None else folder_of(url)[1]
            info = entries.get(unquote(name) if is_web(folder) else name)
            if url is None or info is None or is_signed(url):
                continue
            if local_path(url) is not None:
                found[shard.url] = find_local_file(url)
            elif info["type"] != "directory":
                found[shard.url] = shard_of(url, info)
    return [found.get(shard.url) for shard in shards]


def _beside(url: str, suffix: str) -> str | None:
    """The URL of a shard with another suffix; None if its own is no shard's."""
    if is_pipe(url):
        return None
    head, path, tail = ("", url, "") if local_path(url) is not None else split_url(url)
    stem = without_suffix(path)
    return None if stem is None else f"{head}{stem}{suffix}{tail}"
