"""Shards on HTTP servers: range requests over kept-alive connections, pinned to one version.

Connections go through proxies, and each URL is sent as it was given.
"""

from __future__ import annotations

import os
import re
import ssl
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit

import urllib3
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
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

from dask_image_ingest.errors import ShardError, ShardNotFoundError, safe_cause
from dask_image_ingest.storage.fetch import (
    FirstBytes,
    RetryableError,
    Settings,
    pause_requests,
    refuse_paused,
)
from dask_image_ingest.storage.shard import as_sent
from dask_image_ingest.url_secrets import error_text

# By proxy and number of connections; emptied in a forked process, which must not share sockets.
_managers: dict[tuple[str | None, int], urllib3.PoolManager] = {}
os.register_at_fork(after_in_child=_managers.clear)


def pool_manager(settings: Settings, url: str) -> urllib3.PoolManager:
    """Connections of this process, through the proxy that its environment names for a URL."""
    parts = urlsplit(url)
    proxy = _proxies(*map(os.environ.get, _PROXIES)).get(parts.scheme)
    if proxy and urllib.request.proxy_bypass(parts.hostname or ""):
        proxy = None
    key = (proxy, settings.connections)
    if key not in _managers:
        options: dict[str, Any] = {"num_pools": 32, "maxsize": settings.connections}
        new = _ProxyManager(proxy, **options) if proxy else _PoolManager(**options)
        new.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}
        return _managers.setdefault(key, new)
    return _managers[key]


_PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")


@lru_cache
def _proxies(*_: str | None) -> dict[str, str]:
    """The proxies by these variables; to go through the whole environment takes 0.2 ms."""
    return urllib.request.getproxies()


def credentials(url: str) -> dict[str, str]:
    """The header for the user and password of a URL; empty without."""
    user, _, password = urlsplit(url).netloc.rpartition("@")[0].partition(":")
    if not user and not password:
        return {}
    text = f"{unquote(user)}:{unquote(password)}"
    return {"Authorization": f"Basic {b64encode(text.encode()).decode()}"}


class _PoolManager(urllib3.PoolManager):
    """Sends URLs as they are, redirected ones too.

    urllib3 rewrites percent-encodings; a server that compares a signature would refuse them.
    """

    def urlopen(  # type: ignore[override]
        self, method: str, url: str, redirect: bool = True, **options: Any
    ) -> urllib3.BaseHTTPResponse:
        return super().urlopen(method, url, redirect, **{**options, "sent": as_sent(url)})


class _ProxyManager(_PoolManager, urllib3.ProxyManager):
    pass


class _SendsUrl:
    """A pool that requests what it is given as ``sent``, in place of what urllib3 made of it."""

    def _make_request(
        self,
        connection: urllib3.connection.HTTPConnection,
        method: str,
        url: str,
        *,
        sent: str,
        **options: Any,
    ) -> urllib3.BaseHTTPResponse:
        scheme, _, rest = sent.partition("://")
        host = urlsplit(sent).netloc
        target = rest[len(host) :]
        if not target.startswith("/"):
            target = f"/{target}"
        if not url.startswith("/"):  # to a proxy
            target = f"{scheme}://{host.rpartition('@')[2]}{target}"
        return super()._make_request(connection, method, target, **options)  # type: ignore[misc]


class _HTTPPool(_SendsUrl, HTTPConnectionPool):  # type: ignore[misc]
    pass


class _HTTPSPool(_SendsUrl, HTTPSConnectionPool):  # type: ignore[misc]
    pass


# Bytes read of a response body at once; an interrupted response loses at most this many.
_PIECE = 256 << 10

_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504, 507, 509, 520, 521, 522, 523, 524, 529})

_ADVICE = {
    401: "it asks for credentials: pass them in storage_options=",
    403: "access is refused: check the credentials in storage_options=, and whether they may read "
    "this; a signed URL may have expired",
}


