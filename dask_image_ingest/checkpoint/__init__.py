"""Checkpoints: a frame's partitions, computed once and stored as parquet files.

In: a frame of a read and row-wise steps after it. Out: a lazy frame that reads the files.
`query` identifies the query and the shards of each partition, `checkpoint` computes missing
partitions, `stored_frame` reads stored ones.
"""

from dask_image_ingest.checkpoint.checkpoint import checkpoint

__all__ = ["checkpoint"]
