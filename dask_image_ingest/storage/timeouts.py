"""The timeouts of ``image-ingest.remote``, for the file systems of fsspec.

For a server that never answers fsspec's HTTP waits five minutes, and gcsfs for ever. s3fs has short
timeouts (5 and 15 s), and adlfs takes none for looking up files.
"""

from __future__ import annotations

from typing import Any

from dask_image_ingest.storage.settings import Settings, settings

__all__ = ["with_timeouts"]


def with_timeouts(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of the file systems of a URL, with timeouts where they name none."""
    found = dict(options)
    for number, link in enumerate(url.split("::")):
        protocol = link.partition("://")[0]
        own = found.get(protocol)
        # The first link takes what stands outside any protocol, too.
        given = {**(own if isinstance(own, dict) else {}), **(found if number == 0 else {})}
        timed = _timed(protocol, given)
        if number == 0:
            found |= timed
        elif timed:
            found[protocol] = {**given, **timed}
    return found


def _timed(protocol: str, given: dict[str, Any]) -> dict[str, Any]:
    """The argument of a file system that has its timeouts."""
    if protocol in ("gs", "gcs") and "requests_timeout" not in given:
        timeout = _timeout(settings())
        return {} if timeout is None else {"requests_timeout": timeout}
    if protocol in ("http", "https") and "timeout" not in given:
        client = given.get("client_kwargs") or {}
        timeout = _timeout(settings())
        if isinstance(client, dict) and "timeout" not in client and timeout is not None:
            return {"client_kwargs": {**client, "timeout": timeout}}
    return {}


def _timeout(known: Settings) -> Any:
    """As aiohttp takes it; None where that is not installed, which the file system says."""
    try:
        from aiohttp import ClientTimeout
    except ImportError:
        return None
    # Not of a whole answer, which may be large.
    return ClientTimeout(
        total=None, sock_connect=known.connect_timeout, sock_read=known.read_timeout
    )
