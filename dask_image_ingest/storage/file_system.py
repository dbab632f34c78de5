"""The file system of a remote shard, as fsspec has it."""

from __future__ import annotations

from typing import Any, TypeAlias

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.cached import CachingFileSystem

from dask_image_ingest.errors import ArgumentError, MissingDependencyError, ShardError
from dask_image_ingest.storage.pipe import without_permission
from dask_image_ingest.storage.timeouts import with_timeouts

__all__ = ["FileSystem", "file_system", "keeps_copies", "uncached"]

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


def file_system(url: str, storage_options: dict[str, Any] | None) -> tuple[FileSystem, str]:
    """Find the file system of a remote shard, and the shard's path there."""
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


def uncached(fs: FileSystem) -> FileSystem:
    """The file system behind caches, which answer wrongly what they have no copies of."""
    while isinstance(fs, CachingFileSystem):
        fs = fs.fs
    return fs


def keeps_copies(url: str) -> bool:
    """Whether a shard is read from a cache, which may have another version than its server."""
    first, chained, _ = url.partition("::")
    if not chained:
        return False
    kind = fsspec.get_filesystem_class(first.partition("://")[0])
    return issubclass(kind, CachingFileSystem)
