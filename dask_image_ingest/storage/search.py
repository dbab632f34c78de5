"""Folders and globs that a read has searched: which files a later read would find there."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dask_image_ingest.storage.patterns import FileKind, glob_root, is_glob
from dask_image_ingest.storage.shard import as_folder, identities, local_path, start_of

#: The part of a glob that stands for any number of folders.
ANY_DEPTH = "**"


@dataclass(frozen=True)
class Search:
    """A folder, or a glob, that is searched for files of a kind.

    Attributes
    ----------
    pattern
        An absolute path or a URL, with braces expanded.
    kind
        Kind of the files.
    """

    pattern: str
    kind: FileKind

    def first_found(self, urls: Iterable[str]) -> str | None:
        """The first of these paths and URLs that the search would take, once a file is there."""
        root, parts = self.split()
        folders: dict[str, str] = {}
        tops = [start_of(name) for name in _names(root or "/", folders)]
        for url in urls:
            for kind, host, at in _names(url, folders):
                for above, of, top in tops:
                    inside = (kind, host) == (above, of) and at.startswith(top)
                    if inside and self.takes(at[len(top) :], parts):
                        return url
        return None

    def split(self) -> tuple[str, list[str]]:
        """The folder above all that is found, and the parts of the pattern below it."""
        path = local_path(self.pattern)
        is_folder = self.pattern.endswith("/") or not is_glob(self.pattern)
        if is_folder or (path is not None and os.path.lexists(path)):
            return as_folder(self.pattern), []
        root = glob_root(self.pattern)
        return root, self.pattern[len(root) + 1 :].split("/")

    def takes(self, below: str, parts: Sequence[str]) -> bool:
        """True if it takes a file at this path below its folder, whose `split` gave ``parts``."""
        names = below.split("/")
        return any(
            self._is_meant(names[:count]) and self.kind.is_below("/".join(names[count:]))
            if count < len(names)
            else self.kind.is_meant(self.pattern, names[-1], folder=False)
            for count in _matched(names, parts, local_path(self.pattern) is not None)
        )

    def _is_meant(self, folder: Sequence[str]) -> bool:
        """True if the folder is searched: the root, or a match of the pattern."""
        return not folder or self.kind.is_meant(self.pattern, folder[-1], folder=True)


def _names(url: str, folders: dict[str, str]) -> set[tuple[str, str, str]]:
    """Identities of a file or folder; of a local one also its path as it was given."""
    path = local_path(url)
    as_given = set() if path is None else {("file", "", os.path.abspath(path))}
    return identities(url, folders) | as_given


def _matched(names: Sequence[str], parts: Sequence[str], hides: bool) -> set[int]:
    """Numbers of first names that the parts of a pattern match, in every way there is."""
    reached = {0}
    for part in parts:
        steps = set(reached) if part == ANY_DEPTH else set()
        for count in reached:
            while count < len(names) and fits(names[count], part, hides):
                count += 1
                steps.add(count)
                if part != ANY_DEPTH:
                    break
        reached = steps
    return reached


def fits(name: str, part: str, hides: bool = True) -> bool:
    """True if a part of a pattern matches a name.

    Where it ``hides``, as on a disk, names with a dot match only one that begins with it.
    """
    if hides and name.startswith(".") and not part.startswith("."):
        return False
    return part == ANY_DEPTH or fnmatch.fnmatchcase(name, part)
