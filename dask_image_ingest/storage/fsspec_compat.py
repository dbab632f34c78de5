"""File systems of fsspec: options, timeouts, and errors that name the shard."""

from __future__ import annotations

import socket
from typing import Any, TypeAlias

import fsspec
from fsspec.core import url_to_fs

from dask_image_ingest.errors import (
    ArgumentError,
    MissingDependencyError,
    ShardError,
    ShardNotFoundError,
)
from dask_image_ingest.storage.pipe import without_permission
from dask_image_ingest.storage.settings import Settings, settings
from dask_image_ingest.storage.shard import local_path


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


# What happens where no server answers, or none is found.
_UNREACHED = (ConnectionError, socket.gaierror)


def translate_errors(url: str, read: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``read``, and translate its errors into ours, which name the shard."""
    try:
        return read(*args, **kwargs)
    except MemoryError:
        raise
    except Exception as error:  # each remote file system has exceptions of its own
        # fsspec says of a web address that there is no such file, whatever went wrong.
        hides = isinstance(error, FileNotFoundError) and _is_fault(error.__cause__)
        fault = error.__cause__ if hides else error
        if isinstance(fault, FileNotFoundError):
            raise ShardNotFoundError(f"{url} is not found", path=local_path(url)) from error
        behind = (fault, fault.__cause__ if fault else None)
        unreached = any(isinstance(e, _UNREACHED) for e in behind)
        why = "its server cannot be reached: " if unreached and local_path(url) is None else ""
        raise ShardError(f"{url} cannot be read: {why}{type(fault).__name__}: {fault}") from error


def _is_fault(cause: BaseException | None) -> bool:
    """True if the error is not a genuine 404."""
    if isinstance(cause, (OSError, TypeError)):
        return not isinstance(cause, FileNotFoundError)
    return getattr(cause, "status", 404) not in (404, 410)


FileSystem: TypeAlias = fsspec.AbstractFileSystem

# Protocols and the extra of this package that brings what they need.
_EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "adl": "azure",
    "http": "http",
    "https": "http",
}


# Links of fsspec that keep copies of what they read.
_CACHES = ("filecache", "simplecache", "blockcache", "cached")


def file_system(url: str, storage_options: dict[str, Any] | None) -> tuple[FileSystem, str]:
    """Find the file system of a remote shard, and the shard's path there.

    Raises
    ------
    ArgumentError, MissingDependencyError, ShardError
    """
    first, chained, _ = url.partition("::")
    if chained and first in _CACHES:
        raise ArgumentError(
            f"{url} cannot be read through {first}::, whose copies may be older than the shards "
            f"that are listed: leave out {first}::, since only what a query needs is fetched, or "
            "copy the shards to a local disk"
        )
    try:
        return url_to_fs(url, **with_timeouts(url, without_permission(storage_options)))
    except (ImportError, ValueError, TypeError, KeyError) as error:  # KeyError: given twice
        protocol = url.partition("://")[0].rpartition("::")[2]
        extra = _EXTRAS.get(protocol)
        # Some protocols fsspec knows only of packages that are installed.
        unknown = extra is not None and str(error) == f"Protocol not known: {protocol}"
        if not isinstance(error, ImportError) and not unknown:
            why = f"{url} cannot be read, with these storage_options: {error}"
            raise ArgumentError(why) from error
        install = (
            f" pip install 'dask-image-ingest[{extra}]' brings what it needs." if extra else ""
        )
        raise MissingDependencyError(f"{url} cannot be read: {error}.{install}") from error
    except Exception as error:  # some file systems connect already
        raise ShardError(f"{url} cannot be read: {type(error).__name__}: {error}") from error
