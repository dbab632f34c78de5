"""Shards behind HTTP: ranges over connections that are kept, each request pinned to one version."""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    InvalidHeader,
    LocationValueError,
    NewConnectionError,
    ReadTimeoutError,
    ResponseError,
    SSLError,
)

from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.storage.remote.fetch import Fault, Head
from dask_image_ingest.storage.settings import Settings

# What is read of a body at once: of one that breaks off, no more than this is lost.
_PIECE = 256 << 10

_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504, 507, 509, 520, 521, 522, 523, 524, 529})

_ADVICE = {
    401: "it asks for credentials: pass them in storage_options=",
    403: "access is refused: check the credentials in storage_options=, and whether they may read "
    "this; a signed URL may have expired",
}

# By what the connections differ; emptied in a forked process, which must not share a socket.
_managers: dict[tuple[str | None, int], urllib3.PoolManager] = {}
os.register_at_fork(after_in_child=_managers.clear)


class HTTPSource:
    """A shard that a server of HTTP has.

    Errors name ``url``; ``address`` gives the URL to ask, which may be signed for a while.
    """

    def __init__(
        self,
        url: str,
        address: Callable[[], str],
        headers: Mapping[str, str],
        settings: Settings,
    ) -> None:
        self.url = url
        self._address = address
        self._headers = {"Accept-Encoding": "identity", **headers}
        self._settings = settings
        self._etag = ""
        self._version: tuple[str, str] = ("", "")
        self._size = 0

    def head(self, nbytes: int, stall_timeout: float | None = None) -> Head:
        with self._request({"Range": f"bytes=0-{nbytes - 1}"}, stall_timeout) as response:
            etag = response.headers.get("ETag", "")
            # A weak one holds for the content, not for its bytes, and no server compares it.
            self._etag = "" if etag.startswith("W/") else etag
            self._version = _version(response)
            if response.status == 416:
                self._size = _total(response) or 0
                if self._size:
                    raise Fault(f"the server has no bytes 0-{nbytes - 1}, and says that it has")
                return Head(b"", 0)
            data = b"".join(self._pieces(response))
            self._size = len(data)
            if response.status == 206:
                total = _total(response)
                if total is None:
                    raise ShardError(
                        f"{self.url} cannot be read: its server does not tell its size"
                    )
                self._size = total
                if len(data) < min(nbytes, total):
                    raise Fault(f"{len(data)} of the first {min(nbytes, total)} bytes came")
            return Head(data, self._size)

    def stream(self, start: int, stop: int, stall_timeout: float | None = None) -> Iterator[bytes]:
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        if self._etag:
            headers["If-Match"] = self._etag
        with self._request(headers, stall_timeout) as response:
            total = _total(response) if response.status == 206 else self._size
            if response.status in (412, 416) or self._is_other(_version(response), total):
                raise ShardError(
                    f"{self.url} has changed while it was read, and what was read would be of two "
                    "versions. Read it again when it is complete"
                )
            yield b""
            # Some servers send all of it now and then.
            skip, wanted = (start, stop - start) if response.status == 200 else (0, stop - start)
            for piece in self._pieces(response):
                part = piece[skip : skip + wanted]
                skip = max(0, skip - len(piece))
                wanted -= len(part)
                yield part
                if not wanted:
                    break

    @property
    def version(self) -> str:
        """Its ETag, or when it was changed."""
        return self._version[0] or self._version[1]

    def is_version(self, version: str) -> bool:
        etag, modified = self._version
        if version.endswith(('"', "GMT")):
            now = etag if version.endswith('"') else modified
            return not now or now.removeprefix("W/") == version.removeprefix("W/")
        return True

    def refuse_changes(self) -> None:
        """Each request was for one version."""

    def _is_other(self, version: tuple[str, str], total: int | None) -> bool:
        told = zip(version, self._version, strict=True)
        # What a server behind a balancer leaves out now and then is no difference.
        return total not in (self._size, None) or any(a != b for a, b in told if a and b)

    @contextmanager
    def _request(
        self, headers: dict[str, str], stall_timeout: float | None = None
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """One answer that has bytes, or says that there are none here any more."""
        known = self._settings
        # By name: the first one is the time for all, and would be the wait for each byte as well.
        timeout = urllib3.Timeout(
            connect=known.connect_timeout, read=stall_timeout or known.read_timeout
        )
        manager = pool_manager(self._settings, self._address())
        with _faults(self.url):
            response = manager.request(
                "GET",
                self._address(),
                headers={**self._headers, **headers},
                preload_content=False,
                decode_content=False,
                timeout=timeout,
                retries=urllib3.Retry(total=None, connect=0, read=0, other=0, redirect=10),
            )
        try:
            if response.status not in (200, 206, 412, 416):
                self._refuse(response)
            yield response
            # What is left of a small answer is read, so that the connection can be used again.
            if response.status in (412, 416):
                response.drain_conn()
        finally:
            if response.length_remaining:
                response.close()
            response.release_conn()

    def _pieces(self, response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
        with _faults(self.url):
            yield from response.stream(_PIECE, decode_content=False)

    def _refuse(self, response: urllib3.BaseHTTPResponse) -> None:
        status = response.status
        said = f"{status} {response.reason or ''}".strip()
        if status in (404, 410):
            raise ShardNotFoundError(f"{self.url} is not found ({said})")
        if status in _AGAIN:
            wait = response.headers.get("Retry-After", "")
            raise Fault(f"its server answers {said}", float(wait) if wait.isdecimal() else 0.0)
        advice = _ADVICE.get(status)
        raise ShardError(
            f"{self.url} cannot be read: its server answers {said}"
            + (f"; {advice}" if advice else "")
        )


def pool_manager(settings: Settings, url: str) -> urllib3.PoolManager:
    """The connections of this process, through the proxy that its environment names."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and urllib.request.proxy_bypass(parts.hostname or ""):
        proxy = None
    key = (proxy, settings.connections)
    if key not in _managers:
        options: dict[str, Any] = {"num_pools": 32, "maxsize": settings.connections}
        made = urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)
        return _managers.setdefault(key, made)
    return _managers[key]


@contextmanager
def _faults(url: str) -> Iterator[None]:
    """Turn errors of urllib3 into `Fault`, permanent ones into ``ShardError``."""
    try:
        yield
    except (SSLError, LocationValueError, InvalidHeader) as error:
        raise ShardError(f"{url} cannot be read: {type(error).__name__}: {error}") from error
    except HTTPError as error:
        cause = getattr(error, "reason", None)
        if isinstance(cause, (SSLError, ResponseError)):  # the second: too many redirections
            raise ShardError(f"{url} cannot be read: {type(cause).__name__}: {cause}") from error
        found = cause if isinstance(cause, Exception) else error
        unreached = isinstance(found, (NewConnectionError, ConnectTimeoutError))
        stalled = isinstance(found, ReadTimeoutError)
        said = f"{type(found).__name__}: {found}"
        raise Fault(said, unreached=unreached, stalled=stalled) from error
    except OSError as error:
        raise Fault(f"{type(error).__name__}: {error}") from error


def _version(response: urllib3.BaseHTTPResponse) -> tuple[str, str]:
    return response.headers.get("ETag", ""), response.headers.get("Last-Modified", "")


def _total(response: urllib3.BaseHTTPResponse) -> int | None:
    """The size of the whole, as the answer to a request for a range tells it."""
    match = re.search(r"/\s*(\d+)\s*$", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None
