"""Rows that point to their samples come in; WebDataset shards go out, with the bytes as they were.

A plan is made of pointers alone; then each new shard is one task that copies byte ranges.
"""

from dask_image_ingest.export.command import add_export
from dask_image_ingest.export.write import to_webdataset

__all__ = [
    "add_export",
    "to_webdataset",
]
