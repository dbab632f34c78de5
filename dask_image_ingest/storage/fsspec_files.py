"""Remote files of any protocol that fsspec supports: options, errors, listings, and their bytes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Any, TypeAlias
from urllib.parse import unquote

from fsspec.core import url_to_fs

from dask_image_ingest.errors import (
    ArgumentError,
    MissingDependencyError,
    ShardError,
    ShardNotFoundError,
    safe_cause,
)
from dask_image_ingest.storage.fetch import (
    FirstBytes,
    Retries,
    RetryableError,
    call_with_retry,
    configured_settings,
    request_all,
)
from dask_image_ingest.storage.reader import Result, reason_of, translate_errors
from dask_image_ingest.storage.shard import (
    FileSystem,
    Shard,
    as_sent,
    folder_of,
    is_web,
    listed_folder,
    split_url,
    whole_key,
)
from dask_image_ingest.storage.streams import without_pipes_allowed
from dask_image_ingest.url_secrets import error_text, is_signed

#: fsspec's info of a file.
Info: TypeAlias = dict[str, Any]

#: Folder → name → info: listings that the lookups of one read share.
Listings: TypeAlias = dict[str, dict[str, Info]]

logger = logging.getLogger("dask_image_ingest")

# List a folder, which may hold millions of other files, for no fewer of its files than this.
_WORTH_A_LISTING = 8

# Keys holding a file's version, most reliable first: hashes of its content, then times. Hugging
# Face has blob_id, GitHub sha, zip CRC, FTP modify, WebHDFS modificationTime.
_VERSIONS = (
    *("ETag", "etag", "Content-MD5", "generation", "blob_id", "sha", "CRC"),
    *("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "modified", "modify"),
    *("modificationTime", "created"),
)

# Attributes with the HTTP status in errors of aiohttp, Azure and gcsfs.
_STATUS_ATTRIBUTES = ("status", "status_code", "code")

# Errors of interrupted connections, of aiohttp, botocore, Azure and requests.
_INTERRUPTIONS = {
    *("ChunkedEncodingError", "ClientPayloadError", "IncompleteRead", "IncompleteReadError"),
    *("ServerDisconnectedError", "ServiceRequestError", "ServiceResponseError"),
}


# Extra of this package → protocols whose dependencies it installs.
_EXTRAS = {
    "s3": ("s3", "s3a"),
    "gcs": ("gs", "gcs"),
    "azure": ("az", "abfs", "abfss", "adl"),
    "http": ("http", "https"),
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
        options = with_defaults(url, without_pipes_allowed(storage_options))
        fs, path = url_to_fs("::".join(links), **options)
        return fs, whole_key(fs, url, path)
    except (ImportError, ValueError, TypeError, KeyError) as error:  # KeyError: an option twice
        protocol = url.partition("://")[0].rpartition("::")[2]
        extra = next((extra for extra, known in _EXTRAS.items() if protocol in known), None)
        # Some protocols are registered by the package that implements them.
        unknown = extra is not None and str(error) == f"Protocol not known: {protocol}"
        if not isinstance(error, ImportError) and not unknown:
            why = f"{url} cannot be read, with these storage_options: {error}"
            raise ArgumentError(why) from safe_cause(error)
        install = f" pip install 'dask-image-ingest[{extra}]' brings what it needs."
        raise MissingDependencyError(
            f"{url} cannot be read: {error}.{install if extra else ''}"
        ) from safe_cause(error)
    except Exception as error:  # some file systems connect on creation
        raise ShardError(f"{url} cannot be read: {error_text(error)}") from safe_cause(error)


def with_defaults(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """The storage options of a URL (or chain of URLs), plus defaults for those that they lack.

    Timeouts; and for web servers ``encoded``, so that a URL is sent as it is.
    """
    result = dict(options)
    for number, link in enumerate(url.split("::")):
        protocol = link.partition("://")[0]
        nested = result.get(protocol)
        # Options that are not nested under a protocol are for the first link.
        given = {**(nested if isinstance(nested, dict) else {}), **({} if number else result)}
        missing: dict[str, Any] = {}
        if protocol in ("gs", "gcs") and "requests_timeout" not in given:
            missing["requests_timeout"] = _timeout()
        elif protocol in ("http", "https"):
            client = given.get("client_kwargs") or {}
            if "timeout" not in given and "timeout" not in client:
                missing["client_kwargs"] = {**client, "timeout": _timeout()}
            if "encoded" not in given:
                missing["encoded"] = True
        if number == 0:
            result |= missing
        elif missing:
            result[protocol] = {**given, **missing}
    return result


def _timeout() -> Any:
    from aiohttp import ClientTimeout

    settings = configured_settings()
    # No limit on a whole response, which may be large.
    return ClientTimeout(
        total=None, sock_connect=settings.connect_timeout, sock_read=settings.read_timeout
    )


# --- errors ---------------------------------------------------------------------------------------


def call_fsspec(url: str, call: Callable[..., Result], *args: object) -> Result:
    """Call a method of a file system, with retries.

    Raises
    ------
    ShardNotFoundError, ShardError
    """
    retries = Retries(url, configured_settings().retry_limit)
    return call_with_retry(lambda: _request(url, call, *args), retries)


def _request(url: str, call: Callable[..., Result], *args: object, **kw: object) -> Result:
    try:
        return translate_errors(url, call, *args, **kw)
    except (ShardError, ShardNotFoundError) as error:
        if (cause := error.__cause__) is None:
            raise
        if isinstance(error, ShardError) and _is_temporary(cause):
            raise RetryableError(error_text(reason_of(cause))) from safe_cause(cause)
        error.__cause__ = safe_cause(cause)
        raise


def _is_temporary(error: BaseException | None) -> bool:
    """True for an error of a file system that may be temporary, by its chain of causes."""
    for _ in range(5):
        if error is None:
            break
        statuses = (getattr(error, name, None) for name in _STATUS_ATTRIBUTES)
        status = next((status for status in statuses if isinstance(status, int)), 0)
        if status:
            return status in (408, 425, 429) or status >= 500
        if isinstance(error, ConnectionRefusedError):
            return False
        if isinstance(error, (ConnectionError, TimeoutError, asyncio.TimeoutError)):
            return True
        if type(error).__name__ in _INTERRUPTIONS:
            return True
        error = error.__cause__
    return False


# --- listings -------------------------------------------------------------------------------------


def version_of(info: Info) -> str:
    """Version of a file, from fsspec's info; empty without one."""
    version = next((info[name] for name in _VERSIONS if info.get(name)), "")
    # ls and info of one file system may differ: a datetime from one, a number from the other.
    return str(version.timestamp() if isinstance(version, datetime) else version)


