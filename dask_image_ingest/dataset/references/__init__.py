"""Late materialization: rows are moved with references to their images, and decoded afterwards.

In: frames with references, or with columns that locate or hold encoded images. Out: the same rows
with pixels and errors, and the optimiser rules that place the decode after shuffles and the like.
"""

from dask_image_ingest.dataset.references.chunks import (
    LastDecode,
    is_augmented,
    known_lengths,
    last_decode,
    persist_moves,
    reads_remote,
    unindexed_remote,
    with_bad_rows,
    with_draw,
)
from dask_image_ingest.dataset.references.decode_node import Decode, image_shape, unfused
from dask_image_ingest.dataset.references.fetch import (
    EncodedAhead,
    decode_partition,
    fetch_encoded,
    field_of,
    reference_rows,
    references_of,
)
from dask_image_ingest.dataset.references.host_moves import rows_on_host
from dask_image_ingest.dataset.references.make_references import (
    LOCATION_COLUMNS,
    add_references,
    adds_references,
    encoded_by,
    location_columns,
    point_to_images,
    references_of_locations,
)
from dask_image_ingest.dataset.references.parts import cuts_boxes
from dask_image_ingest.dataset.references.tiles import CutRows, Edge, make_pages, make_tiles

__all__ = [
    "LOCATION_COLUMNS",
    "CutRows",
    "Decode",
    "Edge",
    "EncodedAhead",
    "LastDecode",
    "add_references",
    "adds_references",
    "cuts_boxes",
    "decode_partition",
    "encoded_by",
    "fetch_encoded",
    "field_of",
    "image_shape",
    "is_augmented",
    "known_lengths",
    "last_decode",
    "location_columns",
    "make_pages",
    "make_tiles",
    "persist_moves",
    "point_to_images",
    "reads_remote",
    "reference_rows",
    "references_of",
    "references_of_locations",
    "rows_on_host",
    "unfused",
    "unindexed_remote",
    "with_bad_rows",
    "with_draw",
]
