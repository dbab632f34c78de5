"""A remote shard's URL → the source of its bytes, and these."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage.file_system import FileSystem, file_system
from dask_image_ingest.storage.pipe import without_permission
from dask_image_ingest.storage.remote.http import HTTPSource
from dask_image_ingest.storage.remote.other import FsspecSource
from dask_image_ingest.storage.remote.pace import pace_of
from dask_image_ingest.storage.remote.remote_bytes import RemoteBytes
from dask_image_ingest.storage.remote.retry import Retries, first_bytes
from dask_image_ingest.storage.remote.source import Head, Source
from dask_image_ingest.storage.settings import Settings, settings
from dask_image_ingest.storage.shard import Shard, changed

__all__ = ["open_remote"]

# Seconds that a URL signed by us is good for, and after which the next one is made.
_SIGNED_FOR, _SIGNED_ANEW = 3600, 600

_S3, _AZURE = frozenset({"s3", "s3a"}), frozenset({"az", "abfs", "abfss"})


@contextmanager
def open_remote(
    url: str, storage_options: dict[str, Any] | None, listed: Shard | None = None
) -> Iterator[bytes | RemoteBytes]:
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
        # One of a server that knows no ranges may be large, and is not copied.
        small = len(head.data) <= found.head
        yield _Whole(head.data, url, source) if small else head.data
    else:
        with closing(RemoteBytes(source, head, found)) as content:
            yield content
    source.refuse_changes()


class _Whole(bytes):
    """A small shard, of which all came at once."""

    listed: Shard
    modified: float | None

    def __new__(cls, data: bytes, url: str, source: Source) -> _Whole:
        whole = super().__new__(cls, data)
        whole.listed = Shard(url, len(data), source.version)
        whole.modified = source.modified
        return whole


def _reach(sources: list[Source], found: Settings) -> tuple[Source, Head]:
    """The first source that answers, and what it answers first."""
    for source, last in zip(sources, [False] * (len(sources) - 1) + [True], strict=True):
        retries = Retries(source.url, found.retry_limit, reached=False)
        try:
            pace = pace_of(source.url, found.connections)
            return source, first_bytes(source, found.head, retries, pace, found.read_timeout)
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
    """What gives a URL that anyone can read, by the credentials of the file system.

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
