"""Headers of encoded images, by format, and checks of their structure. Nothing is decoded.

In: encoded bytes. Out: format, shape, orientation, and whether DALI can safely decode them.
"""

from dask_image_ingest.decode.formats.header import (
    Header,
    has_several_pages,
    is_valid,
    page_shapes,
    read_stored_header,
    too_large,
)
from dask_image_ingest.decode.formats.pillow_image import open_image, pillow_errors
from dask_image_ingest.decode.formats.stored import SWAPPED, BadImage, StoredHeader

__all__ = [
    "SWAPPED",
    "BadImage",
    "Header",
    "StoredHeader",
    "has_several_pages",
    "is_valid",
    "open_image",
    "page_shapes",
    "pillow_errors",
    "read_stored_header",
    "too_large",
]
