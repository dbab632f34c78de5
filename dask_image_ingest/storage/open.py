"""A shard's URL → its bytes: read or fetched as they are asked for, or decompressed."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from dask_image_ingest.storage.cached import cached_copy
from dask_image_ingest.storage.compressed import decompressed
from dask_image_ingest.storage.lazy_bytes import LazyBytes
from dask_image_ingest.storage.local import LocalBytes
from dask_image_ingest.storage.pipe import is_pipe, run_pipe
from dask_image_ingest.storage.remote import open_remote
from dask_image_ingest.storage.shard import Shard, changed
from dask_image_ingest.storage.url import local_path

__all__ = ["open_shard"]


@contextmanager
def open_shard(
    url: str,
    storage_options: dict[str, Any] | None = None,
    listed: Shard | None = None,
) -> Iterator[LazyBytes]:
    """Open a shard for :func:`~dask_image_ingest.tar.index_tar` and ``read_member``.

    A shard is read, or fetched in ranges if it is a remote one, as its bytes are asked for. One
    that is compressed (gzip or Zstandard, told by its first bytes) is decompressed, into memory and
    from 256 MiB on into a file of Dask's ``temporary-directory``; what a ``pipe:`` command writes
    is held in memory. Both until the shard is closed. If the compressed stream breaks off, the
    content ends there and has an attribute ``broken`` that says why. If the shard was ``listed``,
    it has to be that version.

    Raises
    ------
    ArgumentError
        If it is a command, and commands are not allowed.
    ShardNotFoundError
        If there is no such shard (any more).
    ShardError
        If the shard cannot be read, now or while it is open, if it is not the one that was listed,
        or if it has changed when it is closed.
    """
    if is_pipe(url):
        with decompressed(run_pipe(url, storage_options), url) as content:
            yield content
        return
    local = local_path(url)
    path = local or cached_copy(url, storage_options)
    if path is None:
        with (
            open_remote(url, storage_options, listed) as fetched,
            decompressed(fetched, url) as content,
        ):
            yield content
        return
    with closing(LocalBytes(path)) as stored:
        if listed is not None:
            # A copy has a time of its own, and how old it may be is said where it is asked for.
            same = stored.is_version(listed) if local else listed.size in (len(stored), -1)
            if not same:
                raise changed(url)
        with decompressed(stored, url) as content:
            yield content
        stored.refuse_changes()
