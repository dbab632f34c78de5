"""The lazy collection: from paths to a Dask dataframe, its optimiser rules, and its tasks.

In: paths and options. Out: a Dask dataframe, each task of which reads part of a shard. Start
reading at ``scan/task.py``. Each folder shows what other subpackages may use of it.
"""

from dask_image_ingest.dataset import predicates
from dask_image_ingest.dataset.decode_images import Frame, decode_images
from dask_image_ingest.dataset.from_arrow import from_arrow
from dask_image_ingest.dataset.image_files import read_images
from dask_image_ingest.dataset.parquet_images import read_parquet_images
from dask_image_ingest.dataset.read import filter_rows, read_webdataset_images
from dask_image_ingest.dataset.read_files import files_of_rows, files_read, searches_of_frame
from dask_image_ingest.dataset.read_options import ReadOptions

__all__ = [
    "Frame",
    "ReadOptions",
    "decode_images",
    "files_of_rows",
    "files_read",
    "filter_rows",
    "from_arrow",
    "predicates",
    "read_images",
    "read_parquet_images",
    "read_webdataset_images",
    "searches_of_frame",
]
