"""Listing of shards: files, folders, globs and braces, local and remote."""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from dask_image_ingest.arguments import is_utf8, path_text, shown
from dask_image_ingest.errors import ArgumentError, ShardError, ShardNotFoundError, warn_user
from dask_image_ingest.storage.fsspec_files import (
    Info,
    call_fsspec,
    entries_in,
    exists_remote,
    file_system,
    find_below,
    info_of,
    infos_of,
    list_folder,
    look_up,
    shard_of,
)
from dask_image_ingest.storage.open import refuse_special
from dask_image_ingest.storage.patterns import (
    ANY_DEPTH,
    SHARDS,
    FileKind,
    Matcher,
    Search,
    expand_braces,
    is_glob,
)
from dask_image_ingest.storage.shard import (
    Shard,
    inside,
    is_object_store,
    is_pipe,
    is_web,
    local_path,
    split_url,
    without_query,
)
from dask_image_ingest.storage.streams import refuse_pipes
from dask_image_ingest.url_secrets import url_identity

#: Files and folders that searches leave out, by reason.
LeftOut: TypeAlias = defaultdict[str, list[str]]

# Reasons of folders that a glob or a search for `single` files can't list, and of such files.
_UNLISTED, _UNREAD = "folders that can't be listed", "files that can't be read"

_HIDDEN, _NOT_UTF8 = (
    "hidden files and folders",
    "names that are not UTF-8, which no column can hold",
)

# Links to folders on the way to a file: of folders that all link to each other there is no end.
_MOST_LINKS = 3

# Errors of a path: there is no such file, a link leads nowhere, a name is impossible, permission is
# missing. Any other is of a disk that fails: what is there, is not known.
_OF_PATHS = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL)
) | {errno.EACCES, errno.EPERM}


def find_shards(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    storage_options: dict[str, Any] | None = None,
    kind: FileKind = SHARDS,
) -> list[Shard]:
    """List the shards of ``paths``, each once, in natural order (2 before 10).

    Parameters
    ----------
    paths
        One or many of

        - a file;
        - a folder, searched to the bottom for ``.tar``, ``.tar.gz``, ``.tgz`` and ``.tar.zst``;
          files and folders whose names begin with ``.`` or ``_`` are left out, and links to folders
          are not followed (other kinds of files have rules of their own: `FileKind`);
        - a glob, with ``**`` for any depth, which does not follow links to folders. Files that
          match are shards whatever their suffix, unless the glob ends with ``*``; folders that
          match are searched;
        - braces, ``{000..127}`` or ``{train,val}``, around or inside any of these;
        - any of these as a URL that fsspec supports;
        - ``pipe:`` and a command, with braces, if ``allow_pipes`` is among the options.

        A path that exists literally, braces and wildcards included, is taken literally.
    storage_options
        For the remote file system.
    kind
        Kind of files to list, if not shards.

    Raises
    ------
    ShardNotFoundError
        If a path, or any path that braces expand to, leads to no shard.
    ArgumentError
        If there is no path or an item is none, if braces are unbalanced, if a protocol is unknown,
        or if a command is not allowed.
    MissingDependencyError
        If a package for the protocol is not installed.
    ShardError
        If a folder cannot be listed.

    Examples
    --------
    >>> find_shards("train-{000..003}.tar")[0]
    Shard(url='/.../train-000.tar', size=4177920, version='...', sidecar=None, ctime=...)
    """
    return _find(_as_patterns(paths), storage_options, kind)


def searches_of(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    files: Iterable[Shard],
    kind: FileKind = SHARDS,
) -> tuple[Search, ...]:
    """The folders and globs among ``paths``; ``files`` are what `find_shards` has found there."""
    named = _named(_as_patterns(paths), files)
    return tuple(Search(url, kind) for url, is_file in named if not is_file and not is_pipe(url))


def common_root(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    files: Iterable[Shard],
    kind: FileKind = SHARDS,
) -> tuple[str, bool]:
    """Deepest folder above all ``paths``, whichever files they have; without a trailing slash.

    ``files`` are what `find_shards` has found there. The second value tells whether one of the
    paths is the folder itself, or means each folder directly below it.
    """
    roots: list[tuple[str, bool]] = []
    for url, is_file in _named(_as_patterns(paths), files):
        if is_file:
            roots.append((without_query(url).rpartition("/")[0], False))
        else:
            root, parts = Search(url, kind).split()
            roots.append((root, not parts or parts[0] in ("*", ANY_DEPTH)))
    folders = [root.split("/") for root, _ in roots]
    same = itertools.takewhile(lambda names: len({*names}) == 1, zip(*folders, strict=False))
    common = "/".join(names[0] for names in same)
    return common, (common, True) in roots


