"""A shard's bytes to samples.

In: the bytes of a tar. Out: its members grouped by webdataset's rule, with their places; headers
are read, contents are not.
"""

from dask_image_ingest.tar.content import (
    HEAD,
    IMAGE_EXTENSIONS,
    INTEGERS,
    LARGEST_VALUE,
    MAX_MEMBER_BYTES,
    TEXTS,
    duplicate_error,
    open_member,
    read_member,
    too_large_error,
)
from dask_image_ingest.tar.garbage_collection import gc_paused
from dask_image_ingest.tar.index import TarIndex, index_head, index_tar
from dask_image_ingest.tar.samples import Sample, Span
from dask_image_ingest.tar.scan import Damage

__all__ = [
    "HEAD",
    "IMAGE_EXTENSIONS",
    "INTEGERS",
    "LARGEST_VALUE",
    "MAX_MEMBER_BYTES",
    "TEXTS",
    "Damage",
    "Sample",
    "Span",
    "TarIndex",
    "duplicate_error",
    "gc_paused",
    "index_head",
    "index_tar",
    "open_member",
    "read_member",
    "too_large_error",
]
