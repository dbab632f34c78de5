"""Listing of shards: files, folders, globs and braces, local and remote."""

from __future__ import annotations

import errno
import glob
import itertools
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask_image_ingest.arguments import is_utf8, path_text, shown
from dask_image_ingest.errors import ArgumentError, ShardError, ShardNotFoundError, warn_user
from dask_image_ingest.storage.open import refuse_special
from dask_image_ingest.storage.patterns import (
    SHARDS,
    FileKind,
    LeftOut,
    expand_braces,
    glob_root,
    is_glob,
)
from dask_image_ingest.storage.remote_listing import exists_remote, find_remote, list_folder
from dask_image_ingest.storage.search import ANY_DEPTH, Search, fits
from dask_image_ingest.storage.shard import Shard, as_folder, is_web, local_path
from dask_image_ingest.storage.streams import is_pipe, refuse_pipes
from dask_image_ingest.url_secrets import url_identity

# Ways to a folder through links below links: of folders that all link to each other, there are
# more than can be walked.
_MOST_VISITS = 100

# Errors of a path: there is no such file, a link leads nowhere, a name is impossible, permission is
# missing. Any other is of a disk that fails: what is there, is not known.
_OF_PATHS = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL)
) | {errno.EACCES, errno.EPERM}

# Why folders that match a pattern, or are in a search for `single` files, are left out.
_UNLISTED = "folders that can't be listed"

_UNREAD = "files that can't be read"
_NOT_UTF8 = "names that are not UTF-8, which no column can hold"


def find_matches(pattern: str, kind: FileKind, left_out: LeftOut) -> Iterator[str]:
    """The paths that match an absolute pattern, each once.

    Unlike :mod:`glob`, ``**`` and wildcards after it don't follow symbolic links to folders, except
    for a kind of `single` files. Folders that exist literally, wildcards included, are taken so.

    Raises
    ------
    ShardError
        If a folder can't be listed. One without permission is left out, as a shell does.
    """
    parts = pattern.split("/")
    known = next(
        (n for n in range(1, len(parts)) if not os.path.lexists("/".join(parts[: n + 1]))), 0
    )
    root, parts = "/".join(parts[:known]) or "/", parts[max(1, known) :]
    walk = _Walk(kind, left_out)
    if ANY_DEPTH not in parts:
        return _matches(walk, root, parts)
    first = parts.index(ANY_DEPTH)
    tops = _matches(walk, root, parts[:first])
    return iter(dict.fromkeys(p for top in tops for p in _below(walk, _Folder(top), parts[first:])))


