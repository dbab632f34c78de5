"""Streams of batches for training.

In: a frame of one or many partitions. Out: batches of arrays or tensors, with a few partitions in
memory at a time, divided among processes, and with a position to resume from.
"""

from dask_image_ingest.loader.batch_format import FORMATS, Format
from dask_image_ingest.loader.iter_batches import Batches
from dask_image_ingest.loader.mix import MixedBatches, mix
from dask_image_ingest.loader.order import Position, parse_shard
from dask_image_ingest.loader.source import LazySource, Source

__all__ = [
    "FORMATS",
    "Batches",
    "Format",
    "LazySource",
    "MixedBatches",
    "Position",
    "Source",
    "mix",
    "parse_shard",
]
