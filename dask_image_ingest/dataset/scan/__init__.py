"""One task: part of a shard becomes one dataframe.

In: a shard and a `ScanSpec`. Out: metadata and references, or pixels. Start reading at ``task.py``.
"""

from dask_image_ingest.dataset.scan.partitioning import Partition, ShardSplit
from dask_image_ingest.dataset.scan.rows import ColumnDecode, NoPixels
from dask_image_ingest.dataset.scan.samples import SampleRows, scanned_index

__all__ = [
    "ColumnDecode",
    "NoPixels",
    "Partition",
    "SampleRows",
    "ShardSplit",
    "scanned_index",
]
