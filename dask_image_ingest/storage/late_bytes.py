"""A shard that is opened when its first byte is asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from dask_image_ingest.storage.announce import announce, read_ahead
from dask_image_ingest.storage.lazy_bytes import LazyBytes
from dask_image_ingest.storage.local import Memory
from dask_image_ingest.storage.open import open_shard
from dask_image_ingest.storage.shard import Shard

__all__ = ["LateBytes", "open_late"]


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
