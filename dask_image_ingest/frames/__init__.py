"""Dataframes with a column of images, on pandas and on cuDF.

In: a table of metadata and decoded pixels. Out: a dataframe of the backend, and arrays over its
columns. A backend is a file of this room, and no other room imports cuDF.
"""

from dask_image_ingest.frames.accessors import register_accessor
from dask_image_ingest.frames.backend import Backend, BackendName, NewColumn
from dask_image_ingest.frames.choose import backend_of, choose_backend, get_backend
from dask_image_ingest.frames.cudf_types import bytes_of
from dask_image_ingest.frames.gpus import gpus
from dask_image_ingest.frames.image_type import IMAGE
from dask_image_ingest.frames.joined import joined
from dask_image_ingest.frames.pandas import encoded_memory, pandas_type
from dask_image_ingest.frames.pixel_memory import LEAST_SHARED, pixel_memory
from dask_image_ingest.frames.reference_type import (
    REFERENCE,
    ImageReference,
    as_references,
    reference_array,
)
from dask_image_ingest.frames.shared_memory import map_block, this_machine
from dask_image_ingest.frames.stored_frame import index_columns
from dask_image_ingest.frames.type_names import is_list, is_text, parse_type
from dask_image_ingest.frames.workers import is_fork

__all__ = [
    "IMAGE",
    "LEAST_SHARED",
    "REFERENCE",
    "Backend",
    "BackendName",
    "ImageReference",
    "NewColumn",
    "as_references",
    "backend_of",
    "bytes_of",
    "choose_backend",
    "encoded_memory",
    "get_backend",
    "gpus",
    "index_columns",
    "is_fork",
    "is_list",
    "is_text",
    "joined",
    "map_block",
    "pandas_type",
    "parse_type",
    "pixel_memory",
    "reference_array",
    "register_accessor",
    "this_machine",
]
