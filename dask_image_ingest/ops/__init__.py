"""Operations on the images of one partition.

In: a pandas or cuDF frame with a column of images. Out: an array, or the frame with new columns.
Lazy frames run the same functions on each partition.
"""

from dask_image_ingest.ops.encoded_images import encode, encoded_images, small_images
from dask_image_ingest.ops.map_batches import MapBatches, built, make_batch_map
from dask_image_ingest.ops.map_rows import journaled, make_row_map, waits
from dask_image_ingest.ops.stack import (
    add_levels,
    count_levels,
    first_row,
    parse_dtype,
    parse_shape,
    stack,
    statistics,
    vectors,
)

__all__ = [
    "MapBatches",
    "add_levels",
    "built",
    "count_levels",
    "encode",
    "encoded_images",
    "first_row",
    "journaled",
    "make_batch_map",
    "make_row_map",
    "parse_dtype",
    "parse_shape",
    "small_images",
    "stack",
    "statistics",
    "vectors",
    "waits",
]
