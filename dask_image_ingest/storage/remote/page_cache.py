"""Page cache of a remote shard: ranges that were fetched or requested."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future

from dask_image_ingest.storage.disk_cache import SpillFile
from dask_image_ingest.storage.remote.fetch import Range

#: Parts begin at multiples of this, so that none overlaps another.
PAGE = 16 << 10


class CachedRange:
    """A range of a shard that was fetched or requested."""

    __slots__ = ("_spilled", "future", "start", "stop")

    def __init__(self, start: int, stop: int, future: Future[bytearray]) -> None:
        self.start = start
        self.stop = stop
        #: None where the bytes are in a file.
        self.future: Future[bytearray] | None = future
        self._spilled: tuple[SpillFile, int] | None = None

    def slice(self, start: int, stop: int) -> bytes:
        """Its bytes of a range of the shard; waits for them."""
        first, last = max(start, self.start) - self.start, min(stop, self.stop) - self.start
        if (future := self.future) is not None:
            return bytes(memoryview(future.result())[first:last])
        if self._spilled is None:
            raise AssertionError("bytes that are not in memory are in a file")
        file, at = self._spilled
        return file.read(at + first, last - first)

    def spill(self, file: SpillFile) -> bool:
        """Move the bytes to a file; False if there was no room."""
        future = self.future
        if future is None or not future.done() or future.cancelled() or future.exception():
            return False
        try:
            self._spilled = file, file.write(future.result())
        except OSError:
            return False
        # Last, since others may be reading: they have the one or the other.
        self.future = None
        return True


class PageCache:
    """Fetched ranges of a shard, by page.

    Parameters
    ----------
    kept
        Bytes that are kept after they were used; what has not been used yet comes on top of that.
    """

    def __init__(self, kept: int) -> None:
        #: Whether what is let go of will be read again, and goes to a file for that.
        self.spilling = False
        self._file = SpillFile()
        #: Bytes that have not been used yet.
        self.unused = 0
        self._kept = kept
        self._used = 0
        self._pages: dict[int, CachedRange] = {}
        self._waiting: dict[CachedRange, None] = {}
        self._recent: OrderedDict[CachedRange, None] = OrderedDict()

    def at(self, position: int) -> CachedRange | None:
        """The range that has this byte."""
        return self._pages.get(position // PAGE)

    def missing(self, start: int, stop: int) -> list[Range]:
        """Ranges that are neither cached nor requested, in whole pages."""
        found: list[Range] = []
        for page in range(start // PAGE, -(-stop // PAGE)):
            if page in self._pages:
                continue
            if found and found[-1][1] == page * PAGE:
                found[-1] = (found[-1][0], (page + 1) * PAGE)
            else:
                found.append((page * PAGE, (page + 1) * PAGE))
        return found

    def add(self, part: CachedRange) -> None:
        """Add a range, whose start is that of a page."""
        for page in range(part.start // PAGE, -(-part.stop // PAGE)):
            self._pages[page] = part
        self._waiting[part] = None
        self.unused += part.stop - part.start

    def use(self, parts: list[CachedRange]) -> None:
        """Mark ranges as used just now, and evict the least recently used."""
        for part in parts:
            if part in self._waiting:
                self._count_as_used(part)
            elif part in self._recent:
                self._recent.move_to_end(part)
        # Whoever uses a part that is let go of here has it still.
        while self._used > self._kept and len(self._recent) > len(parts):
            self._let_go(next(iter(self._recent)))

    def pass_by(self, position: int) -> None:
        """Mark ranges that end before a byte as used, when a scan has come to it."""
        while self._waiting:
            part = next(iter(self._waiting))
            if part.stop > position:
                break
            self._count_as_used(part)

    def abandon(self) -> None:
        """Mark unread pages as first to evict; cancel pending requests."""
        for part in list(self._waiting):
            self._count_as_used(part)
            self._recent.move_to_end(part, last=False)
            if part.future is not None and part.future.cancel():
                self._drop(part)

    def forget(self, part: CachedRange) -> None:
        """Drop a range that could not be fetched, so that it is requested again."""
        if part in self._recent:
            self._drop(part)

    def clear(self) -> None:
        """Drop everything, and cancel requests that were not made yet."""
        for part in {*self._waiting, *self._recent}:
            if part.future is not None:
                part.future.cancel()
        self._pages.clear()
        self._waiting.clear()
        self._recent.clear()
        self.unused = self._used = 0
        self._file.close()

    def _count_as_used(self, part: CachedRange) -> None:
        del self._waiting[part]
        self._recent[part] = None
        self.unused -= part.stop - part.start
        self._used += part.stop - part.start

    def _let_go(self, part: CachedRange) -> None:
        if self.spilling and part.spill(self._file):
            del self._recent[part]
            self._used -= part.stop - part.start
        else:
            self._drop(part)

    def _drop(self, part: CachedRange) -> None:
        del self._recent[part]
        self._used -= part.stop - part.start
        for page in range(part.start // PAGE, -(-part.stop // PAGE)):
            if self._pages.get(page) is part:
                del self._pages[page]
