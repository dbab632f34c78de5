"""Streams of batches for training.

In: a frame of one or many partitions. Out: batches of arrays or tensors, a few of them in memory at
a time, in an order that depends on the rows, the seed and the epoch, divided among processes, and
with a position to resume from.
"""

from dask_image_ingest.loader.batch_format import FORMATS, Format
from dask_image_ingest.loader.iter_batches import Batches, Schedule, make_batches
from dask_image_ingest.loader.mix_batches import mix_batches
from dask_image_ingest.loader.position import Position, parse_shard
from dask_image_ingest.loader.sampling import parse_buckets, parse_sampling

__all__ = [
    "FORMATS",
    "Batches",
    "Format",
    "Position",
    "Schedule",
    "make_batches",
    "mix_batches",
    "parse_buckets",
    "parse_sampling",
    "parse_shard",
]
