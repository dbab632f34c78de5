"""Health reports of shards, for the command line.

In: one shard. Out: counts and names of what is bad, damaged or ambiguous in it, as plain data.
"""

from dask_image_ingest.report.check import check_shard, in_total, in_words

__all__ = [
    "check_shard",
    "in_total",
    "in_words",
]