def shard_of(url: str, info: Info) -> Shard:
    """A file by fsspec's info."""
    size = info.get("size")
    return Shard(url, -1 if size is None else int(size), version_of(info))


def find_below(fs: FileSystem, folder: str, depth: int | None = None) -> dict[str, Info]:
    """All files below a folder, by their path below it; with a ``depth``, and its folders, so far.

    fsspec lists ``a`` for the folder ``a/`` of an object store, which is that of ``a//b.tar``.
    """
    base = folder if "://" in folder else folder.rstrip("/") or folder
    options = {} if depth is None else {"maxdepth": depth, "withdirs": True}
    folder = folder.lstrip("/")
    named = {}
    for path, info in fs.find(base, detail=True, **options).items():
        below = path.lstrip("/")
        if not folder.endswith("/") or below.startswith(f"{folder}/"):
            named[below[len(folder) :].removeprefix("/")] = info
    return named


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


def list_folder(
    folder: str, storage_options: dict[str, Any] | None, listings: Listings
) -> dict[str, Info]:
    """Entries of a folder by name, from ``listings`` or by one request; empty if it failed before.

    Raises
    ------
    ShardNotFoundError, ShardError
        If there is no such folder, or if its server does not list folders.
    """
    if folder not in listings:
        entries = listings[folder] = {}  # stays if the request fails
        head, path, tail = split_url(folder)
        is_page = is_web(folder)
        fs, root = file_system(f"{head}{path}/{tail}" if is_page else folder, storage_options)
        for name, entry in call_fsspec(folder, entries_in, fs, root).items():
            entries[unquote(name.partition("?")[0]) if is_page else name] = entry
    return listings[folder]


def exists_remote(url: str, storage_options: dict[str, Any] | None) -> bool:
    """True if a file or folder of exactly this name exists, wildcards and braces included."""
    fs, path = file_system(url, storage_options)
    try:
        return info_of(fs, path, url) is not None
    except ShardError:
        return False  # not a valid name


def info_of(fs: FileSystem, path: str, url: str, is_beside: bool = False) -> Info | None:
    """Info of a file or folder; None if it does not exist, or a signature is of another file."""
    if "//" in path and "://" not in path:
        fs.invalidate_cache()  # gcsfs looks for a//b in its listing of a
    try:
        return call_fsspec(url, fs.info, path)
    except ShardNotFoundError:
        return None
    except ShardError:
        if is_beside and is_signed(url):
            return None
        raise


def infos_of(
    fs: FileSystem, paths: Sequence[str], urls: Sequence[str], is_beside: bool = False
) -> list[Info | None]:
    """Infos of many, asked for at once."""
    ask_all = request_all if fs.async_impl else map

    def ask(file: tuple[str, str]) -> Info | None:
        return info_of(fs, *file, is_beside)

    return [*ask_all(ask, zip(paths, urls, strict=True))]


