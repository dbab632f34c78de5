"""Rows that point to their samples come in; WebDataset shards go out, with the bytes as they were.

A plan is made of pointers alone; then each new shard is one task that copies byte ranges. What a
frame computes is kept as parquet files, a partition each (``checkpoint/``).
"""

from dask_image_ingest.export.checkpoint import checkpoint
from dask_image_ingest.export.command import add_export
from dask_image_ingest.export.jpeg import Encode
from dask_image_ingest.export.reasons import RefusedRowsError
from dask_image_ingest.export.sources import source_options_of
from dask_image_ingest.export.write import to_webdataset
from dask_image_ingest.export.write_index import write_index

__all__ = [
    "Encode",
    "RefusedRowsError",
    "add_export",
    "checkpoint",
    "source_options_of",
    "to_webdataset",
    "write_index",
]
