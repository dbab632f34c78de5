"""Page cache of a remote shard: ranges that are fetched or requested."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future

from dask_image_ingest.storage.disk_cache import SpillFile
from dask_image_ingest.storage.reader import Range

#: Page size in bytes. Ranges start at a page boundary, so that none overlaps another.
PAGE = 16 << 10


class CachedRange:
    """A range of a shard that is fetched or requested."""

    __slots__ = ("_spilled", "future", "start", "stop")

    def __init__(self, start: int, stop: int, future: Future[bytearray]) -> None:
        self.start = start
        self.stop = stop
        #: None if the bytes were spilled to a file.
        self.future: Future[bytearray] | None = future
        #: The file, and where the bytes begin in it; None while they are in memory.
        self._spilled: tuple[SpillFile, int] | None = None

    def slice(self, start: int, stop: int) -> bytes:
        """The bytes that this and another range of the shard share; waits for them."""
        first, last = max(start, self.start) - self.start, min(stop, self.stop) - self.start
        if (future := self.future) is not None:
            return bytes(memoryview(future.result())[first:last])
        if self._spilled is None:
            raise AssertionError("bytes are neither in memory nor in a file")
        file, offset = self._spilled
        return file.read(offset + first, last - first)

    def spill(self, file: SpillFile) -> bool:
        """Move the bytes to a file; False if they have not arrived or the disk has no room."""
        future = self.future
        if future is None or not future.done() or future.cancelled() or future.exception():
            return False
        try:
            self._spilled = file, file.write(future.result())
        except OSError:
            return False
        # Last: a thread in `slice` finds either the future or the file.
        self.future = None
        return True


class PageCache:
    """Ranges of a shard by page; evicts the least recently used.

    Parameters
    ----------
    capacity
        Bytes of used ranges to keep. Ranges that were not used yet come on top of that.
    """

    def __init__(self, capacity: int) -> None:
        #: Whether evicted ranges will be read again, hence go to a file.
        self.spilling = False
        self._file = SpillFile()
        self._capacity = capacity
        #: Bytes of the ranges in `_unused`.
        self.unused_bytes = 0
        self._used_bytes = 0
        self._pages: dict[int, CachedRange] = {}
        #: Ranges not used yet, in order of their requests; an ordered set.
        self._unused: dict[CachedRange, None] = {}
        #: Used ranges, least recently used first.
        self._used: OrderedDict[CachedRange, None] = OrderedDict()

    def at(self, position: int) -> CachedRange | None:
        """The range that contains a byte."""
        return self._pages.get(position // PAGE)

    def missing(self, start: int, stop: int) -> list[Range]:
        """Ranges that are neither cached nor requested, in whole pages."""
        ranges: list[Range] = []
        for page in range(start // PAGE, -(-stop // PAGE)):
            if page in self._pages:
                continue
            if ranges and ranges[-1][1] == page * PAGE:
                ranges[-1] = (ranges[-1][0], (page + 1) * PAGE)
            else:
                ranges.append((page * PAGE, (page + 1) * PAGE))
        return ranges

    def add(self, part: CachedRange) -> None:
        """Add a range that starts at a page boundary."""
        for page in range(part.start // PAGE, -(-part.stop // PAGE)):
            self._pages[page] = part
        self._unused[part] = None
        self.unused_bytes += part.stop - part.start

    def use(self, parts: list[CachedRange]) -> None:
        """Mark ranges as used just now, and evict the least recently used."""
        for part in parts:
            if part in self._unused:
                self._mark_used(part)
            elif part in self._used:
                self._used.move_to_end(part)
        # Never one of `parts`. Other threads may still read an evicted range: they hold it.
        while self._used_bytes > self._capacity and len(self._used) > len(parts):
            self._evict(next(iter(self._used)))

    def mark_used_before(self, position: int) -> None:
        """Mark ranges that end before ``position`` as used: a scan has passed them."""
        while self._unused:
            part = next(iter(self._unused))
            if part.stop > position:
                break
            self._mark_used(part)

    def abandon(self) -> None:
        """Mark unread pages as first to evict; cancel pending requests."""
        for part in list(self._unused):
            self._mark_used(part)
            self._used.move_to_end(part, last=False)
            if part.future is not None and part.future.cancel():
                self._drop(part)

    def forget(self, part: CachedRange) -> None:
        """Drop a range that could not be fetched, so that it is requested again."""
        if part in self._used:
            self._drop(part)

    def clear(self) -> None:
        """Drop everything, and cancel pending requests."""
        for part in {*self._unused, *self._used}:
            if part.future is not None:
                part.future.cancel()
        self._pages.clear()
        self._unused.clear()
        self._used.clear()
        self.unused_bytes = self._used_bytes = 0
        self._file.close()

    def _mark_used(self, part: CachedRange) -> None:
        del self._unused[part]
        self._used[part] = None
        self.unused_bytes -= part.stop - part.start
        self._used_bytes += part.stop - part.start

    def _evict(self, part: CachedRange) -> None:
        if self.spilling and part.spill(self._file):  # it stays findable by its pages
            del self._used[part]
            self._used_bytes -= part.stop - part.start
        else:
            self._drop(part)

    def _drop(self, part: CachedRange) -> None:
        del self._used[part]
        self._used_bytes -= part.stop - part.start
        for page in range(part.start // PAGE, -(-part.stop // PAGE)):
            if self._pages.get(page) is part:
                del self._pages[page]
