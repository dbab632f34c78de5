"""The columns of a collection: their names and types, and the conversion of members to values.

In: the first shard and its sidecar. Out: a `Schema`, and Arrow arrays.
"""

from dask_image_ingest.dataset.schema.columns import (
    EDGES,
    HEADERS,
    METADATA_COLUMNS,
    PLACE,
    ImageColumn,
    ImageMember,
    image_field,
    image_member,
    parse_image_extensions,
    part_columns,
    region_field,
)

__all__ = [
    "EDGES",
    "HEADERS",
    "METADATA_COLUMNS",
    "PLACE",
    "ImageColumn",
    "ImageMember",
    "image_field",
    "image_member",
    "parse_image_extensions",
    "part_columns",
    "region_field",
]
