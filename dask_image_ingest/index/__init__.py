"""Indexes of shards, which spare opening them.

In: shards and the index files beside them. Out: a shard's samples, the headers of its images and
its small members. An index that is stale or broken is not used.
"""

from dask_image_ingest.index.find import (
    IndexFile,
    find_indexes,
    index_place,
    parse_index,
    refuse_unindexed,
)
from dask_image_ingest.index.known_bytes import KnownBytes
from dask_image_ingest.index.read import open_stored, unknown_version
from dask_image_ingest.index.stored import FIELDS, StoredIndex, UnusableIndexError
from dask_image_ingest.index.table import shard_table
from dask_image_ingest.index.wds2idx import wds2idx_text

__all__ = [
    "FIELDS",
    "IndexFile",
    "KnownBytes",
    "StoredIndex",
    "UnusableIndexError",
    "find_indexes",
    "index_place",
    "open_stored",
    "parse_index",
    "refuse_unindexed",
    "shard_table",
    "unknown_version",
    "wds2idx_text",
]
