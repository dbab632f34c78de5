"""What globs and folders mean, by names alone."""

from dask_image_ingest.storage.url import is_web

__all__ = [
    "HIDDEN",
    "INDEX_SUFFIX",
    "glob_root",
    "is_glob",
    "is_meant",
    "is_shard",
    "is_shard_below",
    "without_suffix",
]

# What a folder is searched for.
_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst")

#: What follows a shard's name in that of the index which this package writes.
INDEX_SUFFIX = ".index.parquet"

#: How names begin that are left out of a search.
HIDDEN = (".", "_")


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


def is_shard(name: str) -> bool:
    """Tell whether a file of this name is a shard where a folder is searched."""
    return name.lower().endswith(_SUFFIXES) and not name.startswith(HIDDEN)


def is_meant(pattern: str, name: str, folder: bool) -> bool:
    """Keep ``data/*`` to shards and folders; a glob that names a suffix gets what it asks for.

    An index lies beside its shard, and is meant by no glob such as ``*.tar*``.
    """
    if name.endswith(INDEX_SUFFIX):
        return False
    if not pattern.endswith("*"):
        return True
    return is_shard(name) or (folder and not name.startswith(HIDDEN))


def is_shard_below(path: str) -> bool:
    """Tell whether this path below a folder is one of its shards."""
    parts = path.split("/")
    return is_shard(parts[-1]) and not any(part.startswith(HIDDEN) for part in parts)


def without_suffix(path: str) -> str | None:
    """Give the path of a shard without its suffix, None if it has another one."""
    endings = (ending for ending in _SUFFIXES if path.lower().endswith(ending))
    ending = next(endings, None)
    return path[: -len(ending)] if ending else None
