"""What a test needs of the S3 server in ``tests/conftest.py``."""

from __future__ import annotations

from typing import Any

import fsspec


def s3_options(endpoint: str | None) -> dict[str, Any]:
    """The storage options for a server; none where there is none."""
    if not endpoint:
        return {}
    return {"key": "key", "secret": "secret", "endpoint_url": endpoint}


def empty_bucket(endpoint: str, bucket: str) -> fsspec.AbstractFileSystem:
    """The file system of a server on which a bucket exists and is empty."""
    fs = fsspec.filesystem("s3", **s3_options(endpoint))
    if fs.exists(bucket):
        fs.rm(bucket, recursive=True)
    fs.mkdir(bucket)
    return fs
