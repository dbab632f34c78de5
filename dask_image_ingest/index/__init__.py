"""Indexes of shards, so that metadata is read without opening them.

In: shards and the index files beside them. Out: a shard's samples, the shapes of its images and
its small members. A stale or damaged index is not used.
"""

from dask_image_ingest.index.discovery import (
    IndexFile,
    find_indexes,
    open_stored,
    parse_index,
    way_out,
)
from dask_image_ingest.index.index_file import IndexedReader, StoredIndex, UnusableIndexError
from dask_image_ingest.index.write_index import write_index

__all__ = [
    "IndexFile",
    "IndexedReader",
    "StoredIndex",
    "UnusableIndexError",
    "find_indexes",
    "open_stored",
    "parse_index",
    "way_out",
    "write_index",
]
