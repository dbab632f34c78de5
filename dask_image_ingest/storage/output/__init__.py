"""The output store at a path or URL."""

from __future__ import annotations

import os
from typing import Any

from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.storage.output.local_store import LocalStore
from dask_image_ingest.storage.output.remote_store import RemoteStore
from dask_image_ingest.storage.output.store import OutputStore, WriteAdvice
from dask_image_ingest.storage.shard import local_path


def open_output(
    folder: str, advice: WriteAdvice, storage_options: dict[str, Any] | None
) -> OutputStore:
    """The output store at a path or URL.

    Raises
    ------
    ArgumentError
        If it is a chain of file systems, which can't be written.
    """
    local = local_path(folder) if "://" in folder else folder
    if local is not None:
        return LocalStore(os.path.abspath(os.path.expanduser(local)), advice)
    if "::" in folder:
        raise ArgumentError(f"{folder!r} is a chain of file systems, which is read and not written")
    return RemoteStore(folder.rstrip("/"), storage_options, advice)
