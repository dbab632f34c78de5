"""Opening of a shard, now or on first access."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from dask_image_ingest.storage.compression import decompressed
from dask_image_ingest.storage.local import LocalReader
from dask_image_ingest.storage.pipe import is_pipe, run_pipe
from dask_image_ingest.storage.reader import ByteReader, Memory, MemoryReader
from dask_image_ingest.storage.remote import open_remote
from dask_image_ingest.storage.shard import Shard, changed, local_path


@contextmanager
def open_shard(
    url: str,
    storage_options: dict[str, Any] | None = None,
    listed: Shard | None = None,
) -> Iterator[ByteReader]:
    """Open a shard for :func:`~dask_image_ingest.tar.index_tar` and ``read_member``.

    Ranges are read, or fetched, when they are sliced. A shard whose first bytes are those of gzip
    or Zstandard is decompressed: into memory up to 256 MiB, the rest into a file in Dask's
    ``temporary-directory``. If the compressed stream is interrupted, the bytes end there, and
    `ByteReader.damage` says why. The output of a ``pipe:`` command is held in memory.

    Parameters
    ----------
    listed
        The shard as it was listed; it must not have changed since.

    Raises
    ------
    ArgumentError
        If it is a command, and commands are not allowed.
    ShardNotFoundError
        If there is no such shard (any more).
    ShardError
        If the shard cannot be read, now or while it is open; if it has changed since it was listed,
        or, on leaving the context, since it was opened.
    """
    with open_file(url, storage_options, listed) as stored, decompressed(stored, url) as content:
        yield content


@contextmanager
def open_file(
    url: str,
    storage_options: dict[str, Any] | None = None,
    listed: Shard | None = None,
) -> Iterator[ByteReader]:
    """Open a file as `open_shard` does, but never decompress it."""
    if is_pipe(url):
        yield MemoryReader(memoryview(run_pipe(url, storage_options)))
        return
    path = local_path(url)
    if path is None:
        with open_remote(url, storage_options, listed) as content:
            yield content
        return
    with closing(LocalReader(path)) as file:
        if listed is not None and not file.is_version(listed):
            raise changed(listed, file.shard)
        yield file
        file.refuse_changes()


class LazyReader(ByteReader):
    """Reader that opens its shard on first access; the listed version must be there then."""

    def __init__(
        self, shard: Shard, storage_options: dict[str, Any] | None, exit_stack: ExitStack
    ) -> None:
        self.shard: Shard = shard
        self._storage_options = storage_options
        self._exit_stack = exit_stack
        #: The reader of the open shard; None before the first access.
        self._opened: ByteReader | None = None
        self._lock = threading.Lock()

    @property
    def content(self) -> ByteReader:
        """The reader of the open shard."""
        with self._lock:
            if self._opened is None:
                self._opened = self._exit_stack.enter_context(
                    open_shard(self.shard.url, self._storage_options, self.shard)
                )
            return self._opened

    def __len__(self) -> int:
        return len(self.content)

    def __getitem__(self, part: slice, /) -> bytes | bytearray | memoryview:
        return self.content[part]

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Prefetch these ranges; the shard is not opened if there are none."""
        ranges = list(ranges)
        if ranges:
            self.content.prefetch(ranges)

    def prefetch_into(self, start: int, stop: int, memory: Memory) -> None:
        self.content.prefetch_into(start, stop, memory)


@contextmanager
def open_late(shard: Shard, storage_options: dict[str, Any] | None) -> Iterator[ByteReader]:
    """Open a shard lazily, on first access; the listed version must be there then."""
    with ExitStack() as exit_stack:
        yield LazyReader(shard, storage_options, exit_stack)
