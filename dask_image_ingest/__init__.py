"""WebDataset tar shards of images as lazy Dask dataframes, decoded by DALI."""

import dask_image_ingest.accessor  # noqa: F401  registers .images
from dask_image_ingest.cluster import start_cluster
from dask_image_ingest.dataset import decode_images, read_webdataset_images
from dask_image_ingest.errors import (
    ArgumentError,
    DaskImageIngestError,
    ExportError,
    FunctionError,
    ImageDecodeError,
    MissingDependencyError,
    OperandError,
    PartitionTooLargeError,
    ShardError,
    ShardNotFoundError,
)
from dask_image_ingest.export import Encode, checkpoint, to_webdataset, write_index
from dask_image_ingest.view import gallery

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "DaskImageIngestError",
    "Encode",
    "ExportError",
    "FunctionError",
    "ImageDecodeError",
    "MissingDependencyError",
    "OperandError",
    "PartitionTooLargeError",
    "ShardError",
    "ShardNotFoundError",
    "checkpoint",
    "decode_images",
    "gallery",
    "read_webdataset_images",
    "start_cluster",
    "to_webdataset",
    "write_index",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