class HTTPSource:
    """A shard on an HTTP server.

    Errors name ``url``; ``address`` returns the URL to request, perhaps a signed one that expires.

    ``head`` and ``stream`` make one request each. They raise `RetryableError` for temporary
    failures, after ``stall_timeout`` seconds without a byte, too; ``ShardNotFoundError`` if there
    is no such shard, and ``ShardError`` for permanent failures and if the shard has changed since
    its head was read.
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

    def head(self, nbytes: int, stall_timeout: float | None = None) -> FirstBytes:
        """Read the first bytes, and remember the version they are of."""
        with self._request({"Range": f"bytes=0-{nbytes - 1}"}, stall_timeout) as response:
            etag = response.headers.get("ETag", "")
            # Not a weak one: it does not identify bytes, and If-Match never matches it.
            self._etag = "" if etag.startswith("W/") else etag
            self._version = _version(response)
            if response.status == 416:
                self._size = _total(response) or 0
                if self._size:
                    raise RetryableError(f"its server gives none of its {self._size} bytes (416)")
                return FirstBytes(b"", 0)
            data = b"".join(self._body(response))
            self._size = len(data)
            if response.status == 206:
                total = _total(response)
                if total is None:
                    raise ShardError(
                        f"{self.url} cannot be read: its server does not give its size"
                    )
                self._size = total
                expected = min(nbytes, total)
                if len(data) < expected:
                    raise RetryableError(f"{len(data)} of the first {expected} bytes came")
            return FirstBytes(data, self._size)

    def stream(self, start: int, stop: int, stall_timeout: float | None = None) -> Iterator[bytes]:
        """Read a range in pieces; a first, empty piece says that the response has begun."""
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        if self._etag:
            headers["If-Match"] = self._etag
        with self._request(headers, stall_timeout) as response:
            total = _total(response) if response.status == 206 else self._size
            if response.status in (412, 416) or self._has_changed(_version(response), total):
                raise ShardError(
                    f"{self.url} has changed while it was read, and what was read would be of two "
                    "versions. Read it again when it is complete"
                )
            yield b""
            # Some servers occasionally ignore the range and send the whole file (status 200).
            skip, wanted = (start, stop - start) if response.status == 200 else (0, stop - start)
            for piece in self._body(response):
                part = piece[skip : skip + wanted]
                skip = max(0, skip - len(piece))
                wanted -= len(part)
                yield part
                if not wanted:
                    break

    @property
    def version(self) -> str:
        """The ETag, else the time of the last modification."""
        return self._version[0] or self._version[1]

    def is_version(self, version: str) -> bool:
        """False if this certainly differs from the ``version`` of a listing."""
        etag, modified = self._version
        if version.endswith(('"', "GMT")):
            current = etag if version.endswith('"') else modified
            return not current or current.removeprefix("W/") == version.removeprefix("W/")
        return True  # neither an ETag nor a date of HTTP: not comparable

    def refuse_changes(self) -> None:
        """Do nothing: each response was checked for its version."""

    def _has_changed(self, version: tuple[str, str], total: int | None) -> bool:
        pairs = zip(version, self._version, strict=True)
        # A header missing on one side is no change: servers behind a balancer may omit it at times.
        return total not in (self._size, None) or any(a != b for a, b in pairs if a and b)

    @contextmanager
    def _request(
        self, headers: dict[str, str], stall_timeout: float | None = None
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """Response with bytes, or of status 412 or 416; raises for any other status."""
        timeout = urllib3.Timeout(
            connect=self._settings.connect_timeout,
            read=stall_timeout or self._settings.read_timeout,
        )
        address, own_headers = self._target()
        refuse_paused(address)
        manager = pool_manager(self._settings, address)
        with _translate_errors(self.url):
            response = manager.urlopen(
                "GET",
                address,
                headers={**own_headers, **headers},
                preload_content=False,
                decode_content=False,
                timeout=timeout,
                retries=urllib3.Retry(total=None, connect=0, read=0, other=0, redirect=10),
            )
        try:
            if response.status not in (200, 206, 412, 416):
                self._raise_for_status(address, response)
            self._answered(address, response)
            yield response
            # Read the short body, so that the connection can be reused.
            if response.status in (412, 416):
                response.drain_conn()
        finally:
            if response.length_remaining:
                response.close()
            response.release_conn()

    def _target(self) -> tuple[str, Mapping[str, str]]:
        """The address of the next request, and the headers to send there."""
        return self._address(), self._headers

    def _answered(self, address: str, response: urllib3.BaseHTTPResponse) -> None:
        """Take note of an answer, which a redirect may have led to."""

    def _body(self, response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
        with _translate_errors(self.url):
            yield from response.stream(_PIECE, decode_content=False)

    def _raise_for_status(self, address: str, response: urllib3.BaseHTTPResponse) -> None:
        status = response.status
        answer = f"{status} {response.reason or ''}".strip()
        if status in (404, 410):
            raise ShardNotFoundError(f"{self.url} is not found ({answer})")
        if status in _RETRIED:
            wait = _asked_wait(response)
            if status == 429 and wait:
                pause_requests(address, wait)
            raise RetryableError(f"its server answers {answer}", wait)
        advice = _ADVICE.get(status)
        raise ShardError(
            f"{self.url} cannot be read: its server answers {answer}"
            + (f"; {advice}" if advice else "")
        )


# The last is of too many redirects.
_PERMANENT = (SSLError, LocationValueError, InvalidHeader, ResponseError)


@contextmanager
def _translate_errors(url: str) -> Iterator[None]:
    """Translate errors of urllib3 into `RetryableError`, permanent ones into ``ShardError``."""
    try:
        yield
    except HTTPError as error:
        cause = getattr(error, "reason", None)
        root = cause if isinstance(cause, Exception) else error
        # As a busy server ends a handshake; a certificate stays what it is.
        cut = isinstance(root, SSLError) and isinstance(root.args[0], ssl.SSLEOFError)
        if isinstance(root, _PERMANENT) and not cut:
            raise ShardError(f"{url} cannot be read: {error_text(root)}") from safe_cause(error)
        unreached = cut or isinstance(root, (NewConnectionError, ConnectTimeoutError))
        stalled = isinstance(root, ReadTimeoutError)
        raise RetryableError(
            error_text(root), unreached=unreached, stalled=stalled
        ) from safe_cause(error)
    except OSError as error:
        raise RetryableError(error_text(error)) from safe_cause(error)


def _version(response: urllib3.BaseHTTPResponse) -> tuple[str, str]:
    """ETag and Last-Modified, as they stand in the headers; empty without one."""
    return response.headers.get("ETag", ""), response.headers.get("Last-Modified", "")


def _asked_wait(response: urllib3.BaseHTTPResponse) -> float:
    """Seconds that a server asks to wait; 0 without. The Hub tells when its window ends."""
    after = response.headers.get("Retry-After", "")
    left = re.search(r"\bt\s*=\s*(\d+)", response.headers.get("RateLimit", ""))
    return float(after) if after.isdecimal() else float(left[1]) if left else 0.0


def _total(response: urllib3.BaseHTTPResponse) -> int | None:
    """Size of the whole file, from the Content-Range header; None without one."""
    match = re.search(r"/\s*(\d+)\s*$", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None
