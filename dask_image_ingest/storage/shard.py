"""A shard: its URL, its size and its version."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import quote

import fsspec
import numpy as np
from fsspec.registry import known_implementations

from dask_image_ingest.errors import ArgumentError, ShardError
from dask_image_ingest.url_secrets import UrlHolder, url_identity

FileSystem: TypeAlias = fsspec.AbstractFileSystem

_WEB = ("http://", "https://")

#: Protocol of commands.
COMMAND = "pipe:"

#: Suffixes of shards; those of compressed ones, which can only be read from the beginning.
SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst")
_COMPRESSED = (".gz", ".tgz", ".zst")

#: Protocols of object stores. Their keys are names and no paths: ``a//b.tar``, ``a/./b.tar`` and
#: ``a/b.tar`` are three files.
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "memory"})

# Punctuation that is sent as it is: a % is part of an encoded character.
_IN_PATH = "!$%&'()*+,-./:;=@[]_|~"
_IN_QUERY = _IN_PATH + "?\\^`{}"


def local_path(url: str) -> str | None:
    """The path of a local shard; None for a remote one."""
    if url.startswith(("file://", "local://")):
        return fsspec.get_filesystem_class("file")._strip_protocol(url)
    return None if "://" in url else url


def is_web(url: str) -> bool:
    """True for a URL of a web server."""
    return url.startswith(_WEB)


def takes_files(folder: str) -> bool:
    """False for a folder on a web server or in an archive, where no file can be written."""
    return local_path(folder) is not None or not ("::" in folder or is_web(folder))


def is_pipe(url: str) -> bool:
    """True if a URL is a command."""
    return url.startswith(COMMAND)


def without_query(url: str) -> str:
    """A URL without the query that one of a web server may have."""
    return url.partition("?")[0] if is_web(url) else url


def has_random_access(url: str) -> bool:
    """True if ranges of a shard can be read: not of compressed shards and commands."""
    return not is_pipe(url) and not without_query(url).lower().endswith(_COMPRESSED)


def without_suffix(path: str) -> str | None:
    """The path of a shard without its suffix; None for other suffixes."""
    matching = (suffix for suffix in SHARD_SUFFIXES if path.lower().endswith(suffix))
    suffix = next(matching, None)
    return path[: -len(suffix)] if suffix else None


def split_url(url: str) -> tuple[str, str, str]:
    """Split a remote URL around its path: ``zip://``, ``a.tar``, ``::s3://b/c.zip``.

    The last part of a URL of the web is its query: ``https://``, ``host/a.tar``, ``?sig=x``.
    """
    match = re.fullmatch(r"((?:\w+::)*[^:/]+://)(.*?)(::.*)?", url)
    if match is None:
        raise ArgumentError(f"{url!r} is no URL that fsspec could read")
    head, path, tail = match[1], match[2], match[3] or ""
    if head.endswith(_WEB):
        end = re.search(r"[?#]|$", path)
        assert end is not None
        path, tail = path[: end.start()], path[end.start() :] + tail
    return head, path, tail


def is_object_store(url: str) -> bool:
    """True for a URL of an object store: there ``a/`` is a folder in ``a``, and ``..`` a name."""
    return url.partition("://")[0] in OBJECT_STORES


def as_folder(url: str) -> str:
    """The URL of a folder as it precedes a slash and a name: without the one that a user gives.

    Other slashes at its end are empty names in an object store.
    """
    if local_path(url) is not None:
        return url.rstrip("/")
    head, path, tail = split_url(url)
    return head + (path.removesuffix("/") if is_object_store(url) else path.rstrip("/")) + tail


def folder_of(url: str) -> tuple[str, str]:
    """The folder of a shard, and its name in it."""
    path = local_path(url)
    if path is not None:
        return os.path.split(path)
    head, path, tail = split_url(url)
    folder, _, name = path.rpartition("/")
    return head + folder + tail, name


def listed_folder(url: str) -> str:
    """The folder of a file, the same for all that one listing shows.

    Each URL of the web has a query of its own, perhaps.
    """
    return without_query(folder_of(url)[0])


def inside(folder: str, name: str) -> str:
    """The path or URL of a file in a folder, which is one of `folder_of` or `as_folder`."""
    if local_path(folder) is not None:
        return os.path.join(folder, name)
    head, path, tail = split_url(folder)
    return f"{head}{path}/{name}{tail}" if path else f"{head}{name}{tail}"


def shard_name(url: str) -> str:
    """The name of a shard in its folder; with the query of a URL, if any, but no signature."""
    name = folder_of(url)[1]
    _, mark, query = url_identity(url).partition("?") if is_web(url) else ("", "", "")
    return f"{name}{mark}{query.replace('/', '%2F')}"


def whole_key(fs: type[FileSystem] | FileSystem, url: str, path: str) -> str:
    """The path that fsspec gives for a URL, with all slashes at its end, which fsspec may drop.

    Only of object stores: elsewhere they mean nothing.
    """
    protocols = [fs.protocol] if isinstance(fs.protocol, str) else fs.protocol
    if OBJECT_STORES.isdisjoint(protocols):
        return path
    key = split_url(url)[1]
    return path.rstrip("/") + key[len(key.rstrip("/")) :]


def as_sent(url: str) -> str:
    """A URL of the web as it is requested: as it was given, byte for byte.

    Only what no URL may have is percent-encoded, as browsers do, and no fragment is sent.
    """
    match = re.fullmatch(r"(?s)(https?://[^/?#]*)([^?#]*)(\??)([^#]*).*", url)
    assert match is not None
    host, path, mark, query = match.groups()
    path = re.sub(r"%(?![0-9A-Fa-f]{2})", "%25", quote(path, _IN_PATH))
    return host + path + mark + quote(query, _IN_QUERY)


def identities(url: str, folders: dict[str, str] | None = None) -> set[tuple[str, str, str]]:
    """Canonical identities of the files of a URL; one for each link of a chain.

    Two URLs share one if they lead to the same file: by another name of the protocol (``s3a``),
    inside an archive, or through a symbolic link. ``folders`` keeps the folders that links lead to,
    for many files of few folders.
    """
    path = local_path(url)
    links = [url] if path is not None else [link for link in url.split("::") if "://" in link]
    return {_identity(link, {} if folders is None else folders) for link in links}


def start_of(folder: tuple[str, str, str]) -> tuple[str, str, str]:
    """Begin of the identities of all that is below a folder, by the folder's own."""
    kind, host, path = folder
    return kind, host, path if path == "/" and kind == "file" else f"{path}/"


