"""Listing of shards, and readers of their bytes.

In: paths, globs, braces and URLs. Out: a list of shards with sizes and versions, and the
decompressed bytes of each.
"""

from dask_image_ingest.storage.beside import by_folder, find_beside, names_beside, names_in
from dask_image_ingest.storage.fetch import merge, request_all
from dask_image_ingest.storage.fsspec_files import Listings, exists_remote
from dask_image_ingest.storage.listing import (
    common_root,
    find_shards,
    folders_in,
    natural_order,
    searches_of,
)
from dask_image_ingest.storage.open import open_file, open_late, open_shard
from dask_image_ingest.storage.parquet_file import (
    NotParquetError,
    ParquetSource,
    RowSpan,
    open_parquet,
)
from dask_image_ingest.storage.patterns import (
    COMBINED_INDEX,
    INDEX_SUFFIX,
    PARQUET,
    FileKind,
    Search,
)
from dask_image_ingest.storage.reader import (
    ByteReader,
    LazyBytes,
    MemoryReader,
    Range,
    ReaderFile,
    as_reader,
)
from dask_image_ingest.storage.shard import (
    Shard,
    as_folder,
    folder_of,
    has_random_access,
    inside,
    is_pipe,
    is_web,
    local_path,
    shard_name,
    takes_files,
    without_query,
)
from dask_image_ingest.storage.signatures import SIGNATURE_BYTES, describe_bytes, image_format
from dask_image_ingest.storage.streams import decompressed, with_pipes_allowed

__all__ = [
    "COMBINED_INDEX",
    "INDEX_SUFFIX",
    "PARQUET",
    "SIGNATURE_BYTES",
    "ByteReader",
    "FileKind",
    "LazyBytes",
    "Listings",
    "MemoryReader",
    "NotParquetError",
    "ParquetSource",
    "Range",
    "ReaderFile",
    "RowSpan",
    "Search",
    "Shard",
    "as_folder",
    "as_reader",
    "by_folder",
    "common_root",
    "decompressed",
    "describe_bytes",
    "exists_remote",
    "find_beside",
    "find_shards",
    "folder_of",
    "folders_in",
    "has_random_access",
    "image_format",
    "inside",
    "is_pipe",
    "is_web",
    "local_path",
    "merge",
    "names_beside",
    "names_in",
    "natural_order",
    "open_file",
    "open_late",
    "open_parquet",
    "open_shard",
    "request_all",
    "searches_of",
    "shard_name",
    "takes_files",
    "with_pipes_allowed",
    "without_query",
]
