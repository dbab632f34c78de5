"""Rows that point to their samples come in; WebDataset shards go out, with the bytes as they were.

A plan is made of pointers alone (``plan/``); then each new shard is one task that copies byte
ranges (``write/``).
"""

from dask_image_ingest.export.image_origin import decoded_modes
from dask_image_ingest.export.members import Encode
from dask_image_ingest.export.plan.rejected_rows import RefusedRowsError
from dask_image_ingest.export.query import operation_name, reads_samples, source_options_of
from dask_image_ingest.export.to_parquet_images import to_parquet_images
from dask_image_ingest.export.to_webdataset import to_webdataset

__all__ = [
    "Encode",
    "RefusedRowsError",
    "decoded_modes",
    "operation_name",
    "reads_samples",
    "source_options_of",
    "to_parquet_images",
    "to_webdataset",
]
