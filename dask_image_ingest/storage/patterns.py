"""Path patterns: braces, globs, and the suffixes that a folder is searched for."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass

from braceexpand import braceexpand

from dask_image_ingest.arguments import is_utf8, shown
from dask_image_ingest.errors import ArgumentError, safe_cause
from dask_image_ingest.storage.shard import is_web

# Several times the number of shards of the largest datasets.
_MOST_PATHS = 10_000_000
_DEEPEST = 100

_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d+))?")
_INNERMOST = re.compile(r"\{([^{}]*)\}")
_COUNTED = re.compile(r"\0(\d+)\0")


def expand_braces(pattern: str) -> list[str]:
    """Expand the braces of a pattern.

    Raises
    ------
    ArgumentError
        If braces are unbalanced, or expand to more than `_MOST_PATHS` paths.
    """
    try:
        if _count(pattern) <= _MOST_PATHS:
            # A backslash may be part of a name: no escape.
            return list(braceexpand(pattern, escape=False))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{shown(pattern)} has unbalanced braces, or too many, and no such file exists"
        ) from safe_cause(error)
    raise ArgumentError(
        f"{shown(pattern)} means more than {_MOST_PATHS:,} paths: look at the numbers in its "
        "braces, or name the folder that the shards are in"
    )


def _count(pattern: str) -> int:
    """Upper bound of the number of paths of a pattern, without expanding it."""
    for _ in range(_DEEPEST):
        # From the inside out, replace each pair of braces by its number of paths.
        pattern, pairs = _INNERMOST.subn(lambda match: f"\0{_choices(match[1])}\0", pattern)
        if not pairs:
            return _product(pattern)
    raise ValueError(f"more than {_DEEPEST} braces in braces")


def _choices(inside: str) -> int:
    for sequence, number in ((_NUMBERS, int), (_LETTERS, ord)):
        if match := sequence.fullmatch(inside):
            first, last, step = match.groups()
            return abs(number(last) - number(first)) // (int(step or 1) or 1) + 1
    return sum(map(_product, inside.split(",")))


def _product(part: str) -> int:
    return math.prod(map(int, _COUNTED.findall(part)))


# Suffixes of compressed shards, which can only be read from the beginning.
_COMPRESSED = (".gz", ".tgz", ".zst")

#: The index of ``000.tar`` is ``000.tar`` plus this.
INDEX_SUFFIX = ".index.parquet"

#: Name of the index of all shards of a folder.
COMBINED_INDEX = "_index.parquet"


@dataclass(frozen=True)
class FileKind:
    """A kind of files to search folders for.

    Attributes
    ----------
    name
        What one of these files is called.
    suffixes
        Suffixes of their names, in lower case.
    commands
        Whether ``pipe:`` commands may stand in place of files.
    hidden
        Prefixes of names that a search skips.
    single
        Whether each file is no more than a row. Then a search follows links to folders, and a file
        or folder in it without permission is left out with a warning, instead of an error.
    """

    name: str
    suffixes: tuple[str, ...]
    commands: bool = False
    hidden: tuple[str, ...] = (".", "_")
    single: bool = False

    def has_suffix(self, name: str) -> bool:
        """True for a name with one of the suffixes."""
        return name.lower().endswith(self.suffixes)

    def has(self, name: str) -> bool:
        """True if a search of a folder takes a file of this name."""
        return self.has_suffix(name) and not name.startswith(self.hidden)

    def is_meant(self, pattern: str, name: str, folder: bool) -> bool:
        """True if a match of a glob is taken.

        A glob that ends with ``*`` takes files of this kind and folders, any other glob all its
        matches. None takes indexes, which ``*.tar*`` and ``*.parquet`` would match.
        """
        if not folder and (name.endswith(INDEX_SUFFIX) or name == COMBINED_INDEX):
            return False
        if not pattern.endswith("*"):
            return True
        return self.has(name) or (folder and not name.startswith(self.hidden))

    def is_below(self, path: str) -> bool:
        """True if a search of a folder takes the file at this path below it."""
        parts = path.split("/")
        # Of a key of an object store, "." and ".." are names.
        folders = (part for part in parts[:-1] if part not in (".", ".."))
        return self.has(parts[-1]) and not any(part.startswith(self.hidden) for part in folders)


class LeftOut:
    """Entries that searches leave out: by reason their number, and the first of them."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str]] = {}

    def add(self, reason: str, path: str) -> None:
        """Count a file or folder."""
        count, first = self._found.get(reason, (0, path))
        self._found[reason] = count + 1, first

    def told(self, only: str) -> str:
        """The reasons that begin with ``only``; an empty text if none does."""
        return "; ".join(
            f"{count} {reason}, such as {os.fsencode(first)!r}"
            if not is_utf8(first)
            else f"{count} {reason}, such as {first}"
            for reason, (count, first) in self._found.items()
            if reason.startswith(only)
        )


SHARDS = FileKind("shard", (".tar", ".tar.gz", ".tgz", ".tar.zst"), commands=True)
PARQUET = FileKind("parquet file", (".parquet", ".parq", ".pq"))


def is_glob(path: str) -> bool:
    """True if a path has wildcards."""
    # In a web address, "?" starts a query.
    return any(mark in path for mark in _wildcards(path))


def glob_root(path: str) -> str:
    """The deepest folder above all matches of a glob, without a trailing slash."""
    first = min(path.index(mark) for mark in _wildcards(path) if mark in path)
    return path[:first].rpartition("/")[0]


def _wildcards(path: str) -> str:
    return "*" if is_web(path) else "*?["


def has_random_access(url: str) -> bool:
    """True if ranges of a shard can be read: not of compressed shards and commands."""
    path = url.partition("?")[0] if is_web(url) else url
    return not url.startswith("pipe:") and not path.lower().endswith(_COMPRESSED)


def without_suffix(path: str) -> str | None:
    """The path of a shard without its suffix; None for other suffixes."""
    matching = (suffix for suffix in SHARDS.suffixes if path.lower().endswith(suffix))
    suffix = next(matching, None)
    return path[: -len(suffix)] if suffix else None
