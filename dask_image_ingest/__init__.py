"""WebDataset tar shards of images as lazy Dask dataframes, decoded by DALI."""

import dask_image_ingest.accessor  # noqa: F401  registers .images
from dask_image_ingest import curate
from dask_image_ingest.checkpoint import checkpoint
from dask_image_ingest.client import versions
from dask_image_ingest.cluster import (
    dask_setup,  # noqa: F401  called by Dask with --preload dask_image_ingest
    dask_teardown,  # noqa: F401
    prepare_cluster,
    start_cluster,
)
from dask_image_ingest.computing import progress
from dask_image_ingest.dataset import (
    decode_images,
    from_arrow,
    read_images,
    read_parquet_images,
    read_webdataset_images,
)
from dask_image_ingest.dataset.schema import ImageColumn
from dask_image_ingest.decode import (
    AutoAugment,
    ColorJitter,
    RandAugment,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
)
from dask_image_ingest.errors import (
    ArgumentError,
    DaskImageIngestError,
    ExportError,
    FunctionError,
    ImageDecodeError,
    ShardError,
    ShardNotFoundError,
)
from dask_image_ingest.export import Encode, to_parquet_images, to_webdataset
from dask_image_ingest.image_frame import ImageDataFrame
from dask_image_ingest.index import write_index
from dask_image_ingest.loader import mix_batches
from dask_image_ingest.view import gallery

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "AutoAugment",
    "ColorJitter",
    "DaskImageIngestError",
    "Encode",
    "ExportError",
    "FunctionError",
    "ImageColumn",
    "ImageDataFrame",
    "ImageDecodeError",
    "RandAugment",
    "RandomErasing",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "ShardError",
    "ShardNotFoundError",
    "checkpoint",
    "curate",
    "decode_images",
    "from_arrow",
    "gallery",
    "mix_batches",
    "prepare_cluster",
    "progress",
    "read_images",
    "read_parquet_images",
    "read_webdataset_images",
    "start_cluster",
    "to_parquet_images",
    "to_webdataset",
    "versions",
    "write_index",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