def _matches(walk: _Walk, folder: str, parts: Sequence[str]) -> Iterator[str]:
    """Paths below a folder that match these parts of a pattern, through links to folders, too."""
    if not parts:
        yield folder
        return
    part, rest = parts[0], parts[1:]
    if glob.has_magic(part):
        entries = walk.matching(_Folder(folder), part)
        names = [entry.name for entry in entries if not rest or is_folder(entry)]
    else:
        names = [part] if _mode(os.path.join(folder, part), follow=False) else []
    for name in names:
        yield from _matches(walk, os.path.join(folder, name), rest)


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder of a walk; ``links`` are the folders whose links have led here, by real paths."""

    path: str
    links: tuple[str, ...] = ()


class _Walk:
    """Folders of one search, links to folders included if the kind follows them."""

    def __init__(self, kind: FileKind, left_out: LeftOut) -> None:
        self.kind = kind
        self.left_out = left_out
        #: How often a folder was reached by links below links.
        self._visits: Counter[str] = Counter()
        #: Folders that can't be listed; ``**`` comes to a folder more than once.
        self._unlisted: set[str] = set()

    def entries(self, folder: _Folder) -> list[os.DirEntry[str]]:
        """The entries of a folder; none if it is no folder.

        Raises
        ------
        ShardError
            If it can't be listed, except folders of `single` files without permission.
        """
        try:
            with os.scandir(folder.path) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            if not self.kind.single or error.errno not in _OF_PATHS:
                raise _unlisted(folder.path, error) from error
            self._leave_out(folder, error)
            return []

    def matching(self, folder: _Folder, part: str) -> list[os.DirEntry[str]]:
        """The entries of a folder that match a part of a pattern.

        Raises
        ------
        ShardError
            If it can't be listed. A folder without permission is left out.
        """
        try:
            entries = self.entries(folder)
        except ShardError as error:
            if not isinstance(error.__cause__, PermissionError):
                raise
            self._leave_out(folder, error.__cause__)
            return []
        return [entry for entry in entries if fits(entry.name, part)]

    def _leave_out(self, folder: _Folder, error: OSError) -> None:
        if folder.path not in self._unlisted:
            self._unlisted.add(folder.path)
            self.left_out.add(f"{_UNLISTED} ({error.strerror})", folder.path)

    def folder(self, above: _Folder, entry: os.DirEntry[str]) -> _Folder | None:
        """The folder that an entry is; None if it is none, or not followed."""
        if not is_folder(entry):
            return None
        if not entry.is_symlink():
            return _Folder(entry.path, above.links)
        if not self.kind.single:
            return None
        target = os.path.realpath(entry.path)
        links = (*above.links, os.path.realpath(above.path))
        if any(f"{each}/".startswith(f"{target.rstrip('/')}/") for each in links):
            self.left_out.add("links to a folder that they are in", entry.path)
            return None
        if above.links:
            self._visits[target] += 1
            if self._visits[target] > _MOST_VISITS:
                self.left_out.add(f"links to a folder that {_MOST_VISITS} led to", entry.path)
                return None
        return _Folder(entry.path, links)


def _unlisted(folder: str, error: OSError) -> ShardError:
    return ShardError(f"the folder {folder} cannot be listed: {error}")


def is_folder(entry: os.DirEntry[str]) -> bool:
    """True for a folder, or a link to one; an error if its disk fails."""
    try:
        return entry.is_dir()
    except OSError as error:  # a link that can't be followed
        _refuse_failing_disk(entry.path, error)
        return False


def _mode(path: str, *, follow: bool = True) -> int:
    """The mode of a file, or of a link if not ``follow``; 0 if there is none.

    Unlike with `os.path.exists`, a disk that fails is an error.
    """
    try:
        return os.stat(path, follow_symlinks=follow).st_mode
    except OSError as error:
        _refuse_failing_disk(path, error)
        return 0


def _refuse_failing_disk(path: str, error: OSError) -> None:
    if error.errno not in _OF_PATHS:
        raise ShardError(f"{path} cannot be read: {error}") from error


def _below(walk: _Walk, folder: _Folder, parts: Sequence[str]) -> Iterator[str]:
    """Paths below a folder that match these parts of a pattern."""
    if not parts:
        yield folder.path
        return
    part, rest = parts[0], parts[1:]
    if part != ANY_DEPTH and not glob.has_magic(part):
        if _mode(path := os.path.join(folder.path, part), follow=False):
            yield from _below(walk, _Folder(path, folder.links), rest)
        return
    if part == ANY_DEPTH and (rest or stat.S_ISDIR(_mode(folder.path))):
        yield from _below(walk, folder, rest)
    for entry in walk.matching(folder, part):
        below = walk.folder(folder, entry)
        if below is not None:
            yield from _below(walk, below, parts if part == ANY_DEPTH else rest)
        elif not rest and not is_folder(entry):
            yield entry.path


def find_local(path: str, kind: FileKind, left_out: LeftOut) -> list[Shard]:
    """Find the files of a kind at an absolute path or glob; empty if there are none.

    Raises
    ------
    ShardError
        If a folder cannot be listed, the path is a special file (pipe, device), or a disk fails.
        For `single` files without permission, and special ones, only if that is the path itself.
    """
    if not is_glob(path) or os.path.lexists(path):
        return list(_files_at(path, kind, left_out, searched=kind.single))
    return [
        shard
        for match in find_matches(path, kind, left_out)
        if kind.is_meant(path, os.path.basename(match), stat.S_ISDIR(_mode(match)))
        for shard in _files_at(match, kind, left_out, searched=True)
    ]


def find_local_file(path: str) -> Shard | None:
    """The regular file of exactly this path; None without one."""
    return (
        None
        if os.path.isdir(path)
        else next(_files_at(path, SHARDS, LeftOut(), searched=True), None)
    )


def _files_at(path: str, kind: FileKind, left_out: LeftOut, searched: bool) -> Iterator[Shard]:
    """The regular files at or below a path; special files are an error unless ``searched``."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            left_out.add("links to nothing", path)
        return
    except OSError as error:
        if not kind.single:
            raise ShardError(f"{path} cannot be read: {error}") from error
        _refuse_failing_disk(path, error)
        left_out.add(f"{_UNREAD} ({error.strerror})", path)
        return
    if stat.S_ISDIR(status.st_mode):
        yield from _files_below(path, kind, left_out)
    elif kind.single and not is_utf8(path):
        left_out.add(_NOT_UTF8, path)
    elif stat.S_ISREG(status.st_mode):
        yield Shard(path, status.st_size, str(status.st_mtime_ns))
    elif searched:
        left_out.add("pipes, sockets and devices", path)
    else:
        refuse_special(path, status.st_mode)


