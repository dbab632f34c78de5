"""Listing of shards: files, folders, globs and braces, local and remote."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dask_image_ingest.arguments import is_utf8, shown
from dask_image_ingest.errors import ArgumentError, ShardError, ShardNotFoundError
from dask_image_ingest.listing_progress import found as count
from dask_image_ingest.listing_progress import listing
from dask_image_ingest.storage.local import refuse_special
from dask_image_ingest.storage.patterns import (
    HIDDEN,
    SHARDS,
    FileKind,
    expand_braces,
    glob_root,
    is_glob,
)
from dask_image_ingest.storage.pipe import is_pipe, refuse_pipes
from dask_image_ingest.storage.remote_listing import exists_remote, find_remote
from dask_image_ingest.storage.shard import Shard, local_path

_ANY_DEPTH = "**"


def find_matches(pattern: str) -> Iterator[str]:
    """The paths that match an absolute pattern, each once.

    Unlike :mod:`glob`, ``**`` and wildcards after it don't follow symbolic links to folders.
    """
    parts = pattern.split("/")
    if _ANY_DEPTH not in parts:
        return glob.iglob(pattern)
    first = parts.index(_ANY_DEPTH)
    tops = glob.iglob("/".join(parts[:first]) or "/")
    return iter(dict.fromkeys(path for top in tops for path in _below(top, parts[first:])))


def _below(path: str, parts: Sequence[str]) -> Iterator[str]:
    """Paths below a folder that match these parts of a pattern."""
    if not parts:
        yield path
        return
    part, rest = parts[0], parts[1:]
    if part == _ANY_DEPTH:
        if rest or os.path.isdir(path):
            yield from _below(path, rest)
        for entry in _entries(path):
            if entry.is_dir(follow_symlinks=False):
                yield from _below(entry.path, parts)
            elif not rest and not entry.is_dir():
                yield entry.path
    elif glob.has_magic(part):
        for entry in _entries(path, hidden=part.startswith(".")):
            if fnmatch.fnmatch(entry.name, part) and not _is_linked_folder(entry):
                yield from _below(entry.path, rest)
    elif os.path.lexists(entry_path := os.path.join(path, part)):
        yield from _below(entry_path, rest)


def _entries(folder: str, hidden: bool = False) -> list[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder) as entries:  # not a folder, or not readable
        return [entry for entry in entries if hidden or not entry.name.startswith(".")]
    return []


def _is_linked_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and entry.is_dir()


def find_local(path: str, kind: FileKind = SHARDS) -> list[Shard]:
    """Find the files of a kind at an absolute path or glob; empty if there are none.

    Raises
    ------
    ShardError
        If a folder cannot be listed, or the path is a special file (pipe, device).
    """
    if not is_glob(path) or os.path.lexists(path):
        return list(_files_at(path, kind))
    return [
        shard
        for match in find_matches(path)
        if kind.is_meant(path, os.path.basename(match), os.path.isdir(match))
        for shard in _files_at(match, kind, searched=True)
    ]


def find_local_file(path: str) -> Shard | None:
    """The regular file of exactly this path; None without one."""
    return None if os.path.isdir(path) else next(_files_at(path, SHARDS, searched=True), None)


def _files_at(path: str, kind: FileKind, searched: bool = False) -> Iterator[Shard]:
    """The regular files at or below a path; special files are an error unless ``searched``."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error}") from error
    if stat.S_ISDIR(status.st_mode):
        yield from _files_below(path, kind)
    elif stat.S_ISREG(status.st_mode):
        count()
        yield Shard(path, status.st_size, str(status.st_mtime_ns))
    elif not searched:
        refuse_special(path, status.st_mode)


def _files_below(top: str, kind: FileKind) -> Iterator[Shard]:
    for folder, folders, files in os.walk(top, onerror=_refuse_unreadable):
        folders[:] = [name for name in folders if not name.startswith(HIDDEN)]
        for name in filter(kind.has, files):
            path = os.path.join(folder, name)
            shards = list(_files_at(path, kind, searched=True))
            if not shards and not os.path.exists(path):
                raise ShardNotFoundError(f"{path} is a link to a file that does not exist")
            yield from shards


