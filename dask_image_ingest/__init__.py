"""WebDataset tar shards of images as lazy Dask dataframes, decoded by DALI."""

import dask_image_ingest.accessor.lazy
import dask_image_ingest.frames.image_dtype  # registers the dtype "image"
from dask_image_ingest.cluster.local import start_cluster
from dask_image_ingest.dataset.decode_images import decode_images
from dask_image_ingest.dataset.read import read_webdataset_images
from dask_image_ingest.errors import (
    ArgumentError,
    DaskImageIngestError,
    ExportError,
    ImageDecodeError,
    MissingDependencyError,
    PartitionTooLargeError,
    ShardError,
    ShardNotFoundError,
)
from dask_image_ingest.export import to_webdataset
from dask_image_ingest.view.gallery import gallery

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "DaskImageIngestError",
    "ExportError",
    "ImageDecodeError",
    "MissingDependencyError",
    "PartitionTooLargeError",
    "ShardError",
    "ShardNotFoundError",
    "decode_images",
    "gallery",
    "read_webdataset_images",
    "start_cluster",
    "to_webdataset",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