def _files_below(top: str, kind: FileKind, left_out: LeftOut) -> Iterator[Shard]:
    walk = _Walk(kind, left_out)
    folders = [_Folder(top)]
    while folders:
        folder = folders.pop()
        for entry in walk.entries(folder):
            is_kind = kind.has_suffix(entry.name)
            if entry.name.startswith(kind.hidden):
                if is_kind or is_folder(entry):
                    left_out.add("hidden files and folders", entry.path)
            elif is_folder(entry):
                if kind.single and not is_utf8(entry.name):
                    left_out.add(_NOT_UTF8, entry.path)
                elif (below := walk.folder(folder, entry)) is not None:
                    folders.append(below)
            elif is_kind:
                shards = list(_files_at(entry.path, kind, left_out, searched=True))
                if not shards and not kind.single and not os.path.exists(entry.path):
                    raise ShardNotFoundError(
                        f"{entry.path} is a link to a file that does not exist"
                    )
                yield from shards
            elif entry.is_symlink() and not os.path.exists(entry.path):
                left_out.add("links to nothing", entry.path)


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
    Shard(url='/.../train-000.tar', size=4177920, version='...', sidecar=None)
    """
    return _find(_as_patterns(paths), storage_options, kind)


def common_root(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], files: Iterable[str]
) -> tuple[str, bool]:
    """Deepest folder above all ``paths``, whichever files they have; without a trailing slash.

    ``files`` are the URLs that `find_shards` has found for these paths. The second value tells
    whether one of the paths is the folder itself, or means each folder directly below it.
    """
    known = set(map(url_identity, files))
    roots: list[tuple[str, bool]] = []
    for url in _targets(_as_patterns(paths), lambda url: url_identity(url) in known):
        if url_identity(url) in known:
            whole = url.partition("?")[0] if is_web(url) else url
            roots.append((whole.rpartition("/")[0], False))
        elif is_glob(url) and not (local_path(url) and os.path.lexists(url)):
            root = glob_root(url)
            roots.append((root, url[len(root) + 1 :].partition("/")[0] in ("*", ANY_DEPTH)))
        else:
            roots.append((as_folder(url), True))
    common = roots[0][0].split("/")
    for root, _ in roots[1:]:
        pairs = zip(common, root.split("/"), strict=False)
        common = common[: next((n for n, (a, b) in enumerate(pairs) if a != b), len(common))]
        common = common[: len(root.split("/"))]
    return "/".join(common), ("/".join(common), True) in roots


def searches_of(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    files: Iterable[Shard],
    kind: FileKind = SHARDS,
) -> tuple[Search, ...]:
    """The folders and globs among ``paths``; ``files`` are what `find_shards` has found there."""
    known = {url_identity(file.url) for file in files}
    return tuple(
        Search(url, kind)
        for url in _targets(_as_patterns(paths), lambda url: url_identity(url) in known)
        if url_identity(url) not in known and not is_pipe(url)
    )


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
    path = local_path(folder)
    if path is None:
        try:
            infos = list_folder(folder, storage_options, {})
        except (ShardError, ShardNotFoundError):
            return set()
        names = {name for name, info in infos.items() if info["type"] == "directory"}
    else:
        try:
            with os.scandir(path or "/") as entries:
                names = {entry.name for entry in entries if is_folder(entry)}
        except OSError as error:
            raise _unlisted(path, error) from error
    return {name for name in names if not name.startswith(kind.hidden)}


def _find(
    patterns: list[str], storage_options: dict[str, Any] | None, kind: FileKind
) -> list[Shard]:
    for command in filter(is_pipe, patterns):
        if not kind.commands:
            raise ArgumentError(f"{shown(command)} is a command, which gives no {kind.name}")
        refuse_pipes(command, storage_options)
    paths = list(_targets(patterns, lambda url: exists_remote(url, storage_options)))
    local = [path for path in paths if local_path(path) is not None and not is_pipe(path)]
    remote = [url for url in paths if local_path(url) is None and not is_pipe(url)]
    left_out = LeftOut()
    by_path = {command: [Shard(command, -1, "")] for command in filter(is_pipe, paths)}
    by_path |= {path: find_local(path, kind, left_out) for path in local}
    by_path |= find_remote(remote, storage_options, kind, left_out)

    missing = [path for path, shards in by_path.items() if not shards]
    if kind.single and len(missing) < len(by_path):  # those that are there were told
        missing = [p for p in missing if not os.path.lexists(p) or os.path.isdir(p)]
    if missing:
        unread = left_out.told(_UNLISTED) or left_out.told(_UNREAD)
        more = f". Left out: {unread}" if unread else ""
        raise ShardNotFoundError(_explain(missing, len(by_path), patterns, kind) + more)
    if told := left_out.told("" if kind.single else _UNLISTED):
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
    for url in shards:
        if not is_utf8(url):
            raise ArgumentError(
                f"the name of {os.fsencode(url)!r} is not UTF-8, and no column can hold it: rename "
                "the file, or leave it out"
            )
    return [shards[url] for url in sorted(shards, key=natural_order)]


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
    folder = glob_root(path) if is_glob(path) else os.path.dirname(path)
    if os.path.isdir(folder):
        return f"nothing in {folder} matches" if is_glob(path) else f"no such file in {folder}"
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return f"there is no such folder; the nearest that exists is {folder}"
