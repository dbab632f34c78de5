"""The shards behind a local path: a file, a folder, the matches of a glob; one ``stat`` each."""

import os
import stat
from collections.abc import Iterator

from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.listing_progress import found
from dask_image_ingest.storage.patterns import HIDDEN, is_glob, is_meant, is_shard
from dask_image_ingest.storage.recursive_glob import find_matches
from dask_image_ingest.storage.shard import Shard

__all__ = ["find_local", "find_local_file"]


def find_local(path: str) -> list[Shard]:
    """Find the shards behind an absolute path; none if nothing is there."""
    if not is_glob(path) or os.path.lexists(path):
        return list(_shards_at(path))
    return [
        shard
        for match in find_matches(path)
        if is_meant(path, os.path.basename(match), os.path.isdir(match))
        for shard in _shards_at(match)
    ]


def find_local_file(path: str) -> Shard | None:
    """Find the file of this very name."""
    return None if os.path.isdir(path) else next(_shards_at(path), None)


def _shards_at(path: str) -> Iterator[Shard]:
    try:
        facts = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error}") from error
    if stat.S_ISDIR(facts.st_mode):
        yield from _shards_below(path)
    else:
        found()
        yield Shard(path, facts.st_size, str(facts.st_mtime_ns))


def _shards_below(top: str) -> Iterator[Shard]:
    for folder, folders, files in os.walk(top, onerror=_refuse_unreadable):
        folders[:] = [name for name in folders if not name.startswith(HIDDEN)]
        for name in filter(is_shard, files):
            path = os.path.join(folder, name)
            shards = list(_shards_at(path))
            if not shards:
                raise ShardNotFoundError(f"{path} is a link to a file that does not exist")
            yield from shards


def _refuse_unreadable(error: OSError) -> None:
    raise ShardError(f"the folder {error.filename} cannot be listed: {error}") from error
