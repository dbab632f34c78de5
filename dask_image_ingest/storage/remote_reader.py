"""Reader of a remote shard, with parallel requests, read-ahead and a cache of pages."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from dask_image_ingest.errors import ShardError, warn_once
from dask_image_ingest.storage.fetch import (
    FirstBytes,
    LatencyStats,
    Retries,
    RetryableError,
    Settings,
    configured_settings,
    latency_stats_of,
    merge,
    split,
)
from dask_image_ingest.storage.fsspec_files import FsspecSource, file_system
from dask_image_ingest.storage.http_source import HTTPSource, credentials
from dask_image_ingest.storage.hub_source import HubSource
from dask_image_ingest.storage.reader import ByteReader, MemoryReader, Range, request_threads
from dask_image_ingest.storage.shard import FileSystem, Shard, changed
from dask_image_ingest.storage.streams import SpillFile, without_pipes_allowed

#: A remote shard, pinned to the version whose head was read; thread-safe.
RemoteSource: TypeAlias = HTTPSource | FsspecSource

#: Page size in bytes. Ranges start at a page boundary, so that none overlaps another.
PAGE = 4 << 10


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


# The read-ahead window of a header scan: its first size in bytes, and the factor by which it grows.
# It starts small, so that little is wasted on a scan that turns out to skip members.
_FIRST_WINDOW, _WINDOW_GROWTH = 1 << 20, 8

# A header scan fetches at least so many bytes at a time, and takes no fewer for a skip.
_SCANNED = 16 << 10

# A window is fetched by at least this many requests, none smaller than this, in bytes.
_REQUESTS_PER_WINDOW, _SMALLEST_REQUEST = 16, 128 << 10


class RemoteReader(ByteReader):
    """Reader of a remote shard: fetches ranges when they are sliced, or ahead of that.

    After `prefetch`, prefetches the announced ranges only. During a header scan, reads ahead
    sequentially unless members between headers are larger than the setting ``skip``.
    """

    is_remote = True

    def __init__(self, source: RemoteSource, head: FirstBytes, settings: Settings) -> None:
        self._source = source
        self._size = head.size
        self._settings = settings
        self._threads = request_threads(settings.connections)
        self._closed = threading.Event()
        self._lock = threading.RLock()
        self._cache = PageCache(settings.cache)
        self._head = head.data
        self._latency = latency_stats_of(source.url)
        self.shard = Shard(source.url, head.size, source.version)
        #: Announced ranges that are not requested yet; None during a header scan.
        self._planned: deque[Range] | None = None
        #: Where the scan's last read ended.
        self._scan_position = 0
        #: Bytes skipped between the scan's reads: a moving average.
        self._mean_skip = 0
        #: Bytes to request ahead of the scan; 0 before the first window and while skipping.
        self._window = 0
        #: Where the requests of the last window end.
        self._window_end = 0
        self._begin_scan()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> bytes:
        start, stop, _ = part.indices(self._size)
        if stop <= len(self._head):
            return self._head[start:stop]
        if start >= stop:
            return b""
        with self._lock:
            parts = self._request_range(start, stop)
        try:
            if len(parts) == 1:
                return parts[0].slice(start, stop)
            return b"".join([cached.slice(start, stop) for cached in parts])
        except BaseException:
            with self._lock:
                for cached in parts:
                    future = cached.future
                    if future and future.done() and future.exception() is not None:
                        self._cache.forget(cached)
            raise

    def prefetch_scan(self) -> None:
        """Expect a scan of the headers, followed by reads of the members it finds.

        Bytes beyond the cache's capacity are kept in a file for these reads.
        """
        with self._lock:
            self._planned = None
            self._begin_scan()

    def prefetch(self, ranges: Iterable[Range], gap: int | None = None) -> None:
        gap = self._settings.gap if gap is None else gap
        with self._lock:
            self._cache.abandon()
            self._cache.spilling = False
            planned: deque[Range] = deque()
            beyond_head = ((start, stop) for start, stop in ranges if stop > len(self._head))
            pages = ((start - start % PAGE, stop + -stop % PAGE) for start, stop in beyond_head)
            for start, stop in merge(pages, gap):
                for first, last in self._cache.missing(max(start, 0), min(stop, self._size)):
                    planned.extend(split(first, last, self._settings.request_size))
            self._planned = planned
            self._request_planned()

    def close(self) -> None:
        """Drop all pages and cancel pending requests; running ones end by themselves."""
        self._closed.set()
        with self._lock:
            self._planned = deque()
            self._cache.clear()

    def _request_range(self, start: int, stop: int) -> list[CachedRange]:
        """Cached ranges that cover a range, in order; requests what is missing."""
        first = self._cache.at(start)
        if self._closed.is_set():
            raise ShardError(f"{self._source.url} cannot be read: it was closed")
        if first is None or stop > first.stop:
            # A scan gets more: it may hold the next headers, too, if members are small.
            needed = stop if self._planned is not None else max(stop, start + _SCANNED)
            for missing in self._cache.missing(start, min(needed, self._size)):
                for piece in split(*missing, self._settings.request_size):
                    self._request(*piece)
        parts = []
        at = start
        while at < stop:
            part = self._cache.at(at)
            if part is None:
                raise AssertionError(f"byte {at} of {self._source.url} was not requested")
            parts.append(part)
            at = part.stop
        self._cache.use(parts)
        if self._planned is None:
            self._read_ahead(start, stop)
        else:
            self._request_planned()
        return parts

    def _request_planned(self) -> None:
        """Request announced ranges while fewer than ``read_ahead`` bytes are unused."""
        while self._planned and self._cache.unused_bytes < self._settings.read_ahead:
            for missing in self._cache.missing(*self._planned.popleft()):
                self._request(*missing)

    def _begin_scan(self) -> None:
        self._cache.spilling = True
        self._scan_position = self._window_end = len(self._head)
        self._mean_skip = self._window = 0

    def _read_ahead(self, start: int, stop: int) -> None:
        """Request what follows a scan's read of ``start`` to ``stop``, unless the scan skips."""
        skipped = start - self._scan_position
        self._scan_position = stop
        if skipped < -_SCANNED:  # back: a new scan
            self._begin_scan()
            self._window_end = self._scan_position = stop
            return
        if skipped > _SCANNED:
            self._mean_skip = (3 * self._mean_skip + skipped) // 4 if self._mean_skip else skipped
        self._cache.mark_used_before(start)
        if self._mean_skip > self._settings.skip:
            self._window = 0
            self._window_end = stop
            self._cache.abandon()
            return
        # Refill only when half of the window is used, so that requests don't become small.
        if self._window and self._window_end - stop > self._window // 2:
            return
        largest = self._settings.read_ahead
        self._window = min(largest, self._window * _WINDOW_GROWTH or _FIRST_WINDOW)
        # At most half the largest request: the scan continues as soon as the first one arrives.
        piece = min(self._settings.request_size // 2, self._window // _REQUESTS_PER_WINDOW)
        piece = max(_SMALLEST_REQUEST, piece - piece % PAGE)
        begin, end = max(self._window_end, stop), min(stop + self._window, self._size)
        for missing in self._cache.missing(begin, end):
            for part in split(*missing, piece):
                self._request(*part)
        self._window_end = max(begin, end)

    def _request(self, start: int, stop: int) -> None:
        stop = min(stop, self._size)
        retries = Retries(
            self._source.url, self._settings.retry_limit, reached=True, stopped=self._closed
        )
        timeout = self._settings.read_timeout
        future = self._threads.submit(
            fetch_range, self._source, start, stop, retries, self._latency, timeout
        )
        self._cache.add(CachedRange(start, stop, future))


# A response of at most so many bytes that arrives in one piece takes about one latency.
_SMALL_RESPONSE = 32 << 10


def fetch_head(source: RemoteSource, nbytes: int, settings: Settings) -> FirstBytes:
    """Fetch the first bytes of a shard, with retries."""
    retries = Retries(source.url, settings.retry_limit, reached=False)
    latency = latency_stats_of(source.url)
    stalls = 0
    while True:
        began = time.monotonic()
        try:
            head = source.head(nbytes, latency.stall_timeout(settings.read_timeout, stalls))
        except RetryableError as error:
            stalls += error.stalled
            retries.wait(error)
        else:
            latency.add(time.monotonic() - began)
            return head


def fetch_range(
    source: RemoteSource,
    start: int,
    stop: int,
    retries: Retries,
    latency: LatencyStats,
    read_timeout: float,
) -> bytearray:
    """Fetch a range, with retries; an interrupted request is resumed at the next byte."""
    data = bytearray()
    stalls = 0
    while True:
        received = len(data)
        stall_timeout = latency.stall_timeout(read_timeout, stalls)
        began = time.monotonic()
        try:
            for piece in source.stream(start + received, stop, stall_timeout):
                # An empty piece marks the begin of the response; fsspec gives all bytes at once.
                if not piece or (len(piece) == stop - start <= _SMALL_RESPONSE):
                    latency.add(time.monotonic() - began)
                data.extend(piece)
            size = stop - start
            if len(data) != size:
                raise RetryableError(f"{len(data)} of the {size} bytes from {start} on came")
            return data
        except RetryableError as error:
            stalls += error.stalled
            retries.wait(error, progress=len(data) > received)


# Seconds that a signed URL is valid, and after which it is signed again.
_SIGNATURE_LIFETIME, _SIGN_AGAIN_AFTER = 3600, 600

_S3, _AZURE = frozenset({"s3", "s3a"}), frozenset({"az", "abfs", "abfss"})


@contextmanager
def open_remote(
    url: str,
    storage_options: dict[str, Any] | None,
    listed: Shard | None,
    head_size: int | None,
) -> Iterator[ByteReader]:
    """Open a remote shard; a small one, or one without range requests, is read as a whole.

    Fetches its first ``head_size`` bytes, or of a small shard all; None for the setting ``head``.
    Raises if ``listed`` is given and the shard has another version now.
    """
    settings = configured_settings()
    is_small = listed is not None and 0 <= listed.size <= settings.head
    nbytes = settings.head if head_size is None or is_small else head_size
    source, head = _first_to_answer(_sources(url, storage_options, settings), settings, nbytes)
    if listed is not None and not (
        listed.size in (head.size, -1) and source.is_version(listed.version)
    ):
        raise changed(listed, Shard(url, head.size, source.version))
    if nbytes < len(head.data) == head.size:
        _warn_of_whole_files(url)
    if len(head.data) == head.size:
        yield MemoryReader(memoryview(head.data), Shard(url, head.size, source.version))
    else:
        with closing(RemoteReader(source, head, settings)) as content:
            yield content
    source.refuse_changes()


def _warn_of_whole_files(url: str) -> None:
    parts = urlsplit(url)
    server = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    warn_once(
        f"no ranges of {server}",
        f"{server} answers requests for ranges with whole files (status 200): each task that needs "
        "a header, a caption or one image downloads all of its shard, and holds it in memory. "
        "Serve the files with a server that supports ranges (nginx, Caddy, an object store), or "
        "copy them to a disk",
    )


def _first_to_answer(
    sources: list[RemoteSource], settings: Settings, nbytes: int
) -> tuple[RemoteSource, FirstBytes]:
    """The first source that works, and the first bytes from it."""
    for source in sources:
        try:
            return source, fetch_head(source, nbytes, settings)
        except ShardError:
            if source is sources[-1]:
                raise
    raise AssertionError("a shard has at least one source")


def _sources(
    url: str, storage_options: dict[str, Any] | None, settings: Settings
) -> list[RemoteSource]:
    """Ways to read a shard, best first: our HTTP client if it supports every option, then fsspec.

    Our client reads object stores by signed URLs. S3 refuses them if the bucket is in another
    region than the options say; fsspec follows it there. Azure's need the account key.
    """
    options = without_pipes_allowed(storage_options)
    protocol = url.partition("://")[0]
    if protocol in ("http", "https") and (headers := _http_headers(url, options)) is not None:
        return [HTTPSource(url, lambda: url, headers, settings)]
    fs, path = file_system(url, storage_options)
    if protocol == "hf" and hasattr(fs, "endpoint"):
        return [HubSource(url, fs, path, settings)]
    if protocol in _S3 | _AZURE and (sign := _url_signer(fs, path, protocol)):
        return [HTTPSource(url, sign, {}, settings), FsspecSource(fs, path, url)]
    return [FsspecSource(fs, path, url)]


def _http_headers(url: str, options: dict[str, Any]) -> dict[str, str] | None:
    """The headers to send; None if there are other options, too, or other values than strings."""
    client = options.get("client_kwargs") or {}
    if options.keys() - {"headers", "client_kwargs"} or client.keys() - {"headers"}:
        return None
    headers = {**(client.get("headers") or {}), **(options.get("headers") or {})}
    all_strings = all(isinstance(text, str) for header in headers.items() for text in header)
    if not all_strings:
        return None
    named = any(name.lower() == "authorization" for name in headers)
    return headers if named else headers | credentials(url)


def _url_signer(fs: FileSystem, path: str, protocol: str) -> Callable[[], str] | None:
    """Function that returns a URL signed with the credentials of a file system; None if it can't.

    So credentials are given as always with fsspec, also for our own requests.
    """
    # Options that a signed URL would not carry: request headers, and versions of objects.
    if getattr(fs, "req_kw", None) or getattr(fs, "version_aware", False):
        return None
    if protocol in _AZURE and not (fs.account_name and getattr(fs, "account_key", None)):
        return None
    lock = threading.Lock()
    signed_at, signed_url = -math.inf, ""

    def sign() -> str:
        nonlocal signed_at, signed_url
        with lock:
            if time.monotonic() - signed_at > _SIGN_AGAIN_AFTER:
                signed_url = fs.sign(path, expiration=_SIGNATURE_LIFETIME)
                signed_at = time.monotonic()
            return signed_url

    return sign
