"""Listing of remote shards: files, folders and globs; single files by a folder's listing."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

from dask_image_ingest.errors import ArgumentError, ShardError, ShardNotFoundError
from dask_image_ingest.storage.fsspec_compat import (
    Info,
    entries_in,
    file_system,
    find_below,
    info_of,
    name_below,
)
from dask_image_ingest.storage.patterns import FileKind, LeftOut, glob_root, is_glob
from dask_image_ingest.storage.remote import call_fsspec, version_of
from dask_image_ingest.storage.search import ANY_DEPTH, Search
from dask_image_ingest.storage.shard import (
    FileSystem,
    Shard,
    as_folder,
    as_sent,
    is_object_store,
    is_web,
    split_url,
)
from dask_image_ingest.url_secrets import is_signed

#: List a folder, which may hold millions of other files, for no fewer of its files than this.
WORTH_A_LISTING = 8

_REQUESTS_AT_ONCE = 32

#: Folder → name → info: listings that the lookups of one read share.
Listings = dict[str, dict[str, Info]]


def find_remote(
    urls: list[str],
    storage_options: dict[str, Any] | None,
    kind: FileKind,
    left_out: LeftOut,
) -> dict[str, list[Shard]]:
    """Find the files of a kind at each URL or glob; an empty list if there are none."""
    shards: dict[str, list[Shard]] = {}
    for url in urls:
        head, path, tail = split_url(url)
        if is_web(url) and tail:  # with a query it may be anything but a glob
            if is_glob(head + path) and not exists_remote(url, storage_options):
                raise ArgumentError(
                    f"{url} cannot be listed, having a query: name the shards, for example with "
                    "braces, as https://host/{000..127}.tar?query does"
                )
        elif path.endswith("/") or (
            is_glob(head + path) and not exists_remote(url, storage_options)
        ):
            shards[url] = _search(url, storage_options, kind, left_out)
    for folder, members in _by_folder([url for url in urls if url not in shards]).items():
        shards |= _look_up(folder, members, storage_options, kind, left_out)
    return shards


def exists_remote(url: str, storage_options: dict[str, Any] | None) -> bool:
    """True if a file or folder of exactly this name exists, wildcards and braces included."""
    fs, path = file_system(url, storage_options)
    try:
        return _info(fs, path, url) is not None
    except ShardError:
        return False  # not a valid name


def list_folder(
    folder: str, storage_options: dict[str, Any] | None, listings: Listings
) -> dict[str, Info]:
    """Entries of a folder by name, from ``listings`` or by one request; empty if it failed before.

    Raises
    ------
    ShardNotFoundError, ShardError
        If there is no such folder, or if its server does not list folders.
    """
    if folder not in listings:
        entries = listings[folder] = {}  # stays if the request fails
        if web := is_web(folder):
            head, path, tail = split_url(folder)
            folder = f"{head}{path}/{tail}"
        fs, path = file_system(folder, storage_options)
        listed = call_fsspec(folder, entries_in, fs, path)
        for name, entry in listed.items():
            entries[unquote(name.partition("?")[0]) if web else name] = entry
        return entries
    return listings[folder]


def find_files(
    urls: list[str], storage_options: dict[str, Any] | None, listings: Listings
) -> dict[str, Shard | None]:
    """Find files by exact URL; None for each that does not exist. Reuses ``listings``."""
    files: dict[str, Shard | None] = dict.fromkeys(urls)
    for folder, members in _by_folder(urls).items():
        infos = _infos_in(folder, members, storage_options, listings)
        for url, info in zip(members, infos, strict=True):
            if info is not None and info["type"] != "directory":
                files[url] = shard_of(url, info)
    return files


def _by_folder(urls: list[str]) -> dict[str, list[str]]:
    by_folder: dict[str, list[str]] = defaultdict(list)
    for url in urls:
        head, path, tail = split_url(url)
        # Each URL of the web has its own query, perhaps, and is looked up alone.
        folder = head + path.rpartition("/")[0] + ("" if is_web(url) else tail)
        by_folder[folder].append(url)
    return by_folder


def _infos_in(
    folder: str, urls: list[str], storage_options: dict[str, Any] | None, listings: Listings
) -> list[Info | None]:
    """Infos of files of one folder, None for missing ones; by its listing if they are many.

    On a web server without listings, the first file is requested and taken to stand for all.
    """
    fs, root = file_system(folder, storage_options)
    paths = _paths(root, urls)
    if len(urls) < WORTH_A_LISTING:
        return _infos(fs, paths, urls, beside=True)
    head, path, tail = split_url(urls[0])
    try:
        entries = list_folder(head + path.rpartition("/")[0] + tail, storage_options, listings)
    except ShardNotFoundError:
        entries = {}
    except ShardError:
        if not is_web(folder):
            raise
        entries = {}
    names = [split_url(url)[1].rpartition("/")[2] for url in urls]
    if is_web(folder):
        names = [unquote(name) for name in names]
        if not any(name in entries for name in names):
            first = _info(fs, paths[0], urls[0], beside=True)
            return [first, *[first and {"type": "file"}] * (len(paths) - 1)]
    return [entries.get(name) for name in names]


def _look_up(
    folder: str,
    urls: list[str],
    storage_options: dict[str, Any] | None,
    kind: FileKind,
    left_out: LeftOut,
) -> dict[str, list[Shard]]:
    fs, root = file_system(folder, storage_options)
    # fsspec's cached listings may be out of date.
    fs.invalidate_cache()
    if is_web(folder):  # listings of web pages have no sizes
        infos = _infos(fs, _paths(root, urls), urls)
    else:
        infos = _infos_in(folder, urls, storage_options, {})
    return {
        url: [] if info is None else _files_of(url, info, storage_options, kind, left_out)
        for url, info in zip(urls, infos, strict=True)
    }


def _paths(folder_path: str, urls: list[str]) -> list[str]:
    """Paths in the file system of these URLs of one folder."""
    if is_web(urls[0]):
        return [as_sent(url) for url in urls]
    names = [split_url(url)[1].rpartition("/")[2] for url in urls]
    start = f"{folder_path}/" if folder_path.strip("/") else folder_path
    return [start + name for name in names]


def _search(
    url: str, storage_options: dict[str, Any] | None, kind: FileKind, left_out: LeftOut
) -> list[Shard]:
    """Files of a kind below a folder, or those that match a glob."""
    head, path, tail = split_url(url)
    folder = path.endswith("/")
    root = split_url(as_folder(url))[1] if folder else glob_root(path)
    fs, fs_root = file_system(head + root + tail, storage_options)
    fs.invalidate_cache()
    search = Search(url, kind)
    parts = search.split()[1]
    # fsspec's globs find no keys with empty parts.
    has_empty = is_object_store(url) and ("//" in path or ANY_DEPTH in parts)
    try:
        if folder or has_empty:
            entries = call_fsspec(url, find_below, fs, fs_root)
        else:
            found = call_fsspec(url, fs.glob, fs_root + path[len(root) :], detail=True)
            entries = {name_below(fs_root, path) or "": info for path, info in found.items()}
    except ShardNotFoundError:
        return []
    if not entries:
        _info(fs, fs_root, url)  # raises if the server is unreachable, which listings may hide
    files: dict[str, Info] = {}
    shards: list[Shard] = []
    for below, entry in entries.items():
        file = f"{head}{root}/{below}{tail}" if root else f"{head}{below}{tail}"
        is_folder = entry["type"] == "directory"
        if folder or has_empty:
            wanted = search.takes(below, parts)
        else:
            wanted = kind.is_meant(path, below.rstrip("/").rpartition("/")[2], is_folder)
        if wanted and is_folder:
            inner = f"{split_url(as_folder(file))[1]}/"
            shards += _search(f"{head}{inner}{tail}", storage_options, kind, left_out)
        elif wanted:
            files[file] = entry
        elif folder and kind.has_suffix(below):
            left_out.add("hidden files and folders", file)
    # Listings of web pages have no sizes.
    unsized = {file: entry["name"] for file, entry in files.items() if entry.get("size") is None}
    infos = _infos(fs, list(unsized.values()), list(unsized))
    for file, info in zip(unsized, infos, strict=True):
        if info is None:
            if not kind.single:
                raise ShardNotFoundError(f"{file} is listed, and does not exist")
            left_out.add("links to nothing", file)
            del files[file]
        else:
            files[file] = info
    return shards + [shard_of(file, info) for file, info in files.items()]


def _infos(
    fs: FileSystem, paths: list[str], urls: list[str], beside: bool = False
) -> list[Info | None]:
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE if fs.async_impl else 1) as pool:
        return [*pool.map(lambda path, url: _info(fs, path, url, beside), paths, urls)]


def _info(fs: FileSystem, path: str, url: str, beside: bool = False) -> Info | None:
    try:
        info: Info = call_fsspec(url, info_of, fs, path)
    except ShardNotFoundError:
        return None
    except ShardError:
        # The signature of a shard may be of that file alone: none beside it can be read then.
        if beside and is_signed(url):
            return None
        raise
    return info


def _files_of(
    url: str,
    info: Info,
    storage_options: dict[str, Any] | None,
    kind: FileKind,
    left_out: LeftOut,
) -> list[Shard]:
    if info["type"] != "directory":
        return [shard_of(url, info)]
    head, path, tail = split_url(url)
    return _search(f"{head}{path}/{tail}", storage_options, kind, left_out)


def shard_of(url: str, info: Info) -> Shard:
    """A file by fsspec's info."""
    size = info.get("size")
    return Shard(url, -1 if size is None else int(size), version_of(info))
