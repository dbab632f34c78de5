"""Dataframes with a column of images, on pandas and on cuDF.

In: an Arrow table of metadata, and decoded pixels. Out: a dataframe of the backend, and arrays over
its columns. No other subpackage imports cuDF.
"""

from dask_image_ingest.frames.arrow_types import (
    NullsError,
    as_lists,
    bytes_of,
    has_type,
    is_any_list,
    is_byte_list,
    is_bytes,
    is_list,
    is_number,
    is_text,
    is_value,
    list_array,
    list_sizes,
    nesting,
    parse_type,
    row_values,
    tensor_type,
    type_name,
)
from dask_image_ingest.frames.backend import (
    Backend,
    BackendName,
    NewColumn,
    gpus,
    register_accessor,
)
from dask_image_ingest.frames.choose import (
    backend_of,
    choose_backend,
    converted,
    get_backend,
    image_column,
    image_columns,
    reference_columns,
    without,
)
from dask_image_ingest.frames.image_dtype import IMAGE, DecodedImage, as_uint8
from dask_image_ingest.frames.nested_dtype import as_tensors, one_chunk, tensor_array
from dask_image_ingest.frames.pandas_backend import (
    encoded_memory,
    index_columns,
    pandas_type,
    stack_views,
)
from dask_image_ingest.frames.pixel_pool import (
    MIN_SHARED_BYTES,
    map_block,
    pixel_memory,
    this_machine,
)
from dask_image_ingest.frames.reference_dtype import (
    REFERENCE,
    ImageReference,
    as_references,
    holds_references,
    references_of_fields,
    with_urls,
)

__all__ = [
    "IMAGE",
    "MIN_SHARED_BYTES",
    "REFERENCE",
    "Backend",
    "BackendName",
    "DecodedImage",
    "ImageReference",
    "NewColumn",
    "NullsError",
    "as_lists",
    "as_references",
    "as_tensors",
    "as_uint8",
    "backend_of",
    "bytes_of",
    "choose_backend",
    "converted",
    "encoded_memory",
    "get_backend",
    "gpus",
    "has_type",
    "holds_references",
    "image_column",
    "image_columns",
    "index_columns",
    "is_any_list",
    "is_byte_list",
    "is_bytes",
    "is_list",
    "is_number",
    "is_text",
    "is_value",
    "list_array",
    "list_sizes",
    "map_block",
    "nesting",
    "one_chunk",
    "pandas_type",
    "parse_type",
    "pixel_memory",
    "reference_columns",
    "references_of_fields",
    "register_accessor",
    "row_values",
    "stack_views",
    "tensor_array",
    "tensor_type",
    "this_machine",
    "type_name",
    "with_urls",
    "without",
]
