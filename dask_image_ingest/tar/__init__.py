"""A shard's bytes to samples.

In: the bytes of a tar. Out: its members grouped by webdataset's rule, with their places; headers
are read, contents are not.
"""

from dask_image_ingest.tar.gc_paused import collector_at_rest
from dask_image_ingest.tar.samples import (
    LARGEST_VALUE,
    Buffer,
    Sample,
    Scan,
    Span,
    duplicate_error,
    open_member,
    read_member,
    scan,
    too_large_error,
)

__all__ = [
    "LARGEST_VALUE",
    "Buffer",
    "Sample",
    "Scan",
    "Span",
    "collector_at_rest",
    "duplicate_error",
    "open_member",
    "read_member",
    "scan",
    "too_large_error",
]