def _refuse_unreadable(error: OSError) -> None:
    raise ShardError(f"the folder {error.filename} cannot be listed: {error}") from error


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
          are not followed;
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
    Shard(url='/.../train-000.tar', size=4177920, version='...', sidecar=None)
    """
    patterns = _as_patterns(paths)
    more = f" and {len(patterns) - 1} more" if len(patterns) > 1 else ""
    with listing(f"{shown(patterns[0])}{more}"):
        return _find(patterns, storage_options, kind)


def common_root(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], files: Iterable[str]
) -> str:
    """Deepest folder above all ``paths``, whichever files they have; without a trailing slash.

    ``files`` are the URLs that `find_shards` has found for these paths.
    """
    known = set(files)
    roots = []
    for pattern in _as_patterns(paths):
        path = local_path(pattern)
        absolute = pattern if path is None else os.path.abspath(os.path.expanduser(path))
        exists = known.__contains__ if path is None else os.path.lexists
        for url in _expand_braces(absolute, exists):
            if url in known:
                roots.append(url.rpartition("/")[0])
            elif is_glob(url) and not (path and os.path.lexists(url)):
                roots.append(glob_root(url))
            else:
                roots.append(url.rstrip("/"))
    common = roots[0].split("/")
    for root in roots[1:]:
        pairs = zip(common, root.split("/"), strict=False)
        common = common[: next((n for n, (a, b) in enumerate(pairs) if a != b), len(common))]
        common = common[: len(root.split("/"))]
    return "/".join(common)


def _find(
    patterns: list[str], storage_options: dict[str, Any] | None, kind: FileKind
) -> list[Shard]:
    local: list[str] = []
    remote: list[str] = []
    by_path: dict[str, list[Shard]] = {}
    for pattern in patterns:
        if is_pipe(pattern):
            if not kind.commands:
                raise ArgumentError(f"{shown(pattern)} is a command, which gives no {kind.name}")
            refuse_pipes(pattern, storage_options)
            commands = _expand_braces(pattern, lambda command: False)
            by_path |= {command: [Shard(command, -1, "")] for command in commands}
            continue
        path = local_path(pattern)
        if path is None:
            remote += _expand_braces(pattern, lambda url: exists_remote(url, storage_options))
        else:
            expanded = _expand_braces(os.path.expanduser(path), os.path.lexists)
            local += map(os.path.abspath, expanded)
    by_path |= {path: find_local(path, kind) for path in local}
    by_path |= find_remote(remote, storage_options, kind)

    missing = [path for path, shards in by_path.items() if not shards]
    if missing:
        raise ShardNotFoundError(_explain(missing, len(by_path), patterns, kind))
    shards = {shard.url: shard for shards in by_path.values() for shard in shards}
    for url in shards:
        if not is_utf8(url):
            raise ArgumentError(
                f"the name of {os.fsencode(url)!r} is not UTF-8, and no column can hold it: rename "
                "the file, or leave it out"
            )
    return sorted(shards.values(), key=lambda shard: natural_order(shard.url))


def _as_patterns(paths: Any) -> list[str]:
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
    patterns = [_as_pattern(path) for path in listed]
    if not patterns:
        raise ArgumentError("paths is empty: give at least one path, glob, folder or URL")
    return patterns


def _as_pattern(path: Any) -> str:
    pattern = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(pattern, str) or not pattern or "\0" in pattern or not is_utf8(pattern):
        raise ArgumentError(
            f"{shown(path)} is no path: a path is a str or an os.PathLike, of valid Unicode and "
            "not empty"
        )
    return pattern


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
    folder = glob_root(path) if is_glob(path) else os.path.dirname(path)
    if os.path.isdir(folder):
        return f"nothing in {folder} matches" if is_glob(path) else f"no such file in {folder}"
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return f"there is no such folder; the nearest that exists is {folder}"
