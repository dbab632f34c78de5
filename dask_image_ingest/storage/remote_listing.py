"""The shards behind URLs: files, folders, the matches of globs; by listings where that pays."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.listing_progress import found as count
from dask_image_ingest.storage.fsspec_compat import FileSystem, file_system
from dask_image_ingest.storage.patterns import SHARDS, FileKind, glob_root, is_glob
from dask_image_ingest.storage.remote import call_fsspec, version_of
from dask_image_ingest.storage.shard import Shard, is_web, split_url

#: A folder is listed if at least this many of its shards are wanted: it may hold millions more.
WORTH_A_LISTING = 8

_REQUESTS_AT_ONCE = 32

# What fsspec tells of a file.
Info = dict[str, Any]

#: Folder → path → what a listing told of it: of those that were listed for one question, for the
#: next one.
Listings = dict[str, dict[str, Info]]


def find_remote(
    urls: list[str], storage_options: dict[str, Any] | None, kind: FileKind = SHARDS
) -> dict[str, list[Shard]]:
    """Find the files of a kind behind each URL; an empty list if nothing is there."""
    found: dict[str, list[Shard]] = {}
    for url in urls:
        path = split_url(url)[1]
        if path.endswith("/") or (is_glob(url) and not exists_remote(url, storage_options)):
            found[url] = _search(url, storage_options, kind)
    for folder, members in _by_folder([url for url in urls if url not in found]).items():
        found |= _look_up(folder, members, storage_options, kind)
    return found


def exists_remote(url: str, storage_options: dict[str, Any] | None) -> bool:
    """Tell whether there is something of this very name, wildcards and braces taken literally."""
    fs, path = file_system(url, storage_options)
    try:
        return _info(fs, path, url) is not None
    except ShardError:
        return False  # not even a possible name


def list_folder(
    folder: str, storage_options: dict[str, Any] | None, listings: Listings
) -> dict[str, Info]:
    """Entries of a folder, by one listing; none where an earlier one of ``listings`` has failed.

    Raises
    ------
    ShardNotFoundError, ShardError
        If there is no such folder, or if its server lists none.
    """
    if folder not in listings:
        listings[folder] = {}
        fs, path = file_system(folder, storage_options)
        entries = call_fsspec(folder, fs.ls, f"{path}/" if is_web(folder) else path, detail=True)
        count(len(entries))
        listings[folder] = {entry["name"].strip("/"): entry for entry in entries}
    return listings[folder]


def find_files(
    urls: list[str], storage_options: dict[str, Any] | None, listings: Listings
) -> dict[str, Shard | None]:
    """Find files whose folders were listed just now for others, whose listings are used again."""
    found: dict[str, Shard | None] = dict.fromkeys(urls)
    for folder, members in _by_folder(urls).items():
        infos = _infos_in(folder, members, storage_options, listings)
        for url, info in zip(members, infos, strict=True):
            if info is not None and info["type"] != "directory":
                found[url] = _shard(url, info)
    return found


def _by_folder(urls: list[str]) -> dict[str, list[str]]:
    by_folder: dict[str, list[str]] = defaultdict(list)
    for url in urls:
        head, path, tail = split_url(url)
        by_folder[head + path.rpartition("/")[0] + tail].append(url)
    return by_folder


def _infos_in(
    folder: str, urls: list[str], storage_options: dict[str, Any] | None, listings: Listings
) -> list[Info | None]:
    """Infos of files of one folder, by its listing if they are many.

    Where a web server lists nothing, those of the first file stand for all.
    """
    fs, root = file_system(folder, storage_options)
    paths = _paths(root, urls)
    if len(urls) < WORTH_A_LISTING:
        return _infos(fs, paths, urls)
    try:
        entries = list_folder(folder, storage_options, listings)
    except ShardNotFoundError:
        entries = {}
    except ShardError:
        if not is_web(folder):
            raise
        entries = {}
    if is_web(folder) and not any(path in entries for path in paths):
        first = _info(fs, paths[0], urls[0])
        return [first, *[first and {"type": "file"}] * (len(paths) - 1)]
    return [entries.get(path.strip("/")) for path in paths]


def _look_up(
    folder: str, urls: list[str], storage_options: dict[str, Any] | None, kind: FileKind
) -> dict[str, list[Shard]]:
    fs, root = file_system(folder, storage_options)
    # What is known from an earlier call may be out of date by now.
    fs.invalidate_cache()
    if is_web(folder):  # its listings know no sizes
        infos = _infos(fs, _paths(root, urls), urls)
    else:
        infos = _infos_in(folder, urls, storage_options, {})
    return {
        url: [] if info is None else _files_of(url, info, storage_options, kind)
        for url, info in zip(urls, infos, strict=True)
    }


def _paths(folder_path: str, urls: list[str]) -> list[str]:
    """Paths that a file system has for these URLs of one folder."""
    names = [split_url(url)[1].rpartition("/")[2] for url in urls]
    return [f"{folder_path.rstrip('/')}/{name}" if folder_path else name for name in names]


def _search(url: str, storage_options: dict[str, Any] | None, kind: FileKind) -> list[Shard]:
    """Search a folder to the bottom, or see what a glob matches."""
    head, path, tail = split_url(url)
    folder = path.endswith("/")
    root = path.rstrip("/") if folder else glob_root(path)
    fs, fs_root = file_system(head + root + tail, storage_options)
    fs.invalidate_cache()
    try:
        if folder:
            entries = call_fsspec(url, fs.find, fs_root, detail=True)
        else:
            entries = call_fsspec(url, fs.glob, fs_root + path[len(root) :], detail=True)
    except ShardNotFoundError:
        return []
    count(len(entries))
    if not entries:
        _info(fs, fs_root, url)  # listings may swallow that no server answers
    files: dict[str, str] = {}
    shards: list[Shard] = []
    for name, entry in entries.items():
        below = name.strip("/")[len(fs_root.strip("/")) :].strip("/")
        found = "/".join(filter(None, (root, below)))
        is_folder = entry["type"] == "directory"
        if folder:
            wanted = kind.is_below(below)
        else:
            wanted = kind.is_meant(path, found.rpartition("/")[2], is_folder)
        if wanted and is_folder:
            shards += _search(f"{head}{found}/{tail}", storage_options, kind)
        elif wanted:
            files[head + found + tail] = name
    # Listings of web pages know no sizes.
    bare = {found: name for found, name in files.items() if entries[name].get("size") is None}
    entries.update(zip(bare.values(), _infos(fs, list(bare.values()), list(bare)), strict=True))
    return shards + [_shard(found, entries[name]) for found, name in files.items()]


def _infos(fs: FileSystem, paths: list[str], urls: list[str]) -> list[Info | None]:
    at_once = _REQUESTS_AT_ONCE if fs.async_impl else 1
    with ThreadPoolExecutor(at_once) as pool:
        infos = []
        for info in pool.map(lambda path, url: _info(fs, path, url), paths, urls):
            infos.append(info)
            count()
        return infos


def _info(fs: FileSystem, path: str, url: str) -> Info | None:
    try:
        info: Info = call_fsspec(url, fs.info, path)
    except ShardNotFoundError:
        return None
    return info


def _files_of(
    url: str, info: Info, storage_options: dict[str, Any] | None, kind: FileKind
) -> list[Shard]:
    if info["type"] != "directory":
        return [_shard(url, info)]
    head, path, tail = split_url(url)
    return _search(f"{head}{path}/{tail}", storage_options, kind)


def _shard(url: str, info: Info) -> Shard:
    size = info.get("size")
    return Shard(url, -1 if size is None else int(size), version_of(info))
