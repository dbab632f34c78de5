"""fsspec file systems: options, timeouts, and translated errors."""

from __future__ import annotations

import inspect
import socket
from typing import Any

from fsspec.core import url_to_fs

from dask_image_ingest.errors import (
    ArgumentError,
    MissingDependencyError,
    ShardError,
    ShardNotFoundError,
    safe_cause,
)
from dask_image_ingest.storage.settings import Settings, configured_settings
from dask_image_ingest.storage.shard import (
    FileSystem,
    as_sent,
    is_web,
    local_path,
    whole_key,
)
from dask_image_ingest.storage.streams import without_pipes_allowed
from dask_image_ingest.texts import error_text


def with_web_options(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """The storage options of a URL (or chain of URLs), plus defaults for those that they lack.

    Timeouts; and for web servers ``encoded``, so that a URL is sent as it is.
    """
    result = dict(options)
    for number, link in enumerate(url.split("::")):
        protocol = link.partition("://")[0]
        own = result.get(protocol)
        # Options that are not nested under a protocol are for the first link.
        given = {**(own if isinstance(own, dict) else {}), **(result if number == 0 else {})}
        defaults = _timeout_options(protocol, given)
        if protocol in ("http", "https") and "encoded" not in given:
            defaults["encoded"] = True
        if number == 0:
            result |= defaults
        elif defaults:
            result[protocol] = {**given, **defaults}
    return result


def _timeout_options(protocol: str, given: dict[str, Any]) -> dict[str, Any]:
    """The option that sets the timeouts of a file system; empty if ``given`` sets them."""
    if protocol in ("gs", "gcs") and "requests_timeout" not in given:
        timeout = _timeout(configured_settings())
        return {} if timeout is None else {"requests_timeout": timeout}
    if protocol in ("http", "https") and "timeout" not in given:
        client = given.get("client_kwargs") or {}
        timeout = _timeout(configured_settings())
        if isinstance(client, dict) and "timeout" not in client and timeout is not None:
            return {"client_kwargs": {**client, "timeout": timeout}}
    return {}


def _timeout(settings: Settings) -> Any:
    """A timeout for aiohttp; None if it is not installed, an error that fsspec raises itself."""
    try:
        from aiohttp import ClientTimeout
    except ImportError:
        return None
    # No limit on a whole response, which may be large.
    return ClientTimeout(
        total=None, sock_connect=settings.connect_timeout, sock_read=settings.read_timeout
    )


# Errors if no server answers, or if its name does not resolve.
_UNREACHED = (ConnectionError, socket.gaierror)


def translate_errors(url: str, read: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``read``; translate its errors into a ``ShardError`` that names the shard."""
    try:
        return read(*args, **kwargs)
    except MemoryError:
        raise
    except Exception as error:  # each remote file system has exceptions of its own
        # fsspec's HTTP file system raises FileNotFoundError from whatever went wrong.
        is_hidden = isinstance(error, FileNotFoundError) and _is_failure(error.__cause__)
        reason = (error.__cause__ if is_hidden else None) or error
        if isinstance(reason, FileNotFoundError):
            raise ShardNotFoundError(f"{url} is not found") from error
        unreached = any(isinstance(cause, _UNREACHED) for cause in (reason, reason.__cause__))
        why = "its server cannot be reached: " if unreached and local_path(url) is None else ""
        raise ShardError(f"{url} cannot be read: {why}{error_text(reason)}") from error


def _is_failure(cause: BaseException | None) -> bool:
    """True if the cause of a FileNotFoundError is not a genuine 404."""
    if isinstance(cause, (OSError, TypeError, ValueError)):
        return not isinstance(cause, FileNotFoundError)
    return getattr(cause, "status", 404) not in (404, 410)


# Protocol → extra of this package that installs its dependencies.
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


# fsspec's caching file systems.
_CACHES = ("filecache", "simplecache", "blockcache", "cached")


def file_system(url: str, storage_options: dict[str, Any] | None) -> tuple[FileSystem, str]:
    """The file system of a remote shard or folder, and its path in it: no slash is lost.

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
        links = (as_sent(link) if is_web(link) else link for link in url.split("::"))
        options = with_web_options(url, without_pipes_allowed(storage_options))
        fs, path = url_to_fs("::".join(links), **options)
        return fs, whole_key(fs, url, path)
    except (ImportError, ValueError, TypeError, KeyError) as error:  # KeyError: an option twice
        protocol = url.partition("://")[0].rpartition("::")[2]
        extra = _EXTRAS.get(protocol)
        # Some protocols are registered by the package that implements them.
        unknown = extra is not None and str(error) == f"Protocol not known: {protocol}"
        if not isinstance(error, ImportError) and not unknown:
            why = f"{url} cannot be read, with these storage_options: {error}"
            raise ArgumentError(why) from safe_cause(error)
        install = (
            f" pip install 'dask-image-ingest[{extra}]' brings what it needs." if extra else ""
        )
        raise MissingDependencyError(f"{url} cannot be read: {error}.{install}") from safe_cause(
            error
        )
    except Exception as error:  # some file systems connect on creation
        raise ShardError(f"{url} cannot be read: {error_text(error)}") from safe_cause(error)


# fsspec's info of a file.
Info = dict[str, Any]


def info_of(fs: FileSystem, path: str) -> Info:
    """Info of a file or folder, as fsspec has it."""
    if "//" in path and "://" not in path:
        fs.invalidate_cache()  # gcsfs looks for a//b in its listing of a
    info: Info = fs.info(path)
    return info


def name_below(folder: str, path: str) -> str | None:
    """The part of a listed path below a folder; None if it is not there.

    fsspec lists ``a`` for the folder ``a/`` of an object store, which is that of ``a//b.tar``.
    """
    folder, path = folder.lstrip("/"), path.lstrip("/")
    if folder.endswith("/") and not path.startswith(f"{folder}/"):
        return None
    return path[len(folder) :].removeprefix("/")


def find_below(fs: FileSystem, folder: str, prefix: str = "") -> dict[str, Info]:
    """All files below a folder, at least those with a prefix, by their path below it."""
    base = folder if "://" in folder else folder.rstrip("/") or folder
    prefix = folder[len(base) :] + prefix
    options = {"prefix": prefix} if prefix and supports_prefix(fs) else {}
    found = fs.find(base, detail=True, **options)
    named = ((name_below(folder, path), info) for path, info in found.items())
    return {name: info for name, info in named if name is not None}


def entries_in(fs: FileSystem, folder: str) -> dict[str, Info]:
    """The files and folders directly in a folder, by name."""
    if "://" in folder or folder.rstrip("/") in ("", folder):
        return {
            info["name"].rstrip("/").rpartition("/")[2]: info
            for info in fs.ls(folder, detail=True)
            # Neither the folder itself nor one in it without a name.
            if info["name"].strip("/") != folder.strip("/")
        }
    entries: dict[str, Info] = {}
    for below, info in find_below(fs, folder).items():
        name, slash, _ = below.partition("/")
        if not slash or name not in entries:
            entries[name] = {**info, "type": "directory"} if slash else info
    return entries


def supports_prefix(fs: FileSystem) -> bool:
    """True if a search of a folder takes the begin of names."""
    return "prefix" in inspect.signature(getattr(fs, "_find", fs.find)).parameters
