"""Patterns of paths: braces, globs, and which files of a folder are meant."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from braceexpand import braceexpand

from dask_image_ingest.arguments import shown
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.storage.shard import is_web

# Several times the shards of the largest collections there are.
_MOST_PATHS = 10_000_000
_DEEPEST = 100

_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d+))?")
_INNERMOST = re.compile(r"\{([^{}]*)\}")
_COUNTED = re.compile(r"\0(\d+)\0")


def expand_braces(pattern: str) -> list[str]:
    """All paths that a pattern means.

    Raises
    ------
    ArgumentError
        If its braces are unbalanced, or mean more paths than anybody has.
    """
    try:
        if _count(pattern) <= _MOST_PATHS:
            # A backslash is no escape here: it may be part of a name.
            return list(braceexpand(pattern, escape=False))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{shown(pattern)} has unbalanced braces, or too many, and no such file exists"
        ) from error
    raise ArgumentError(
        f"{shown(pattern)} means more than {_MOST_PATHS:,} paths: look at the numbers in its "
        "braces, or name the folder that the shards are in"
    )


def _count(pattern: str) -> int:
    """The most paths that a pattern can expand to, without expanding it."""
    for _ in range(_DEEPEST):
        # From the inside out: each pair of braces gives way to its number of paths.
        pattern, pairs = _INNERMOST.subn(lambda found: f"\0{_choices(found[1])}\0", pattern)
        if not pairs:
            return _product(pattern)
    raise ValueError(f"more than {_DEEPEST} braces in braces")


def _choices(inside: str) -> int:
    for sequence, number in ((_NUMBERS, int), (_LETTERS, ord)):
        if found := sequence.fullmatch(inside):
            first, last, step = found.groups()
            return abs(number(last) - number(first)) // (int(step or 1) or 1) + 1
    return sum(map(_product, inside.split(",")))


def _product(part: str) -> int:
    return math.prod(map(int, _COUNTED.findall(part)))


# Those that are read from their beginning, whatever is wanted of them.
_COMPRESSED = (".gz", ".tgz", ".zst")

#: What follows a shard's name in that of its index.
INDEX_SUFFIX = ".index.parquet"

#: The one index of all shards of a folder.
COMBINED_INDEX = "_index.parquet"

#: How names begin that are left out of a search.
HIDDEN = (".", "_")


@dataclass(frozen=True)
class FileKind:
    """The kind of file that a folder is searched for.

    ``suffixes`` are in lower case. With ``commands``, a command may stand for a file.
    """

    name: str
    suffixes: tuple[str, ...]
    commands: bool = False

    def has(self, name: str) -> bool:
        """Tell whether a file of this name is one where a folder is searched."""
        return name.lower().endswith(self.suffixes) and not name.startswith(HIDDEN)

    def is_meant(self, pattern: str, name: str, folder: bool) -> bool:
        """Keep ``data/*`` to such files and folders; a glob that names a suffix gets what it asks.

        An index lies beside its shard, and is meant by no glob such as ``*.tar*``.
        """
        if name.endswith(INDEX_SUFFIX):
            return False
        if not pattern.endswith("*"):
            return True
        return self.has(name) or (folder and not name.startswith(HIDDEN))

    def is_below(self, path: str) -> bool:
        """Tell whether this path below a folder is one of its files."""
        parts = path.split("/")
        return self.has(parts[-1]) and not any(part.startswith(HIDDEN) for part in parts)


SHARDS = FileKind("shard", (".tar", ".tar.gz", ".tgz", ".tar.zst"), commands=True)


def is_glob(path: str) -> bool:
    """Tell whether a path has wildcards."""
    return any(mark in path for mark in _wildcards(path))


def glob_root(path: str) -> str:
    """Give the folder that a glob searches, without a slash at its end."""
    first = min(path.index(mark) for mark in _wildcards(path) if mark in path)
    return path[:first].rpartition("/")[0]


def _wildcards(path: str) -> str:
    # In a web address "?" begins a query.
    return "*" if is_web(path) else "*?["


def has_random_access(url: str) -> bool:
    """Tell whether a range of a shard can be read by itself: not of a command's, or compressed."""
    return not url.startswith("pipe:") and not url.lower().endswith(_COMPRESSED)


def without_suffix(path: str) -> str | None:
    """Give the path of a shard without its suffix, None if it has another one."""
    endings = (ending for ending in SHARDS.suffixes if path.lower().endswith(ending))
    ending = next(endings, None)
    return path[: -len(ending)] if ending else None
