"""Operations on the images of one partition.

In: a pandas or cuDF frame with a column of images. Out: an array, or the frame with new columns.
Lazy frames run the same functions on each partition.
"""

from dask_image_ingest.ops.batch_function import call_once, unwrapped
from dask_image_ingest.ops.images import (
    ENCODED_FORMATS,
    add_levels,
    encode,
    encoded_images,
    first_row,
    level_histograms,
    parse_dtype,
    parse_shape,
    small_images,
    stack,
    statistics,
    vectors,
)
from dask_image_ingest.ops.map_batches import (
    BatchMap,
    InputColumn,
    MapBatches,
    apply_batch_map,
    make_batch_map,
)
from dask_image_ingest.ops.map_rows import make_row_map
from dask_image_ingest.ops.row_journal import journal_owner, journaled

__all__ = [
    "ENCODED_FORMATS",
    "BatchMap",
    "InputColumn",
    "MapBatches",
    "add_levels",
    "apply_batch_map",
    "call_once",
    "encode",
    "encoded_images",
    "first_row",
    "journal_owner",
    "journaled",
    "level_histograms",
    "make_batch_map",
    "make_row_map",
    "parse_dtype",
    "parse_shape",
    "small_images",
    "stack",
    "statistics",
    "unwrapped",
    "vectors",
]
