"""Tar parsing: from a shard's bytes to samples.

In: the bytes of a tar. Out: its members grouped by webdataset's rule, with offsets and sizes.
Headers are read, contents are not.
"""

from dask_image_ingest.tar.index import (
    FIELDS,
    HEAD,
    IMAGE_EXTENSIONS,
    INTEGERS,
    LARGEST_VALUE,
    LINKS,
    MAX_MEMBER_BYTES,
    META_NAME,
    SPAN_FIELDS,
    TEXTS,
    Places,
    Sample,
    ShardIndex,
    Span,
    duplicate_error,
    index_head,
    index_tar,
    open_member,
    read_member,
    too_large_error,
)
from dask_image_ingest.tar.scan import BLOCK, Damage, Skipped, SparseMember, plain_name

__all__ = [
    "BLOCK",
    "FIELDS",
    "HEAD",
    "IMAGE_EXTENSIONS",
    "INTEGERS",
    "LARGEST_VALUE",
    "LINKS",
    "MAX_MEMBER_BYTES",
    "META_NAME",
    "SPAN_FIELDS",
    "TEXTS",
    "Damage",
    "Places",
    "Sample",
    "ShardIndex",
    "Skipped",
    "Span",
    "SparseMember",
    "duplicate_error",
    "index_head",
    "index_tar",
    "open_member",
    "plain_name",
    "read_member",
    "too_large_error",
]