def _named(patterns: Iterable[str], files: Iterable[Shard]) -> Iterator[tuple[str, bool]]:
    """Each path, URL and command with its braces expanded, and whether it is one of the files."""
    known = {url_identity(file.url) for file in files}
    for url in _targets(patterns, lambda url: url_identity(url) in known):
        yield url, url_identity(url) in known


def _targets(patterns: Iterable[str], exists: Callable[[str], bool]) -> Iterator[str]:
    """Each path, URL and command with its braces expanded, paths absolute.

    ``exists`` tells whether there is something at a URL.
    """
    for pattern in patterns:
        path = None if is_pipe(pattern) else local_path(pattern)
        if path is None:
            yield from _expand_braces(pattern, lambda url: not is_pipe(url) and exists(url))
        else:
            expanded = _expand_braces(os.path.expanduser(path), os.path.lexists)
            yield from map(os.path.abspath, expanded)


def folders_in(folder: str, storage_options: dict[str, Any] | None, kind: FileKind) -> set[str]:
    """Names of the folders directly in a folder, links to folders included, hidden ones not.

    Empty for a web server that gives no listings.
    """
    if local_path(folder) is None:
        try:
            infos = list_folder(folder, storage_options, {})
        except (ShardError, ShardNotFoundError):
            return set()
        names = {name for name, info in infos.items() if info["type"] == "directory"}
    else:
        try:
            with os.scandir(folder or "/") as entries:
                names = {entry.name for entry in entries if _is_folder(entry)}
        except OSError as error:
            raise _unlisted(folder, error) from error
    return {name for name in names if not name.startswith(kind.hidden)}


def _find(
    patterns: list[str], storage_options: dict[str, Any] | None, kind: FileKind
) -> list[Shard]:
    for command in filter(is_pipe, patterns):
        if kind is not SHARDS:
            raise ArgumentError(f"{shown(command)} is a command, which gives no {kind.name}")
        refuse_pipes(command, storage_options)
    paths = list(_targets(patterns, lambda url: exists_remote(url, storage_options)))
    left_out: LeftOut = defaultdict(list)
    remote = [url for url in paths if not is_pipe(url) and local_path(url) is None]
    by_path = _find_remote(remote, storage_options, kind, left_out) if remote else {}
    for path in paths:
        if is_pipe(path):
            by_path[path] = [Shard(path, -1, "")]
        elif path not in by_path:
            by_path[path] = find_local(path, kind, left_out)
    _refuse_missing(by_path, patterns, kind, left_out)
    if told := _told(left_out, "" if kind.single else _UNLISTED):
        warn_user(f"{shown(patterns[0])}: left out {told}. The other {kind.name}s are read")
    shards: dict[str, Shard] = {}
    for shard in itertools.chain.from_iterable(by_path.values()):
        first = shards.setdefault(url_identity(shard.url), shard)
        if first.url != shard.url and first.state != shard.state:
            raise ArgumentError(
                f"{first.url} and {shard.url} differ by their signature only, and are not the same "
                "file: set image-ingest.remote.signature in Dask's configuration to the names of "
                "the parameters that sign a URL"
            )
        if not is_utf8(shard.url):
            raise ArgumentError(
                f"the name of {os.fsencode(shard.url)!r} is not UTF-8, and no column can hold it: "
                "rename the file, or leave it out"
            )
    return [shards[url] for url in sorted(shards, key=natural_order)]


def _told(left_out: LeftOut, only: str) -> str:
    """The reasons that begin with ``only``, with a number and an example; empty if none does."""
    return "; ".join(
        f"{len(paths)} {reason}, such as "
        + (paths[0] if is_utf8(paths[0]) else repr(os.fsencode(paths[0])))
        for reason, paths in left_out.items()
        if reason.startswith(only)
    )


