"""Operations on the images of one partition.

In: a pandas or cuDF frame with a column of images. Out: an array, or the frame with new columns.
Lazy frames run the same functions on each partition.
"""

from dask_image_ingest.ops.encoded_images import encode, encoded_images, small_images
from dask_image_ingest.ops.inputs import InputColumn
from dask_image_ingest.ops.map_batches import (
    BatchMap,
    MapBatches,
    apply_batch_map,
    call_once,
    make_batch_map,
    unwrapped,
)
from dask_image_ingest.ops.map_rows import (
    Ending,
    RowJournal,
    journal_owner,
    journaled,
    make_row_map,
    refuse_late_failures,
)
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
    "BatchMap",
    "Ending",
    "InputColumn",
    "MapBatches",
    "RowJournal",
    "add_levels",
    "apply_batch_map",
    "call_once",
    "count_levels",
    "encode",
    "encoded_images",
    "first_row",
    "journal_owner",
    "journaled",
    "make_batch_map",
    "make_row_map",
    "parse_dtype",
    "parse_shape",
    "refuse_late_failures",
    "small_images",
    "stack",
    "statistics",
    "unwrapped",
    "vectors",
]
