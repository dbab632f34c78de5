"""A shard: its URL, its size and its version."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import fsspec
from fsspec.registry import known_implementations

from dask_image_ingest.errors import ArgumentError, ShardError
from dask_image_ingest.passwords import UrlHolder


def local_path(url: str) -> str | None:
    """Give the path of a local shard, None if it is a remote one."""
    if url.startswith(("file://", "local://")):
        return fsspec.get_filesystem_class("file")._strip_protocol(url)
    return None if "://" in url else url


def is_web(url: str) -> bool:
    """Tell whether a remote shard is one of a web server."""
    return url.startswith(("http://", "https://"))


def split_url(url: str) -> tuple[str, str, str]:
    """Split a remote URL around its path: ``zip://``, ``a.tar``, ``::s3://b/c.zip``."""
    match = re.fullmatch(r"((?:\w+::)*[^:/]+://)(.*?)(::.*)?", url)
    if match is None:
        raise ArgumentError(f"{url!r} is no URL that fsspec could read")
    return match[1], match[2], match[3] or ""


def identities(url: str) -> set[tuple[str, str, str]]:
    """Identities of the files of a URL, however it is written; one for each link of a chain.

    Two URLs have one in common if they lead to the same file, as far as they tell: by another name
    of the protocol, inside an archive, or over a symbolic link.
    """
    path = local_path(url)
    links = [url] if path is not None else [link for link in url.split("::") if "://" in link]
    return {_identity(link) for link in links}


def _identity(url: str) -> tuple[str, str, str]:
    path = local_path(url)
    if path is not None:
        return "file", "", os.path.realpath(path)
    protocol, _, rest = url.partition("://")
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError):
        # Its package is not here, but by what name it would be called is known.
        return known_implementations.get(protocol, {}).get("class", protocol), "", rest
    name = kind.protocol if isinstance(kind.protocol, str) else kind.protocol[0]
    # Some file systems have the host in the path, and some beside it.
    host = kind._get_kwargs_from_urls(url).get("host") or ""
    return name, host, kind._strip_protocol(url)


@dataclass(frozen=True, slots=True, repr=False)
class Shard(UrlHolder):
    """A shard as it was when it was found.

    Attributes
    ----------
    url
        An absolute path for a local shard, else the whole URL.
    size
        In bytes, as stored; -1 if the server does not tell.
    version
        What changes when the shard does: the time of its last change in nanoseconds, or what its
        file system knows of that kind (an ETag, a time). Empty if it knows nothing.
    sidecar
        The file beside it that has columns for its samples, where these were asked for.
    """

    url: str
    size: int
    version: str
    sidecar: Shard | None = None

    @property
    def state(self) -> str:
        """Size and version, which change with the shard."""
        return f"{self.size} {self.version}"

    @property
    def sidecar_url(self) -> str | None:
        """URL of its sidecar."""
        return None if self.sidecar is None else self.sidecar.url


def changed(url: str) -> ShardError:
    """Error of a shard whose version is not the listed one."""
    return ShardError(
        f"{url} has changed since it was listed, and what is known of it is known of another "
        "version. Read it again"
    )