def _as_patterns(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    try:
        listed = None if isinstance(paths, (bytes, Mapping)) else list(paths)
    except TypeError:
        listed = None
    if listed is None:
        raise ArgumentError(
            f"paths must be a path, a URL or a list of them, not {type(paths).__name__}"
        )
    patterns = [path_text("paths", path) for path in listed]
    if not patterns:
        raise ArgumentError("paths is empty: give at least one path, glob, folder or URL")
    return patterns


def _expand_braces(pattern: str, exists: Callable[[str], bool]) -> list[str]:
    if "{" not in pattern or exists(pattern):
        return [pattern]
    return expand_braces(pattern)


def natural_order(url: str) -> tuple[list[str | int], str]:
    """Sort key for natural order: 2 before 10."""
    # The split alternates between text and digits, so that only equal types are compared.
    parts: list[str | int] = list(re.split(r"([0-9]+)", url))
    parts[1::2] = map(int, parts[1::2])
    return parts, url


def _refuse_missing(
    by_path: Mapping[str, list[Shard]], patterns: list[str], kind: FileKind, left_out: LeftOut
) -> None:
    missing = [path for path, shards in by_path.items() if not shards]
    if kind.single and len(missing) < len(by_path):  # those that are there were told
        missing = [p for p in missing if not os.path.lexists(p) or os.path.isdir(p)]
    if not missing:
        return
    unread = _told(left_out, _UNLISTED) or _told(left_out, _UNREAD)
    more = f". Left out: {unread}" if unread else ""
    raise ShardNotFoundError(_explain(missing, len(by_path), patterns, kind) + more)


def _explain(missing: list[str], total: int, patterns: list[str], kind: FileKind) -> str:
    if total == 1:
        return f"{patterns[0]!r} leads to no {kind.name}: {_why(missing[0], kind)}"
    few = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    source = f" ({patterns[0]!r})" if len(patterns) == 1 else ""
    return (
        f"{len(missing)} of {total} paths{source} lead to no {kind.name}: {few}. "
        f"The first: {_why(missing[0], kind)}"
    )


def _why(path: str, kind: FileKind) -> str:
    if local_path(path) is None:
        return f"no such file, no match, and no folder of this name with {kind.name}s in it"
    if os.path.isdir(path):
        *first, last = kind.suffixes
        return f"the folder holds no {', '.join(first)} or {last} file"
    if os.path.lexists(path):
        return "it is a link to nothing, a special file, or can't be read"
    folder = Search(path, kind).split()[0] if is_glob(path) else os.path.dirname(path)
    if os.path.isdir(folder):
        return f"nothing in {folder} matches" if is_glob(path) else f"no such file in {folder}"
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return f"there is no such folder; the nearest that exists is {folder}"


# --- local files ----------------------------------------------------------------------------------


def find_local(path: str, kind: FileKind, left_out: LeftOut) -> list[Shard]:
    """Find the files of a kind at an absolute path or glob; empty if there are none.

    Raises
    ------
    ShardError
        If a folder cannot be listed, the path is a special file (pipe, device), or a disk fails.
        For `single` files without permission, and special ones, only if that is the path itself.
    """
    if is_glob(path) and not os.path.lexists(path):
        return list(_search(Search(path, kind), left_out))
    return list(_files_at(path, kind, left_out, is_named=not kind.single))


def find_local_file(path: str) -> Shard | None:
    """The regular file of exactly this path; None without one."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):  # perhaps a link to nothing
        return None
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error}") from error
    is_file = stat.S_ISREG(status.st_mode)
    return Shard.of_file(path, status) if is_file else None


def _search(search: Search, left_out: LeftOut) -> Iterator[Shard]:
    root, parts = search.split()
    kind, matcher = search.kind, Matcher(search, parts)
    folders = [(root or "/", matcher.start, 0)]
    while folders:
        folder, matched, links = folders.pop()
        for entry in _entries(folder, search, left_out):
            name, path = entry.name, entry.path
            if not _is_folder(entry):
                if matcher.takes(matched, name):
                    yield from _files_at(path, kind, left_out)
                elif name.startswith(kind.hidden) and kind.has_suffix(name):
                    left_out[_HIDDEN].append(path)
                elif entry.is_symlink() and not os.path.exists(path):
                    left_out["links to nothing"].append(path)
            elif not (below := matcher.enter(matched, name, entry.is_symlink())):
                if name.startswith(kind.hidden):
                    left_out[_HIDDEN].append(path)
            elif kind.single and not is_utf8(name):
                left_out[_NOT_UTF8].append(path)
            elif entry.is_symlink() and _leads_back(path, folder):
                left_out["links to a folder that they are in"].append(path)
            elif entry.is_symlink() and links == _MOST_LINKS:
                left_out[f"links to a folder that are below {links} others"].append(path)
            else:
                folders.append((path, below, links + entry.is_symlink()))


def _leads_back(link: str, folder: str) -> bool:
    """True for a link to the folder that it is in, or to one above."""
    target = os.path.realpath(link).rstrip("/")
    return f"{os.path.realpath(folder)}/".startswith(f"{target}/")


def _entries(folder: str, search: Search, left_out: LeftOut) -> list[os.DirEntry[str]]:
    """The entries of a folder; none if it is no folder, or a glob matches one without permission.

    Raises
    ------
    ShardError
        If it can't be listed.
    """
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        is_left_out = error.errno in _OF_PATHS and (search.kind.single or search.split()[1])
        if not is_left_out:
            raise _unlisted(folder, error) from error
        left_out[f"{_UNLISTED} ({error.strerror})"].append(folder)
        return []


def _unlisted(folder: str, error: OSError) -> ShardError:
    return ShardError(f"the folder {folder} cannot be listed: {error}")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """True for a folder, or a link to one; an error if its disk fails."""
    try:
        return entry.is_dir()
    except OSError as error:  # a link that can't be followed
        if error.errno not in _OF_PATHS:
            raise ShardError(f"{entry.path} cannot be read: {error}") from error
        return False


def _files_at(
    path: str, kind: FileKind, left_out: LeftOut, is_named: bool = False
) -> Iterator[Shard]:
    """The regular files at or below a path; a special file is an error if it ``is_named``."""
    try:
        status = os.stat(path)
    except OSError as error:
        is_missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        if is_missing and not os.path.islink(path):
            return
        if not kind.single or error.errno not in _OF_PATHS:
            if is_missing:
                raise ShardNotFoundError(
                    f"{path} is a link to a file that does not exist"
                ) from error
            raise ShardError(f"{path} cannot be read: {error}") from error
        left_out["links to nothing" if is_missing else f"{_UNREAD} ({error.strerror})"].append(path)
        return
    if stat.S_ISDIR(status.st_mode):
        yield from _search(Search(path, kind), left_out)
    elif kind.single and not is_utf8(path):
        left_out[_NOT_UTF8].append(path)
    elif stat.S_ISREG(status.st_mode):
        yield Shard.of_file(path, status)
    elif is_named:
        refuse_special(path, status.st_mode)
    else:
        left_out["pipes, sockets and devices"].append(path)


# --- remote files ---------------------------------------------------------------------------------


def _find_remote(
    urls: list[str],
    storage_options: dict[str, Any] | None,
    kind: FileKind,
    left_out: LeftOut,
) -> dict[str, list[Shard]]:
    """Find the files of a kind at each URL or glob; an empty list if there are none."""
    found: dict[str, list[Shard]] = {}
    named = []
    for url in urls:
        head, path, tail = split_url(url)
        # With a query it may be anything but a folder.
        has_query = bool(is_web(url) and tail)
        if is_glob(head + path) or path.endswith("/"):
            # What was listed before may be out of date; what this search lists, its steps share.
            file_system(url, storage_options)[0].invalidate_cache()
        is_search = is_glob(head + path) and not exists_remote(url, storage_options)
        if is_search and has_query:
            raise ArgumentError(
                f"{url} cannot be listed, having a query: name the shards, for example with "
                "braces, as https://host/{000..127}.tar?query does"
            )
        if is_search or (path.endswith("/") and not has_query):
            found[url] = _search_remote(Search(url, kind), storage_options, left_out)
        else:
            named.append(url)
    for url, info in look_up(named, storage_options).items():
        if info is None:
            found[url] = []
        elif info["type"] == "directory":
            search = Search(inside(url, ""), kind)
            found[url] = _search_remote(search, storage_options, left_out)
        else:
            found[url] = [shard_of(url, info)]
    return found


def _search_remote(
    search: Search, storage_options: dict[str, Any] | None, left_out: LeftOut
) -> list[Shard]:
    """Files of a kind below a folder, or those that match a glob."""
    url, kind = search.pattern, search.kind
    root, parts = search.split()
    fs, fs_root = file_system(root, storage_options)
    # Only a listing of all keys of an object store has those with empty parts.
    has_empty = is_object_store(url) and "//" in split_url(url)[1]
    depth = None if not parts or ANY_DEPTH in parts or has_empty else len(parts)
    try:
        if depth == 1:  # a search would ask for the folder above, too
            entries = call_fsspec(url, entries_in, fs, fs_root)
        else:
            entries = call_fsspec(url, find_below, fs, fs_root, depth)
    except ShardNotFoundError:
        return []
    if not entries:
        info_of(fs, fs_root, url)  # raises if the server is unreachable, which listings may hide
    matcher = Matcher(search, parts)
    files: dict[str, Info] = {}
    shards: list[Shard] = []
    for below, entry in entries.items():
        file = inside(root, below)
        if entry["type"] == "directory":
            if depth is not None and matcher.takes_folder(below.rstrip("/")):
                folder = Search(inside(file.rstrip("/"), ""), kind)
                shards += _search_remote(folder, storage_options, left_out)
        elif matcher.takes_path(below):
            files[file] = entry
        elif kind.has_suffix(below) and not parts:
            left_out[_HIDDEN].append(file)
    # Listings of web pages have no sizes.
    unsized = {file: entry["name"] for file, entry in files.items() if entry.get("size") is None}
    infos = infos_of(fs, list(unsized.values()), list(unsized))
    for file, info in zip(unsized, infos, strict=True):
        if info is not None:
            files[file] = info
        elif kind.single:
            left_out["links to nothing"].append(file)
            del files[file]
        else:
            raise ShardNotFoundError(f"{file} is listed, and does not exist")
    return shards + [shard_of(file, info) for file, info in files.items()]
