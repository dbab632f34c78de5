"""The parts of a remote shard that are here or on their way, by page."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future

from dask_image_ingest.storage.remote.ranges import Range

__all__ = ["PAGE", "Extent", "Extents"]

#: Parts begin at multiples of this, so that none overlaps another.
PAGE = 16 << 10


class Extent:
    """A part of a shard, and who fetches it."""

    __slots__ = ("future", "start", "stop")

    def __init__(self, start: int, stop: int, future: Future[bytearray]) -> None:
        self.start = start
        self.stop = stop
        self.future = future

    def slice(self, start: int, stop: int) -> bytes:
        """What it has of a range of the shard, when it has come."""
        data = self.future.result()
        return bytes(memoryview(data)[max(start - self.start, 0) : stop - self.start])


class Extents:
    """What was fetched of a shard.

    Parameters
    ----------
    kept
        Bytes that are kept after they were used; what has not been used yet comes on top of that.
    """

    def __init__(self, kept: int) -> None:
        #: Bytes that have not been used yet.
        self.unused = 0
        self._kept = kept
        self._used = 0
        self._pages: dict[int, Extent] = {}
        self._waiting: dict[Extent, None] = {}
        self._recent: OrderedDict[Extent, None] = OrderedDict()

    def at(self, position: int) -> Extent | None:
        """The part that has this byte."""
        return self._pages.get(position // PAGE)

    def missing(self, start: int, stop: int) -> list[Range]:
        """What is neither here nor on its way, in whole pages."""
        found: list[Range] = []
        for page in range(start // PAGE, -(-stop // PAGE)):
            if page in self._pages:
                continue
            if found and found[-1][1] == page * PAGE:
                found[-1] = (found[-1][0], (page + 1) * PAGE)
            else:
                found.append((page * PAGE, (page + 1) * PAGE))
        return found

    def add(self, extent: Extent) -> None:
        """Take up a part, whose start is that of a page."""
        for page in range(extent.start // PAGE, -(-extent.stop // PAGE)):
            self._pages[page] = extent
        self._waiting[extent] = None
        self.unused += extent.stop - extent.start

    def use(self, extents: list[Extent]) -> None:
        """Count parts as used just now, and let go of what was not used for longest."""
        for extent in extents:
            if extent in self._waiting:
                self._count_as_used(extent)
            else:
                self._recent.move_to_end(extent)
        # Whoever uses a part that is let go of here has it still.
        while self._used > self._kept and len(self._recent) > len(extents):
            self._drop(next(iter(self._recent)))

    def abandon(self) -> None:
        """What has not been used will not be: it is let go of before anything else."""
        for extent in list(self._waiting):
            self._count_as_used(extent)
            self._recent.move_to_end(extent, last=False)
            if extent.future.cancel():
                self._drop(extent)

    def forget(self, extent: Extent) -> None:
        """Have a part that could not be fetched asked for again."""
        if extent in self._recent:
            self._drop(extent)

    def clear(self) -> None:
        """Let go of everything, and of the requests that were not made yet."""
        for extent in {*self._waiting, *self._recent}:
            extent.future.cancel()
        self._pages.clear()
        self._waiting.clear()
        self._recent.clear()
        self.unused = self._used = 0

    def _count_as_used(self, extent: Extent) -> None:
        del self._waiting[extent]
        self._recent[extent] = None
        self.unused -= extent.stop - extent.start
        self._used += extent.stop - extent.start

    def _drop(self, extent: Extent) -> None:
        del self._recent[extent]
        self._used -= extent.stop - extent.start
        for page in range(extent.start // PAGE, -(-extent.stop // PAGE)):
            if self._pages.get(page) is extent:
                del self._pages[page]
