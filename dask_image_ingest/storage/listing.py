"""What lies behind one path or URL: a file, a folder of shards, the matches of a glob.

Nothing is opened. A local shard costs one ``stat``, a remote one its line in a folder's listing.
"""

import glob
import os
import stat
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.storage.faults import guarded
from dask_image_ingest.storage.open import FileSystem, file_system
from dask_image_ingest.storage.url import split_url

__all__ = ["Shard", "exists_remote", "find_local", "find_remote", "glob_root", "is_glob"]

# What a folder is searched for.
SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst")

_HIDDEN = (".", "_")

# A folder is listed if at least this many of its shards are wanted: it may hold millions more.
_WORTH_A_LISTING = 8

_REQUESTS_AT_ONCE = 32

# What the file systems of fsspec call that which changes when a file does, the surest first.
_VERSIONS = (
    "ETag",
    "etag",
    "Content-MD5",
    "generation",
    "mtime",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "updated",
    "modified",
    "created",
)

# What fsspec tells of a file.
Info = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard as it was when it was found.

    Attributes
    ----------
    url
        An absolute path for a local shard, else the whole URL.
    size
        In bytes, as stored; -1 if the server does not tell.
    version
        What changes when the shard does: the time of its last change in nanoseconds, or what its
        file system knows of that kind (an ETag, a time). Empty if it knows nothing.
    """

    url: str
    size: int
    version: str


def is_glob(path: str) -> bool:
    """Tell whether a path has wildcards."""
    return any(mark in path for mark in _wildcards(path))


def glob_root(path: str) -> str:
    """Give the folder that a glob searches, without a slash at its end."""
    first = min(path.index(mark) for mark in _wildcards(path) if mark in path)
    return path[:first].rpartition("/")[0]


def _wildcards(path: str) -> str:
    # In a web address "?" begins a query.
    return "*" if path.startswith("http") else "*?["


# --- local ----------------------------------------------------------------------------------------


def find_local(path: str) -> list[Shard]:
    """Find the shards behind an absolute path; none if nothing is there."""
    if not is_glob(path) or os.path.lexists(path):
        return list(_shards_at(path))
    return [
        shard
        for match in glob.iglob(path, recursive=True)
        if _is_meant(path, os.path.basename(match), os.path.isdir(match))
        for shard in _shards_at(match)
    ]


def _shards_at(path: str) -> Iterator[Shard]:
    try:
        facts = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error}") from error
    if stat.S_ISDIR(facts.st_mode):
        yield from _shards_below(path)
    else:
        yield Shard(path, facts.st_size, str(facts.st_mtime_ns))


def _shards_below(top: str) -> Iterator[Shard]:
    for folder, folders, files in os.walk(top, onerror=_refuse_unreadable):
        folders[:] = [name for name in folders if not name.startswith(_HIDDEN)]
        for name in filter(_is_wanted, files):
            path = os.path.join(folder, name)
            shards = list(_shards_at(path))
            if not shards:
                raise ShardNotFoundError(f"{path} is a link to a file that does not exist")
            yield from shards


def _refuse_unreadable(error: OSError) -> None:
    raise ShardError(f"the folder {error.filename} cannot be listed: {error}") from error


def _is_wanted(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(_HIDDEN)


def _is_meant(pattern: str, name: str, folder: bool) -> bool:
    """Keep ``data/*`` to shards and folders; a glob that names a suffix gets what it asks for."""
    if not pattern.endswith("*"):
        return True
    return _is_wanted(name) or (folder and not name.startswith(_HIDDEN))


# --- remote ---------------------------------------------------------------------------------------


def find_remote(urls: list[str], storage_options: dict[str, Any] | None) -> dict[str, list[Shard]]:
    """Find the shards behind each URL; an empty list if nothing is there."""
    found: dict[str, list[Shard]] = {}
    by_folder: dict[str, list[str]] = defaultdict(list)
    for url in urls:
        head, path, tail = split_url(url)
        if path.endswith("/") or (is_glob(url) and not exists_remote(url, storage_options)):
            found[url] = _search(url, storage_options)
        else:
            by_folder[head + path.rpartition("/")[0] + tail].append(url)
    for folder, members in by_folder.items():
        found |= _look_up(folder, members, storage_options)
    return found


def exists_remote(url: str, storage_options: dict[str, Any] | None) -> bool:
    """Tell whether there is something of this very name, wildcards and braces taken literally."""
    fs, path = file_system(url, storage_options)
    try:
        return _info(fs, path, url) is not None
    except ShardError:
        return False  # not even a possible name


def _look_up(
    folder: str, urls: list[str], storage_options: dict[str, Any] | None
) -> dict[str, list[Shard]]:
    fs, folder_path = file_system(folder, storage_options)
    # What is known from an earlier call may be out of date by now.
    fs.invalidate_cache()
    names = [split_url(url)[1].rpartition("/")[2] for url in urls]
    paths = [f"{folder_path.rstrip('/')}/{name}" if folder_path else name for name in names]
    if len(urls) >= _WORTH_A_LISTING and not folder.startswith("http"):
        entries = _list(fs, folder_path, folder)
        infos = [entries.get(path.strip("/")) for path in paths]
    else:
        infos = _infos(fs, paths, urls)
    return {
        url: [] if info is None else _shards_of(url, info, storage_options)
        for url, info in zip(urls, infos, strict=True)
    }


def _search(url: str, storage_options: dict[str, Any] | None) -> list[Shard]:
    """Search a folder to the bottom, or see what a glob matches."""
    head, path, tail = split_url(url)
    folder = path.endswith("/")
    root = path.rstrip("/") if folder else glob_root(path)
    fs, fs_root = file_system(head + root + tail, storage_options)
    fs.invalidate_cache()
    try:
        if folder:
            entries = guarded(url, fs.find, fs_root, detail=True)
        else:
            entries = guarded(url, fs.glob, fs_root + path[len(root) :], detail=True)
    except ShardNotFoundError:
        return []
    if not entries:
        _info(fs, fs_root, url)  # listings may swallow that no server answers
    files: dict[str, str] = {}
    shards: list[Shard] = []
    for name, entry in entries.items():
        below = name.strip("/")[len(fs_root.strip("/")) :].strip("/")
        found = "/".join(filter(None, (root, below)))
        is_folder = entry["type"] == "directory"
        if folder:
            wanted = _is_wanted_below(below)
        else:
            wanted = _is_meant(path, found.rpartition("/")[2], is_folder)
        if wanted and is_folder:
            shards += _search(f"{head}{found}/{tail}", storage_options)
        elif wanted:
            files[head + found + tail] = name
    # Listings of web pages know no sizes.
    bare = {found: name for found, name in files.items() if entries[name].get("size") is None}
    entries.update(zip(bare.values(), _infos(fs, list(bare.values()), list(bare)), strict=True))
    return shards + [_shard(found, entries[name]) for found, name in files.items()]


def _is_wanted_below(path: str) -> bool:
    parts = path.split("/")
    return _is_wanted(parts[-1]) and not any(part.startswith(_HIDDEN) for part in parts)


def _list(fs: FileSystem, folder_path: str, folder: str) -> dict[str, Info]:
    try:
        entries = guarded(folder, fs.ls, folder_path, detail=True)
    except ShardNotFoundError:
        return {}
    return {entry["name"].strip("/"): entry for entry in entries}


def _infos(fs: FileSystem, paths: list[str], urls: list[str]) -> list[Info | None]:
    at_once = _REQUESTS_AT_ONCE if fs.async_impl else 1
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda path, url: _info(fs, path, url), paths, urls))


def _info(fs: FileSystem, path: str, url: str) -> Info | None:
    try:
        info: Info = guarded(url, fs.info, path)
    except ShardNotFoundError:
        return None
    return info


def _shards_of(url: str, info: Info, storage_options: dict[str, Any] | None) -> list[Shard]:
    if info["type"] != "directory":
        return [_shard(url, info)]
    head, path, tail = split_url(url)
    return _search(f"{head}{path}/{tail}", storage_options)


def _shard(url: str, info: Info) -> Shard:
    size = info.get("size")
    version: Any = next((info[name] for name in _VERSIONS if info.get(name)), "")
    # A file system may give one time as a datetime here and as a number there.
    version = version.timestamp() if isinstance(version, datetime) else version
    return Shard(url, -1 if size is None else int(size), str(version))
