"""Headers of encoded images, by format, and the validity of their structure.

In: encoded bytes. Out: format, shape, orientation, and whether a decoder can be trusted with them;
nothing is decoded.
"""

from dask_image_ingest.decode.formats.exif import SWAPPED
from dask_image_ingest.decode.formats.header import Header, is_valid, measure, too_large
from dask_image_ingest.decode.formats.jpeg import is_baseline_jpeg
from dask_image_ingest.decode.formats.pillow_image import open_image, pillow_errors
from dask_image_ingest.decode.formats.stored import BadImage, Stored, printable

__all__ = [
    "SWAPPED",
    "BadImage",
    "Header",
    "Stored",
    "is_baseline_jpeg",
    "is_valid",
    "measure",
    "open_image",
    "pillow_errors",
    "printable",
    "too_large",
]
