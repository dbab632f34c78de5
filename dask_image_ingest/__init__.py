"""WebDataset tar shards of images as lazy Dask dataframes, decoded by DALI."""

import dask_image_ingest.frames.image_dtype  # registers the dtype "image"
import dask_image_ingest.lazy_images  # noqa: F401  registers the .images accessors
from dask_image_ingest.cluster import start_cluster
from dask_image_ingest.errors import (
    ArgumentError,
    DaskImageIngestError,
    FunctionError,
    ImageDecodeError,
    MissingDependencyError,
    PartitionTooLargeError,
    ShardError,
    ShardNotFoundError,
)
from dask_image_ingest.gallery import gallery
from dask_image_ingest.late_decode import decode_images
from dask_image_ingest.read import read_webdataset_images

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "DaskImageIngestError",
    "FunctionError",
    "ImageDecodeError",
    "MissingDependencyError",
    "PartitionTooLargeError",
    "ShardError",
    "ShardNotFoundError",
    "decode_images",
    "gallery",
    "read_webdataset_images",
    "start_cluster",
]
