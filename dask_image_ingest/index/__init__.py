"""What is known of shards that nobody has to open.

In: shards, and files beside them that say what they hold: our own, and those of other tools.
Out: a shard's samples and what its images' headers tell, or where its members are. What is stale
or incomplete is not believed.
"""

from dask_image_ingest.index.find import (
    IndexFile,
    find_indexes,
    index_place,
    parse_index,
    refuse_unindexed,
)
from dask_image_ingest.index.foreign import index_by_members
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
    "index_by_members",
    "index_place",
    "open_stored",
    "parse_index",
    "refuse_unindexed",
    "shard_table",
    "unknown_version",
    "wds2idx_text",
]
