"""What the URL of a shard says."""

from __future__ import annotations

import re

import fsspec

from dask_image_ingest.errors import ArgumentError


def local_path(url: str) -> str | None:
    """Give the path of a local shard, None if it is a remote one."""
    if url.startswith(("file://", "local://")):
        return fsspec.get_filesystem_class("file")._strip_protocol(url)
    return None if "://" in url else url


def is_web(url: str) -> bool:
    """Tell whether a remote shard is one of a web server, whatever caches it."""
    return re.match(r"(\w+::)*https?://", url) is not None


def split_url(url: str) -> tuple[str, str, str]:
    """Split a remote URL around its path: ``simplecache::zip://``, ``a.tar``, ``::s3://b/c.zip``."""
    match = re.fullmatch(r"((?:\w+::)*[^:/]+://)(.*?)(::.*)?", url)
    if match is None:
        raise ArgumentError(f"{url!r} is no URL that fsspec could read")
    return match[1], match[2], match[3] or ""
