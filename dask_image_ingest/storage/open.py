"""Opening of a shard, now or on first access."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from dask_image_ingest.storage.announce import announce, read_ahead
from dask_image_ingest.storage.cached_copy import cached_copy
from dask_image_ingest.storage.compression import decompressed
from dask_image_ingest.storage.lazy_bytes import LazyBytes
from dask_image_ingest.storage.local import LocalBytes, Memory
from dask_image_ingest.storage.pipe import is_pipe, run_pipe
from dask_image_ingest.storage.remote import open_remote
from dask_image_ingest.storage.shard import Shard, changed, local_path

__all__ = ["LateBytes", "open_late", "open_shard"]


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


class LateBytes:
    """The bytes of a shard of which perhaps none are needed."""

    def __init__(
        self, shard: Shard, storage_options: dict[str, Any] | None, opened: ExitStack
    ) -> None:
        self.listed = shard
        self._storage_options = storage_options
        self._opened = opened
        self._content: LazyBytes | None = None
        self._lock = threading.Lock()

    @property
    def content(self) -> LazyBytes:
        """The bytes of the shard, which is open from now on."""
        with self._lock:
            if self._content is None:
                url = self.listed.url
                self._content = self._opened.enter_context(
                    open_shard(url, self._storage_options, self.listed)
                )
            return self._content

    def __len__(self) -> int:
        return len(self.content)

    def __getitem__(self, part: slice, /) -> bytes | bytearray | memoryview:
        return self.content[part]

    def announce(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Say what will be read from here on; if that is nothing, it need not be opened."""
        ranges = list(ranges)
        if ranges:
            announce(self.content, ranges)

    def read_ahead(self, start: int, stop: int, memory: Memory) -> None:
        """Have a range read by other threads; the shard is open from now on."""
        read_ahead(self.content, start, stop, memory)


@contextmanager
def open_late(shard: Shard, storage_options: dict[str, Any] | None) -> Iterator[LateBytes]:
    """As `open_shard`, but at its first use; it has to be the version that was listed then."""
    with ExitStack() as opened:
        yield LateBytes(shard, storage_options, opened)
