"""Output folders, on disk and in object stores.

In: a path or URL. Out: a store whose files appear whole, the lock of the run that writes there, and
the swap of a folder for another.
"""

from dask_image_ingest.storage.output.run import (
    JOURNAL,
    LOCK,
    REPLACEMENT,
    REPLACING,
    acquire,
    begin_run,
    end_run,
    refuse_ended_run,
    refuse_other_run,
    refuse_sources,
    refuse_unfinished,
    replacement_of,
    swap,
)
from dask_image_ingest.storage.output.store import (
    CHECKPOINT_ADVICE,
    EXPORT_ADVICE,
    HASHES_ADVICE,
    INDEX_ADVICE,
    PAGE_ADVICE,
    PARQUET_ADVICE,
    STAGING,
    OutputStore,
    open_output,
    parsed,
    translate_write_errors,
)

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
