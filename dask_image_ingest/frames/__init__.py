"""Dataframes with a column of images, on pandas and on cuDF.

In: a table of metadata and decoded pixels. Out: a dataframe of the backend, and arrays over its
columns. A backend is a file of this room; nobody else asks which one it is.
"""

from dask_image_ingest.frames.accessors import attach_accessors, register_accessor
from dask_image_ingest.frames.backend import Backend, BackendName, NewColumn
from dask_image_ingest.frames.choose import backend_of, choose_backend, get_backend
from dask_image_ingest.frames.gpus import gpus, require_gpu

__all__ = [
    "Backend",
    "BackendName",
    "NewColumn",
    "attach_accessors",
    "backend_of",
    "choose_backend",
    "get_backend",
    "gpus",
    "register_accessor",
    "require_gpu",
]
