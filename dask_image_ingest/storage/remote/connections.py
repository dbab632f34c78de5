"""Connections to web servers: kept alive, through proxies, with each URL sent as it was given."""

from __future__ import annotations

import os
import urllib.request
from base64 import b64encode
from typing import Any
from urllib.parse import unquote, urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from dask_image_ingest.storage.settings import Settings
from dask_image_ingest.storage.shard import as_sent

# By proxy and number of connections; emptied in a forked process, which must not share sockets.
_managers: dict[tuple[str | None, int], urllib3.PoolManager] = {}
os.register_at_fork(after_in_child=_managers.clear)

# The header that carries a URL down to its connection; it is not sent.
_URL = ":url"


def pool_manager(settings: Settings, url: str) -> urllib3.PoolManager:
    """Connections of this process, through the proxy that its environment names for a URL."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and urllib.request.proxy_bypass(parts.hostname or ""):
        proxy = None
    key = (proxy, settings.connections)
    if key not in _managers:
        options: dict[str, Any] = {"num_pools": 32, "maxsize": settings.connections}
        new = _ProxyManager(proxy, **options) if proxy else _PoolManager(**options)
        new.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}
        return _managers.setdefault(key, new)
    return _managers[key]


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
        options["headers"] = {**options["headers"], _URL: as_sent(url)}
        return super().urlopen(method, url, redirect, **options)


class _ProxyManager(_PoolManager, urllib3.ProxyManager):
    pass


class _SendsUrl:
    def request(
        self, method: str, url: str, body: Any = None, headers: Any = None, **options: Any
    ) -> None:
        headers = dict(headers)
        given = headers.pop(_URL)
        host = urlsplit(given).netloc
        target = given.partition("://")[2][len(host) :]
        if not target.startswith("/"):
            target = f"/{target}"
        if not url.startswith("/"):  # to a proxy
            target = f"{url.partition('://')[0]}://{host.rpartition('@')[2]}{target}"
        super().request(method, target, body, headers, **options)  # type: ignore[misc]


class _HTTPConnection(_SendsUrl, HTTPConnection):
    pass


class _HTTPSConnection(_SendsUrl, HTTPSConnection):
    pass


class _HTTPPool(HTTPConnectionPool):
    ConnectionCls = _HTTPConnection


class _HTTPSPool(HTTPSConnectionPool):
    ConnectionCls = _HTTPSConnection
