"""Which shards there are: what a user writes, braces and all → a list of shards."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dask_image_ingest.arguments import is_utf8, shown
from dask_image_ingest.errors import ArgumentError, ShardNotFoundError
from dask_image_ingest.listing_progress import listing
from dask_image_ingest.storage.braces import expand_braces
from dask_image_ingest.storage.local_listing import find_local
from dask_image_ingest.storage.patterns import SHARDS, FileKind, glob_root, is_glob
from dask_image_ingest.storage.pipe import is_pipe, refuse_pipes
from dask_image_ingest.storage.remote_listing import exists_remote, find_remote
from dask_image_ingest.storage.shard import Shard
from dask_image_ingest.storage.url import local_path

__all__ = ["common_root", "find_shards"]


def find_shards(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    storage_options: dict[str, Any] | None = None,
    kind: FileKind = SHARDS,
) -> list[Shard]:
    """Find the shards that ``paths`` means, each once and in natural order (2 before 10).

    Parameters
    ----------
    paths
        One or many of

        - a file;
        - a folder, searched to the bottom for ``.tar``, ``.tar.gz``, ``.tgz`` and ``.tar.zst``;
          files and folders whose names begin with ``.`` or ``_`` are left out, and links to folders
          are not followed;
        - a glob, with ``**`` for any depth, which does not follow links to folders. What it matches
          is taken whatever its suffix, unless the glob ends with ``*``, and the folders it matches
          are searched;
        - braces, ``{000..127}`` or ``{train,val}``, around or inside any of these;
        - any of these as a URL that fsspec knows;
        - ``pipe:`` and a command, with braces, if ``allow_pipes`` is among the options.

        What exists under the very name that was given is taken as it is, braces and all.
    storage_options
        For the remote file system.
    kind
        What is found instead, where these are not shards.

    Raises
    ------
    ShardNotFoundError
        If a path, or any path that braces expand to, leads to no shard.
    ArgumentError
        If there is no path or something is no path, if braces are unbalanced, if the protocol of a
        URL is unknown, if it is a command that is not allowed.
    MissingDependencyError
        If fsspec needs a package for the protocol that is not installed.
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
    """The folder that all ``paths`` search or lie in, whatever is found; no slash at its end.

    Parameters
    ----------
    paths
        As given to `find_shards`.
    files
        The URLs of what was found.
    """
    found = set(files)
    roots = []
    for pattern in _as_patterns(paths):
        path = local_path(pattern)
        whole = pattern if path is None else os.path.abspath(os.path.expanduser(path))
        for each in _expand_braces(whole, found.__contains__ if path is None else os.path.lexists):
            if each in found:
                roots.append(each.rpartition("/")[0])
            elif is_glob(each) and not (path and os.path.lexists(each)):
                roots.append(glob_root(each))
            else:
                roots.append(each.rstrip("/"))
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
    found: dict[str, list[Shard]] = {}
    for pattern in patterns:
        if is_pipe(pattern):
            if not kind.commands:
                raise ArgumentError(f"{shown(pattern)} is a command, which gives no {kind.name}")
            refuse_pipes(pattern, storage_options)
            commands = _expand_braces(pattern, lambda command: False)
            found |= {command: [Shard(command, -1, "")] for command in commands}
            continue
        path = local_path(pattern)
        if path is None:
            remote += _expand_braces(pattern, lambda url: exists_remote(url, storage_options))
        else:
            expanded = _expand_braces(os.path.expanduser(path), os.path.lexists)
            local += map(os.path.abspath, expanded)
    found |= {path: find_local(path, kind) for path in local}
    found |= find_remote(remote, storage_options, kind)

    missing = [path for path, shards in found.items() if not shards]
    if missing:
        raise ShardNotFoundError(_explain(missing, len(found), patterns, kind))
    shards = {shard.url: shard for shards in found.values() for shard in shards}
    for url in shards:
        if not is_utf8(url):
            raise ArgumentError(
                f"the name of {os.fsencode(url)!r} is not UTF-8, and no column can hold it: rename "
                "the file, or leave it out"
            )
    return sorted(shards.values(), key=_natural_order)


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


def _natural_order(shard: Shard) -> tuple[list[str | int], str]:
    # The split alternates between text and digits, so that equal places hold equal types.
    parts: list[str | int] = list(re.split(r"([0-9]+)", shard.url))
    parts[1::2] = map(int, parts[1::2])
    return parts, shard.url


def _explain(missing: list[str], asked: int, patterns: list[str], kind: FileKind) -> str:
    if asked == 1:
        return f"{patterns[0]!r} leads to no {kind.name}: {_why(missing[0], kind)}"
    few = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    source = f" ({patterns[0]!r})" if len(patterns) == 1 else ""
    return (
        f"{len(missing)} of {asked} paths{source} lead to no {kind.name}: {few}. "
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
