"""Files beside shards, found by one listing of each folder."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Iterable
from typing import Any

from dask_image_ingest.errors import ShardNotFoundError
from dask_image_ingest.progress_bar import listing
from dask_image_ingest.storage.fsspec_compat import FileSystem, file_system, translate_errors
from dask_image_ingest.storage.listing import find_local_file
from dask_image_ingest.storage.patterns import COMBINED_INDEX, without_suffix
from dask_image_ingest.storage.pipe import is_pipe
from dask_image_ingest.storage.remote import call_fsspec
from dask_image_ingest.storage.remote_listing import (
    WORTH_A_LISTING,
    Listings,
    exists_remote,
    find_files,
    list_folder,
)
from dask_image_ingest.storage.shard import Shard, is_web, local_path, split_url
from dask_image_ingest.url_secrets import url_identity


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
    """The path or URL of a file in a folder."""
    if local_path(folder) is not None:
        return os.path.join(folder, name)
    head, path, tail = split_url(folder)
    return f"{head}{path.rstrip('/')}/{name}{tail}"


def folder_names(
    folder: str,
    stems: Collection[str],
    storage_options: dict[str, Any] | None,
    listings: Listings | None = None,
) -> set[str]:
    """The names of at least those files in a folder that begin with one of ``stems``.

    Parameters
    ----------
    listings
        Listings to reuse; without them, fsspec's cached listings are dropped first.

    Raises
    ------
    ShardNotFoundError, ShardError
        If there is no such folder, or if it can't be listed: many web servers refuse.
    """
    path = local_path(folder)
    if path is not None:
        return set(translate_errors(folder, os.listdir, path))
    paths: Iterable[str] | None = None
    if folder not in (listings or {}):
        paths = call_fsspec(folder, _with_prefix, folder, stems, storage_options)
    if paths is None:
        if listings is None:
            file_system(folder, storage_options)[0].invalidate_cache()
        paths = list_folder(folder, storage_options, {} if listings is None else listings)
    elif not paths and not exists_remote(folder, storage_options):
        raise ShardNotFoundError(f"{folder} is not found")
    return {path.rstrip("/").rpartition("/")[2] for path in paths}


def _with_prefix(
    folder: str, stems: Collection[str], storage_options: dict[str, Any] | None
) -> list[str] | None:
    """Paths by the common prefix of a few stems, and of the combined index.

    So a folder of millions of other files is not listed. None if there are many stems, or if the
    file system lists only whole folders.
    """
    fs, root = file_system(folder, storage_options)
    if len(stems) >= WORTH_A_LISTING or not _supports_prefix(fs):
        return None
    fs.invalidate_cache(root)
    common = os.path.commonprefix(sorted(stems))  # noqa: RUF071 - of names in one folder
    return [name for prefix in (common, COMBINED_INDEX) for name in fs.find(root, prefix=prefix)]


def _supports_prefix(fs: FileSystem) -> bool:
    find = getattr(fs, "_find", fs.find)
    return "prefix" in inspect.signature(find).parameters


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
    with listing(f"the {suffix} files beside the shards"):
        files = {url: find_local_file(url) for url in candidates if local_path(url) is not None}
        remote = [url for url in candidates if local_path(url) is None]
        files |= find_files(remote, storage_options, listings)
    return [None if url is None else files[url] for url in urls]


def _beside(url: str, suffix: str) -> str | None:
    """The URL of a shard with another suffix; None if its own is no shard's."""
    if is_pipe(url):
        return None
    head, path, tail = ("", url, "") if local_path(url) is not None else split_url(url)
    stem = without_suffix(path)
    return None if stem is None else f"{head}{stem}{suffix}{tail}"
