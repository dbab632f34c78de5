"""The shards behind a local path: a file, a folder, the matches of a glob; one ``stat`` each."""

import os
import stat
from collections.abc import Iterator

from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.listing_progress import found
from dask_image_ingest.storage.local import refuse_special
from dask_image_ingest.storage.patterns import HIDDEN, SHARDS, FileKind, is_glob
from dask_image_ingest.storage.recursive_glob import find_matches
from dask_image_ingest.storage.shard import Shard

__all__ = ["find_local", "find_local_file"]


def find_local(path: str, kind: FileKind = SHARDS) -> list[Shard]:
    """Find the files of a kind behind an absolute path; none if nothing is there.

    Raises
    ------
    ShardError
        If a folder cannot be listed, or the path itself is no regular file.
    """
    if not is_glob(path) or os.path.lexists(path):
        return list(_files_at(path, kind))
    return [
        shard
        for match in find_matches(path)
        if kind.is_meant(path, os.path.basename(match), os.path.isdir(match))
        for shard in _files_at(match, kind, searched=True)
    ]


def find_local_file(path: str) -> Shard | None:
    """Find the regular file of this very name."""
    return None if os.path.isdir(path) else next(_files_at(path, SHARDS, searched=True), None)


def _files_at(path: str, kind: FileKind, searched: bool = False) -> Iterator[Shard]:
    """The regular files there; what is none is left out where it was found by a search."""
    try:
        facts = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error}") from error
    if stat.S_ISDIR(facts.st_mode):
        yield from _files_below(path, kind)
    elif stat.S_ISREG(facts.st_mode):
        found()
        yield Shard(path, facts.st_size, str(facts.st_mtime_ns))
    elif not searched:
        refuse_special(path, facts.st_mode)


def _files_below(top: str, kind: FileKind) -> Iterator[Shard]:
    for folder, folders, files in os.walk(top, onerror=_refuse_unreadable):
        folders[:] = [name for name in folders if not name.startswith(HIDDEN)]
        for name in filter(kind.has, files):
            path = os.path.join(folder, name)
            shards = list(_files_at(path, kind, searched=True))
            if not shards and not os.path.exists(path):
                raise ShardNotFoundError(f"{path} is a link to a file that does not exist")
            yield from shards


def _refuse_unreadable(error: OSError) -> None:
    raise ShardError(f"the folder {error.filename} cannot be listed: {error}") from error