def look_up(
    urls: Sequence[str],
    storage_options: dict[str, Any] | None,
    listings: Listings | None = None,
    only_listed: bool = False,
) -> dict[str, Info | None]:
    """Infos of files and folders by exact URL, by one listing of a folder for many; None if absent.

    Parameters
    ----------
    listings
        For files beside shards, whose sizes need not be known: listings to reuse. Then web servers
        are asked for a page of the folder. If there is none, the first file is requested and taken
        to stand for all.
    only_listed
        Not so: files whose folder can't be listed are left out.
    """
    by_folder: dict[str, list[str]] = defaultdict(list)
    for url in urls:
        by_folder[listed_folder(url)].append(url)
    found: dict[str, Info | None] = {}
    for members in by_folder.values():
        try:
            infos = _look_up(members, storage_options, listings, only_listed)
            found |= dict(zip(members, infos, strict=True))
        except Exception as error:  # each file system has exceptions of its own
            if not only_listed:
                raise
            logger.debug("files beside shards are not found: %s", error)
    return found


def _look_up(
    urls: Sequence[str],
    storage_options: dict[str, Any] | None,
    listings: Listings | None,
    only_listed: bool,
) -> list[Info | None]:
    """Infos of files and folders in one folder."""
    folder = folder_of(urls[0])[0]
    names = [folder_of(url)[1] for url in urls]
    fs, root = file_system(folder, storage_options)
    if listings is None:
        fs.invalidate_cache()  # fsspec's cached listings may be out of date
    is_page = is_web(folder)
    if is_page:
        paths = [*map(as_sent, urls)]
    else:
        start = f"{root}/" if root.strip("/") else root
        paths = [start + name for name in names]
    is_few = len(urls) < _WORTH_A_LISTING and not (is_page and only_listed)
    if is_few or (is_page and listings is None):  # pages have no sizes
        return infos_of(fs, paths, urls, is_beside=listings is not None)
    try:
        entries = list_folder(folder, storage_options, {} if listings is None else listings)
    except (ShardError, ShardNotFoundError) as error:
        if isinstance(error, ShardError) and not is_page:
            raise
        entries = {}
    if is_page:
        names = [*map(unquote, names)]
        if not only_listed and entries.keys().isdisjoint(names):
            first = info_of(fs, paths[0], urls[0], is_beside=True)
            return [first, *[first and {"type": "file"}] * (len(urls) - 1)]
    return [entries.get(name) for name in names]


# --- bytes ----------------------------------------------------------------------------------------


class FsspecSource:
    """A shard on an fsspec file system.

    Several threads call only asynchronous file systems at once; others are called in turn.
    """

    def __init__(self, fs: FileSystem, path: str, url: str) -> None:
        self.url = url
        self._fs = fs
        self._path = path
        self.version = ""
        # Needs no reset after a fork: a source belongs to the task that opened the shard, and that
        # task continues in the parent.
        self._lock = nullcontext() if fs.async_impl else threading.Lock()

    def head(self, nbytes: int, stall_timeout: float | None = None) -> FirstBytes:
        if "//" in self._path and "://" not in self._path:
            self._fs.invalidate_cache()  # see info_of
        info = self._request(self._fs.info, self._path)
        size, self.version = info["size"], version_of(info)
        if size is None:
            whole = self._request(self._fs.cat_file, self._path)
            return FirstBytes(whole, len(whole))
        wanted = min(nbytes, size)
        data = self._request(self._fs.cat_file, self._path, start=0, end=wanted) if wanted else b""
        # A file system may ignore the range, and give all.
        if len(data) not in (wanted, size):
            raise self._wrong_size(wanted, len(data))
        return FirstBytes(data, size)

    def stream(self, start: int, stop: int, stall_timeout: float | None = None) -> Iterator[bytes]:
        data = self._request(self._fs.cat_file, self._path, start=start, end=stop)
        if len(data) != stop - start:
            raise self._wrong_size(stop - start, len(data))
        yield data

    def refuse_changes(self) -> None:
        if not self.version:
            return
        try:
            self._fs.invalidate_cache(self._fs._parent(self._path))
            info = self._request(self._fs.info, self._path)
        except (RetryableError, ShardNotFoundError):
            return  # no change was seen
        if version_of(info) != self.version:
            raise ShardError(
                f"{self.url} has changed while it was read, and what was read may be of two "
                "versions. Read it again when it is complete"
            )

    def is_version(self, version: str) -> bool:
        # Some file systems leave out the quotes of an ETag.
        return not self.version or not version or self.version.strip('"') == version.strip('"')

    def _wrong_size(self, wanted: int, received: int) -> Exception:
        """Error of too few bytes; retryable if the version shows that the shard is unchanged."""
        self.refuse_changes()
        told = f"{wanted} bytes were requested and {received} received"
        if self.version:
            return RetryableError(told)
        return ShardError(f"{self.url} has changed or its server is at fault: {told}")

    def _request(self, call: Callable[..., Result], *args: object, **kw: object) -> Result:
        with self._lock:
            return _request(self.url, call, *args, **kw)
