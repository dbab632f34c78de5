"""The timeouts of ``image-ingest.remote``, for the file systems of fsspec.

Those by aiohttp wait for five minutes for a server that never answers. s3fs has short ones (5 and
15 s), and adlfs takes none for looking up files.
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
        argument, make = _ARGUMENTS.get(protocol, ("", None))
        own = found.get(protocol)
        # The first link takes what stands outside any protocol, too.
        given = {**(own if isinstance(own, dict) else {}), **(found if number == 0 else {})}
        said = given.get(argument) or {}
        if make is None or not isinstance(said, dict) or _NAMED & (given.keys() | said.keys()):
            continue
        timed = {**make(settings()), **said}
        if number == 0:
            found[argument] = timed
        else:
            found[protocol] = {**given, argument: timed}
    return found


def _aiohttp(known: Settings) -> dict[str, Any]:
    try:
        from aiohttp import ClientTimeout
    except ImportError:  # the file system says what is missing
        return {}
    # Not of a whole answer, which may be large.
    timeout = ClientTimeout(
        total=None, sock_connect=known.connect_timeout, sock_read=known.read_timeout
    )
    return {"timeout": timeout}


# Protocol → the argument of its file system that is a dictionary with timeouts, and these.
_ARGUMENTS = {
    "http": ("client_kwargs", _aiohttp),
    "https": ("client_kwargs", _aiohttp),
    "gs": ("session_kwargs", _aiohttp),
    "gcs": ("session_kwargs", _aiohttp),
}

# What users call those that they give.
_NAMED = frozenset({"timeout", "requests_timeout"})
