"""Where shards are, and their bytes.

In: paths, globs, braces and URLs. Out: a list of shards with sizes and versions, and for each
of them its bytes as one buffer, decompressed.
"""

from dask_image_ingest.storage.open import Buffer, FileSystem, file_system
from dask_image_ingest.storage.paths import Shard, find_shards, open_shard
from dask_image_ingest.storage.url import local_path

__all__ = [
    "Buffer",
    "FileSystem",
    "Shard",
    "file_system",
    "find_shards",
    "local_path",
    "open_shard",
]
