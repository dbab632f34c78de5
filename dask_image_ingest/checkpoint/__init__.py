"""A frame's results as files: each partition is computed once and read ever after.

In: a frame of a read and the row-wise steps after it. Out: a lazy frame that reads parquet files.
`fingerprint` names a partition's work, `lineage` its part of a shard; `runner` computes what is
missing, `scan` reads what is there, `manifest` says whose the files are.
"""

from dask_image_ingest.checkpoint.checkpoint import checkpoint

__all__ = ["checkpoint"]