def _identity(url: str, folders: dict[str, str]) -> tuple[str, str, str]:
    local = local_path(url)
    if local is not None:
        folder, name = os.path.split(local)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        path = os.path.join(folders[folder], name)
        is_plain = name not in ("", ".", "..") and not os.path.islink(path)
        return "file", "", path if is_plain else os.path.realpath(local)
    protocol, _, path = url.partition("://")
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError):
        # Its package is not installed; fsspec's registry has the name of its class.
        return known_implementations.get(protocol, {}).get("class", protocol), "", path
    name = kind.protocol if isinstance(kind.protocol, str) else kind.protocol[0]
    # Some file systems have the host in the path, and some apart from it.
    host = kind._get_kwargs_from_urls(url).get("host") or ""
    return name, host, whole_key(kind, url, kind._strip_protocol(url))


@dataclass(frozen=True, slots=True, repr=False)
class Shard(UrlHolder):
    """A shard as it was when it was listed.

    Attributes
    ----------
    url
        An absolute path for a local shard, else the whole URL.
    size
        In bytes, as stored; -1 if unknown.
    version
        Changes when the shard does: the modification time in nanoseconds of a local file, an ETag
        or a time of a remote one. Empty if the file system gives neither.
    sidecar
        The parquet file beside it with columns for its samples, if these were asked for.
    ctime
        Nanoseconds of the last change of a local file, its name and attributes included: no copy
        has that of its original. 0 of a remote one.
    """

    url: str
    size: int
    version: str
    sidecar: Shard | None = None
    ctime: int = field(default=0, compare=False)

    @classmethod
    def of_file(cls, path: str, status: os.stat_result) -> Shard:
        """A local file."""
        version = str(status.st_mtime_ns)
        return cls(path, status.st_size, version, ctime=status.st_ctime_ns)

    @property
    def state(self) -> str:
        """Size and version as one string, which changes with the shard."""
        return f"{self.size} {self.version}"

    @property
    def identity(self) -> str:
        """URL without secrets, size and version of the shard and its sidecar, as one string."""
        files = (file for file in (self, self.sidecar) if file is not None)
        return "\n".join(f"{url_identity(file.url)}\0{file.state}" for file in files)


def changed(listed: Shard, found: Shard) -> ShardError:
    """Error of a file whose version differs from the listed one."""
    return ShardError(
        f"{listed.url} has changed since it was listed: it was {_version(listed)}, and is "
        f"{_version(found)} now. A frame never mixes rows of two versions: read it again"
    )


def _version(shard: Shard) -> str:
    version = f"version {shard.version}" if shard.version else "an unknown version"
    if local_path(shard.url) is not None and shard.version.isdecimal():
        version = f"modified {np.datetime64(int(shard.version), 'ns')} UTC"
    return f"{shard.size:,} bytes, {version}"
