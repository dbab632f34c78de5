"""Patterns of paths: braces, globs, and which files of a folder are meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from braceexpand import braceexpand

from dask_image_ingest.arguments import shown
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.storage.shard import is_web

# Several times the shards of the largest collections there are.
_MOST_PATHS = 10_000_000

_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d+))?")


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
    """Number of paths that a pattern expands to, without expanding it."""
    paths = 1
    for inside in _outermost(pattern):
        numbers, letters = _NUMBERS.fullmatch(inside), _LETTERS.fullmatch(inside)
        if numbers:
            first, last, step = numbers.groups()
            paths *= _length(int(first), int(last), step)
        elif letters:
            first, last, step = letters.groups()
            paths *= _length(ord(first), ord(last), step)
        else:
            paths *= sum(map(_count, _choices(inside)))
    return paths


def _length(first: int, last: int, step: str | None) -> int:
    return abs(last - first) // (int(step or 1) or 1) + 1


def _outermost(pattern: str) -> Iterator[str]:
    """Contents of each outermost pair of braces."""
    depth = start = 0
    for place, sign in enumerate(pattern):
        if sign == "{":
            depth += 1
            if depth == 1:
                start = place + 1
        elif sign == "}":
            depth -= 1
            if depth == 0:
                yield pattern[start:place]


def _choices(inside: str) -> Iterator[str]:
    """Parts between commas that are in no further braces."""
    depth = start = 0
    for place, sign in enumerate(inside):
        depth += (sign == "{") - (sign == "}")
        if sign == "," and depth == 0:
            yield inside[start:place]
            start = place + 1
    yield inside[start:]


# Those that are read from their beginning, whatever is wanted of them.
_COMPRESSED = (".gz", ".tgz", ".zst")

#: What follows a shard's name in that of the index which this package writes.
INDEX_SUFFIX = ".index.parquet"

#: How names begin that are left out of a search.
HIDDEN = (".", "_")


@dataclass(frozen=True)
class FileKind:
    """The kind of file that a folder is searched for.

    Attributes
    ----------
    name
        What errors call one.
    suffixes
        How the names of such files end, in lower case.
    commands
        Whether a command may stand for one.
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
