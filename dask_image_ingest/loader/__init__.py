"""Streams of batches for training.

In: a frame of one or many partitions. Out: batches of arrays or tensors, a few of them in memory at
a time, in an order that depends on the rows, the seed and the epoch, divided among processes, and
with a position to resume from.
"""

from dask_image_ingest.loader.batch_format import FORMATS, Format, as_pandas
from dask_image_ingest.loader.buckets import make_buckets
from dask_image_ingest.loader.iter_batches import Batches, FrameRows, Schedule
from dask_image_ingest.loader.mix_batches import mix_batches
from dask_image_ingest.loader.order import Position, parse_shard
from dask_image_ingest.loader.sample import make_sample
from dask_image_ingest.loader.source import Facts, Source, computed_column, lazy_source, once

__all__ = [
    "FORMATS",
    "Batches",
    "Facts",
    "Format",
    "FrameRows",
    "Position",
    "Schedule",
    "Source",
    "as_pandas",
    "computed_column",
    "lazy_source",
    "make_buckets",
    "make_sample",
    "mix_batches",
    "once",
    "parse_shard",
]
