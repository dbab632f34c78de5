"""Output folders, on disk and in object stores.

In: a path or URL. Out: a store whose files appear whole, the lock of the run that writes there, and
the swap of a folder for another.
"""

from __future__ import annotations

import os
from typing import Any

from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.storage.output.local_store import LocalStore
from dask_image_ingest.storage.output.lock import (
    LOCK,
    acquire,
    begin_run,
    end_run,
    refuse_ended_run,
    refuse_other_run,
)
from dask_image_ingest.storage.output.remote_store import RemoteStore
from dask_image_ingest.storage.output.store import (
    CHECKPOINT_ADVICE,
    EXPORT_ADVICE,
    HASHES_ADVICE,
    INDEX_ADVICE,
    PAGE_ADVICE,
    PARQUET_ADVICE,
    STAGING,
    OutputStore,
    WriteAdvice,
    parsed,
    translate_write_errors,
)
from dask_image_ingest.storage.output.swap import (
    JOURNAL,
    REPLACEMENT,
    REPLACING,
    refuse_sources,
    refuse_unfinished,
    replacement_of,
    swap,
)
from dask_image_ingest.storage.shard import as_folder, local_path

__all__ = [
    "CHECKPOINT_ADVICE",
    "EXPORT_ADVICE",
    "HASHES_ADVICE",
    "INDEX_ADVICE",
    "JOURNAL",
    "LOCK",
    "PAGE_ADVICE",
    "PARQUET_ADVICE",
    "REPLACEMENT",
    "REPLACING",
    "STAGING",
    "OutputStore",
    "acquire",
    "begin_run",
    "end_run",
    "open_output",
    "parsed",
    "refuse_ended_run",
    "refuse_other_run",
    "refuse_sources",
    "refuse_unfinished",
    "replacement_of",
    "swap",
    "translate_write_errors",
]


def open_output(
    folder: str, advice: WriteAdvice, storage_options: dict[str, Any] | None
) -> OutputStore:
    """The output store at a path or URL, which may end with a slash.

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
    return RemoteStore(as_folder(folder), storage_options, advice)
