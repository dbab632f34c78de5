"""The matches of a pattern with ``**``, which goes through folders but not through links to them.

Python's own ``glob`` follows links: each shard comes once more for each link to a folder above it,
and a link to such a folder from inside it is followed until the operating system refuses.
"""

import fnmatch
import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

__all__ = ["find_matches"]

_ANY_DEPTH = "**"


def find_matches(pattern: str) -> Iterator[str]:
    """The paths that match an absolute pattern, each once.

    After a ``**``, a link to a folder is followed only by its own name, not by one with wildcards.
    """
    parts = pattern.split("/")
    if _ANY_DEPTH not in parts:
        return glob.iglob(pattern)
    first = parts.index(_ANY_DEPTH)
    tops = glob.iglob("/".join(parts[:first]) or "/")
    return iter(dict.fromkeys(path for top in tops for path in _below(top, parts[first:])))


def _below(path: str, parts: Sequence[str]) -> Iterator[str]:
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
    elif os.path.lexists(found := os.path.join(path, part)):
        yield from _below(found, rest)


def _entries(folder: str, hidden: bool = False) -> list[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder) as entries:  # of what is no folder, or is not ours
        return [entry for entry in entries if hidden or not entry.name.startswith(".")]
    return []


def _is_linked_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and entry.is_dir()
