"""The lazy collection: what a query asks of the shards, and how one partition is made.

In: paths and options, then the rewrites of dask's optimiser. Out: a dask dataframe, and for each
task the dataframe of one part of one shard. ``partition.py`` is where to begin reading.
"""

from dask_image_ingest.dataset.adds_columns import AddsColumns
from dask_image_ingest.dataset.aligned import RowSource, row_sources
from dask_image_ingest.dataset.datasets import KeepsResults, datasets_of, shard_of_partition
from dask_image_ingest.dataset.decode_images import decode_frame, decode_images
from dask_image_ingest.dataset.decode_rows import NoPixels
from dask_image_ingest.dataset.every_row import EveryRow
from dask_image_ingest.dataset.expr import Dataset, ReadWebDataset
from dask_image_ingest.dataset.filters import (
    MIRRORED,
    NEGATED,
    Filters,
    Predicate,
    both,
    either,
)
from dask_image_ingest.dataset.image_sources import image_sources, value_sources
from dask_image_ingest.dataset.late.by_piece import ByPiece
from dask_image_ingest.dataset.late.in_read import SHAPE_IN_NAME
from dask_image_ingest.dataset.late.node import Decode, PointersToReferences
from dask_image_ingest.dataset.late.pieces import move_rows_now
from dask_image_ingest.dataset.late.pointers import POINTER, references_of_pointers
from dask_image_ingest.dataset.late.resolve import fetch_encoded
from dask_image_ingest.dataset.metadata import SampleRows
from dask_image_ingest.dataset.options import ReadOptions
from dask_image_ingest.dataset.read import read_webdataset_images
from dask_image_ingest.dataset.schema import image_member, parse_image_extensions
from dask_image_ingest.dataset.settled import is_settled
from dask_image_ingest.dataset.sidecar_schema import with_sidecars
from dask_image_ingest.dataset.sources.image_files import ReadImageFiles
from dask_image_ingest.dataset.sources.read_images import read_images
from dask_image_ingest.dataset.sources.read_parquet_images import read_parquet_images
from dask_image_ingest.dataset.walked import take_walked
from dask_image_ingest.dataset.warning import warn_user

__all__ = [
    "MIRRORED",
    "NEGATED",
    "POINTER",
    "SHAPE_IN_NAME",
    "AddsColumns",
    "ByPiece",
    "Dataset",
    "Decode",
    "EveryRow",
    "Filters",
    "KeepsResults",
    "NoPixels",
    "PointersToReferences",
    "Predicate",
    "ReadImageFiles",
    "ReadOptions",
    "ReadWebDataset",
    "RowSource",
    "SampleRows",
    "both",
    "datasets_of",
    "decode_frame",
    "decode_images",
    "either",
    "fetch_encoded",
    "image_member",
    "image_sources",
    "is_settled",
    "move_rows_now",
    "parse_image_extensions",
    "read_images",
    "read_parquet_images",
    "read_webdataset_images",
    "references_of_pointers",
    "row_sources",
    "shard_of_partition",
    "take_walked",
    "value_sources",
    "warn_user",
    "with_sidecars",
]
