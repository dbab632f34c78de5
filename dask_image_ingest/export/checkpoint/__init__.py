"""A frame's partitions are computed once, kept as parquet files, and read back ever after.

``work.py`` says what a partition is known by, ``origin.py`` of which shard it is made; ``store.py``
computes what is missing, ``stored.py`` reads what is there, ``record.py`` says whose it is.
"""

from dask_image_ingest.export.checkpoint.checkpoint import checkpoint
from dask_image_ingest.export.checkpoint.stored import ReadStored, Stored

__all__ = ["ReadStored", "Stored", "checkpoint"]
