"""Reader of a remote shard: many requests at once, ahead of their use."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage.fsspec_compat import FileSystem, file_system
from dask_image_ingest.storage.pipe import without_permission
from dask_image_ingest.storage.reader import ByteReader, MemoryReader
from dask_image_ingest.storage.remote.fetch import (
    Head,
    Range,
    Retries,
    Source,
    first_bytes,
    latency_stats_of,
    merge,
    request_threads,
    split,
    whole_range,
)
from dask_image_ingest.storage.remote.fsspec_source import FsspecSource
from dask_image_ingest.storage.remote.http import HTTPSource
from dask_image_ingest.storage.remote.page_cache import PAGE, CachedRange, PageCache
from dask_image_ingest.storage.settings import Settings, settings
from dask_image_ingest.storage.shard import Shard, changed

# Bytes that a scan requests ahead at first, the factor by which that grows each time they are used,
# and the least number of requests: few round trips, and little in vain where a scan turns out to
# skip.
_FIRST_AHEAD, _GROWTH, _AT_LEAST = 1 << 20, 8, 16
_SMALLEST_REQUEST = 128 << 10


class RemoteReader(ByteReader):
    """Reader of a remote shard, whose ranges are fetched when they are sliced, or before.

    Fetched before are prefetched ranges, and nothing else; in a header scan what follows, unless
    members between headers are larger than the setting ``skip``.
    """

    is_remote = True

    def __init__(self, source: Source, head: Head, settings: Settings) -> None:
        self._source = source
        self._size = head.size
        self._settings = settings
        self._threads = request_threads(settings.connections)
        self._closed = threading.Event()
        self._lock = threading.RLock()
        self._cache = PageCache(settings.cache)
        self._head = head.data
        self._planned: deque[Range] | None = None
        self._latency = latency_stats_of(source.url)
        self.shard = Shard(source.url, head.size, source.version)
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
            return b"".join([each.slice(start, stop) for each in parts])
        except BaseException:
            with self._lock:
                for each in parts:
                    future = each.future
                    if future and future.done() and future.exception() is not None:
                        self._cache.forget(each)
            raise

    def prefetch_scan(self) -> None:
        """Expect a scan of the headers, and after it reads of the members that it finds.

        What it fetches beyond the memory for it goes to a file.
        """
        with self._lock:
            self._planned = None
            self._begin_scan()

    def prefetch(self, ranges: Iterable[Range]) -> None:
        with self._lock:
            self._cache.abandon()
            self._cache.spilling = False
            planned: deque[Range] = deque()
            further = ((start, stop) for start, stop in ranges if stop > len(self._head))
            rounded = ((start - start % PAGE, stop + -stop % PAGE) for start, stop in further)
            for start, stop in merge(rounded, self._settings.gap):
                for first, last in self._cache.missing(max(start, 0), min(stop, self._size)):
                    planned.extend(split(first, last, self._settings.request_size))
            self._planned = planned
            self._request_planned()

    def close(self) -> None:
        """Drop all pages and pending requests; those under way end by themselves."""
        self._closed.set()
        with self._lock:
            self._planned = deque()
            self._cache.clear()

    def _request_range(self, start: int, stop: int) -> list[CachedRange]:
        """The cached ranges that cover a range; what is missing is requested."""
        first = self._cache.at(start)
        if self._closed.is_set():
            raise ShardError(f"{self._source.url} cannot be read: it was closed")
        if first is None or stop > first.stop:
            # In a scan that skips, the headers of small members that follow come along.
            further = stop if self._planned is not None else max(stop, start + PAGE)
            for missing in self._cache.missing(start, min(further, self._size)):
                for piece in split(*missing, self._settings.request_size):
                    self._request(*piece)
        parts = []
        at = start
        while at < stop:
            found = self._cache.at(at)
            if found is None:
                raise AssertionError(f"nothing has byte {at} of {self._source.url}")
            parts.append(found)
            at = found.stop
        self._cache.use(parts)
        if self._planned is None:
            self._read_ahead(start, stop)
        else:
            self._request_planned()
        return parts

    def _request_planned(self) -> None:
        """Request prefetched ranges, as many as the setting ``read_ahead`` allows."""
        planned, unused = self._planned, self._settings.read_ahead
        while planned and self._cache.unused < unused:
            for missing in self._cache.missing(*planned.popleft()):
                self._request(*missing)

    def _begin_scan(self) -> None:
        self._cache.spilling = True
        # The last byte read, the bytes skipped between reads (smoothed), the end of what was
        # requested ahead, and how far ahead that goes.
        self._last = self._front = len(self._head)
        self._left_out = 0
        self._window = 0

    def _read_ahead(self, start: int, stop: int) -> None:
        """Request what follows in a scan, unless it skips much."""
        left_out = start - self._last
        self._last = stop
        if left_out < -PAGE:
            self._begin_scan()
            self._front = self._last = stop
            return
        if left_out > PAGE:
            self._left_out = (3 * self._left_out + left_out) // 4 if self._left_out else left_out
        self._cache.pass_by(start)
        if self._left_out > self._settings.skip:
            self._window = 0
            self._front = stop
            self._cache.abandon()
            return
        # Room for at least half of it, so that requests don't become small.
        if self._window and self._front - stop > self._window // 2:
            return
        largest = self._settings.read_ahead
        self._window = min(largest, self._window * _GROWTH or _FIRST_AHEAD)
        # Half of the largest request: a scan goes on with the first that comes, and requests more.
        piece = min(self._settings.request_size // 2, self._window // _AT_LEAST)
        piece = max(_SMALLEST_REQUEST, piece - piece % PAGE)
        begin, end = max(self._front, stop), min(stop + self._window, self._size)
        for missing in self._cache.missing(begin, end):
            for part in split(*missing, piece):
                self._request(*part)
        self._front = max(begin, end)

    def _request(self, start: int, stop: int) -> None:
        stop = min(stop, self._size)
        retries = Retries(
            self._source.url, self._settings.retry_limit, reached=True, stopped=self._closed
        )
        timeout = self._settings.read_timeout
        future = self._threads.submit(
            whole_range, self._source, start, stop, retries, self._latency, timeout
        )
        self._cache.add(CachedRange(start, stop, future))


# Seconds that a URL signed by us is good for, and after which the next one is made.
_SIGNED_FOR, _SIGNED_ANEW = 3600, 600

_S3, _AZURE = frozenset({"s3", "s3a"}), frozenset({"az", "abfs", "abfss"})


@contextmanager
def open_remote(
    url: str, storage_options: dict[str, Any] | None, listed: Shard | None = None
) -> Iterator[ByteReader]:
    """The bytes of a remote shard, all at once if it is small or its server knows no ranges.

    If it was ``listed``, it has to be that version.
    """
    found = settings()
    source, head = _reach(_sources(url, storage_options, found), found)
    if listed is not None and not (
        listed.size in (head.size, -1) and source.is_version(listed.version)
    ):
        raise changed(url)
    if len(head.data) == head.size:
        yield MemoryReader(memoryview(head.data), Shard(url, head.size, source.version))
    else:
        with closing(RemoteReader(source, head, found)) as content:
            yield content
    source.refuse_changes()


def _reach(sources: list[Source], found: Settings) -> tuple[Source, Head]:
    """The first source that answers, and what it answers first."""
    for source, last in zip(sources, [False] * (len(sources) - 1) + [True], strict=True):
        retries = Retries(source.url, found.retry_limit, reached=False)
        try:
            latency = latency_stats_of(source.url)
            return source, first_bytes(source, found.head, retries, latency, found.read_timeout)
        except ShardError:
            if last:
                raise
    raise AssertionError("a shard has one source at least")


def _sources(url: str, storage_options: dict[str, Any] | None, found: Settings) -> list[Source]:
    """Requests of our own where all that the options say is known, else those of fsspec.

    A signed URL is refused in a region of S3 that is not the one of the options; fsspec finds it.
    Azure's are signed where the options have the account's key.
    """
    options = without_permission(storage_options)
    protocol = url.partition("://")[0]
    if protocol in ("http", "https") and (headers := _http_headers(options)) is not None:
        return [HTTPSource(url, lambda: url, headers, found)]
    fs, path = file_system(url, storage_options)
    if protocol in _S3 | _AZURE and (address := _signed(fs, path, protocol)):
        return [HTTPSource(url, address, {}, found), FsspecSource(fs, path, url)]
    return [FsspecSource(fs, path, url)]


def _http_headers(options: dict[str, Any]) -> dict[str, str] | None:
    """The headers to send, None where the options say more than that."""
    client = options.get("client_kwargs") or {}
    if options.keys() - {"headers", "client_kwargs"} or client.keys() - {"headers"}:
        return None
    headers = {**(client.get("headers") or {}), **(options.get("headers") or {})}
    plain = all(isinstance(part, str) for item in headers.items() for part in item)
    return headers if plain else None


def _signed(fs: FileSystem, path: str, protocol: str) -> Callable[[], str] | None:
    """Function that signs a URL with the credentials of the file system.

    The options that its users know then hold for our requests as well.
    """
    if getattr(fs, "req_kw", None) or getattr(fs, "version_aware", False):
        return None
    if protocol in _AZURE and not (fs.account_name and getattr(fs, "account_key", None)):
        return None
    lock = threading.Lock()
    made: list[tuple[float, str]] = []

    def address() -> str:
        with lock:
            if not made or time.monotonic() - made[0][0] > _SIGNED_ANEW:
                made[:] = [(time.monotonic(), fs.sign(path, expiration=_SIGNED_FOR))]
            return made[0][1]

    return address
