"""What globs and folders mean, by names alone."""

from dataclasses import dataclass

from dask_image_ingest.storage.url import is_web

__all__ = [
    "HIDDEN",
    "INDEX_SUFFIX",
    "SHARDS",
    "FileKind",
    "glob_root",
    "has_random_access",
    "is_glob",
    "without_suffix",
]

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
