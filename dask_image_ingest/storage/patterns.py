"""Path patterns: braces, globs, and the files that a search of a folder takes."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from braceexpand import braceexpand

from dask_image_ingest.arguments import shown
from dask_image_ingest.errors import ArgumentError, safe_cause
from dask_image_ingest.storage.shard import (
    SHARD_SUFFIXES,
    as_folder,
    identities,
    is_web,
    local_path,
    split_url,
    start_of,
)

# Several times the number of shards of the largest datasets.
_MOST_PATHS = 10_000_000
_MOST_BRACES = 100

_NUMBERS = re.compile(r"\{(-?\d+)\.\.(-?\d+)")

#: The index of ``000.tar`` is ``000.tar`` plus this.
INDEX_SUFFIX = ".index.parquet"

#: Name of the index of all shards of a folder.
COMBINED_INDEX = "_index.parquet"

#: The part of a glob that stands for any number of folders.
ANY_DEPTH = "**"


def expand_braces(pattern: str) -> list[str]:
    """Expand the braces of a pattern.

    Raises
    ------
    ArgumentError
        If braces are unbalanced, or expand to more than `_MOST_PATHS` paths.
    """
    try:
        # braceexpand holds each range in memory before it multiplies them.
        ranges = (abs(int(a) - int(b)) for a, b in _NUMBERS.findall(pattern))
        # A backslash may be part of a name: no escape.
        if max(ranges, default=0) < _MOST_PATHS and pattern.count("{") <= _MOST_BRACES:
            paths = [*itertools.islice(braceexpand(pattern, escape=False), _MOST_PATHS + 1)]
            if len(paths) <= _MOST_PATHS:
                return paths
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{shown(pattern)} has unbalanced braces, or too many, and no such file exists"
        ) from safe_cause(error)
    raise ArgumentError(
        f"{shown(pattern)} means more than {_MOST_PATHS:,} paths: look at the numbers in its "
        "braces, or name the folder that the shards are in"
    )


@dataclass(frozen=True)
class FileKind:
    """A kind of files to search folders for.

    Attributes
    ----------
    name
        What one of these files is called.
    suffixes
        Suffixes of their names, in lower case.
    hidden
        Prefixes of names that a search skips.
    single
        Whether each file is no more than a row. Then a search follows links to folders, and a file
        or folder in it without permission is left out with a warning, instead of an error.
    """

    name: str
    suffixes: tuple[str, ...]
    hidden: tuple[str, ...] = (".", "_")
    single: bool = False

    def has_suffix(self, name: str) -> bool:
        """True for a name with one of the suffixes."""
        return name.lower().endswith(self.suffixes)


SHARDS = FileKind("shard", SHARD_SUFFIXES)
PARQUET = FileKind("parquet file", (".parquet", ".parq", ".pq"))

# Number of parts that a folder has matched below which a search takes all files of its kind.
_MATCHED = -2

#: Numbers of parts of a pattern that the names of a folder have matched, in every way there is.
Matched: TypeAlias = frozenset[int]


@dataclass(frozen=True)
class Search:
    """A folder, or a glob, that is searched for files of a kind.

    A glob that ends with ``*`` takes files of this kind and folders, any other glob all its
    matches. Folders that match are searched as if they were named. No search takes an index, which
    ``*.tar*`` and ``*.parquet`` would match.

    Attributes
    ----------
    pattern
        An absolute path or a URL, with braces expanded.
    kind
        Kind of the files.
    """

    pattern: str
    kind: FileKind

    def split(self) -> tuple[str, list[str]]:
        """The folder above all that is found, and the parts of the pattern below it."""
        local = local_path(self.pattern)
        head, path, tail = ("", local, "") if local is not None else split_url(self.pattern)
        names = path.split("/")
        marks = _wildcards(self.pattern)
        wild = [number for number, name in enumerate(names) if any(mark in name for mark in marks)]
        if local is not None:  # a name that exists is taken literally
            while wild and os.path.lexists("/".join(names[: wild[0] + 1])):
                wild.pop(0)
        if not wild or not names[-1]:
            return as_folder(self.pattern), []
        return head + "/".join(names[: wild[0]]) + tail, names[wild[0] :]

    def first_found(self, urls: Iterable[str]) -> str | None:
        """The first of these paths and URLs that the search would take, once a file is there."""
        root, parts = self.split()
        matcher = Matcher(self, parts)
        folders: dict[str, str] = {}
        tops = [start_of(name) for name in _names(root or "/", folders)]
        for url in urls:
            for kind, host, at in _names(url, folders):
                for above, of, top in tops:
                    inside = (kind, host) == (above, of) and at.startswith(top)
                    if inside and matcher.takes_path(at[len(top) :]):
                        return url
        return None


class Matcher:
    """Files below its folder that a search takes, folder by folder."""

    def __init__(self, search: Search, parts: list[str]) -> None:
        self._kind = search.kind
        self._parts = parts
        self._all = not search.pattern.endswith("*")
        # On a disk, names with a dot match only a part that begins with it.
        self._hides = local_path(search.pattern) is not None
        self._any_depth = parts.index(ANY_DEPTH) if ANY_DEPTH in parts else len(parts)
        self.start = self._closed({0})

    def enter(self, matched: Matched, name: str, is_link: bool = False) -> Matched:
        """Parts of the pattern that the folder ``name`` has matched; empty if none below is taken.

        Only a name in the pattern and wildcards before ``**`` follow links to folders, except for a
        kind of `single` files.
        """
        found: set[int] = set()
        is_link = is_link and not self._kind.single
        is_hidden = name.startswith(self._kind.hidden)
        for number in matched:
            if number == _MATCHED:
                # Of a key of an object store, "." and ".." are names.
                if not is_hidden or (not self._hides and name in (".", "..")):
                    found.add(_MATCHED)
            elif number < len(self._parts) and self._fits(name, self._parts[number]):
                part = self._parts[number]
                is_followed = not is_link or number < self._any_depth or not is_glob(part)
                if is_followed:
                    found.add(number if part == ANY_DEPTH else number + 1)
        if is_link:
            found.discard(_MATCHED)
        return self._closed(found, self._all or not is_hidden)

    def takes(self, matched: Matched, name: str) -> bool:
        """True if the search takes the file ``name`` in a folder that has matched so much."""
        is_kind = self._kind.has_suffix(name) and not name.startswith(self._kind.hidden)
        if is_kind and _MATCHED in matched:
            return True
        if not (is_kind or self._all) or name.endswith(INDEX_SUFFIX) or name == COMBINED_INDEX:
            return False
        return len(self._parts) - 1 in matched and self._fits(name, self._parts[-1])

    def takes_path(self, below: str) -> bool:
        """True if the search takes a file at this path below its folder."""
        *folders, name = below.split("/")
        return self.takes(self._after(folders), name)

    def takes_folder(self, below: str) -> bool:
        """True if the search takes all files of its kind below the folder at this path."""
        return _MATCHED in self._after(below.split("/"))

    def _after(self, folders: Sequence[str]) -> Matched:
        matched = self.start
        for folder in folders:
            matched = self.enter(matched, folder)
        return matched

    def _fits(self, name: str, part: str) -> bool:
        if self._hides and name.startswith(".") and not part.startswith("."):
            return False
        # An empty part of a key matches no wildcard but ``**``.
        return part == ANY_DEPTH or (bool(name) == bool(part) and fnmatch.fnmatchcase(name, part))

    def _closed(self, numbers: set[int], is_taken: bool = True) -> Matched:
        """With those behind each ``**``, which may stand for no folder."""
        for number, part in enumerate(self._parts):
            if part == ANY_DEPTH and number in numbers:
                numbers.add(number + 1)
        whole = {_MATCHED} if is_taken and len(self._parts) in numbers else set()
        return frozenset(numbers | whole)


def _names(url: str, folders: dict[str, str]) -> set[tuple[str, str, str]]:
    """Identities of a file or folder; of a local one also its path as it was given."""
    path = local_path(url)
    as_given = set() if path is None else {("file", "", os.path.abspath(path))}
    return identities(url, folders) | as_given


def is_glob(path: str) -> bool:
    """True if a path has wildcards."""
    return any(mark in path for mark in _wildcards(path))


def _wildcards(path: str) -> str:
    # In a web address, "?" starts a query.
    return "*" if is_web(path) else "*?["
