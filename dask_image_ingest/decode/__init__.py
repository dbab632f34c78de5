"""Encoded images to pixels.

In: the bytes of images, what their headers tell, and the options of a read. Out: one flat buffer of
pixels for a partition, with a reason for every image that has none.
"""

from dask_image_ingest.decode.arrays import resize_arrays
from dask_image_ingest.decode.crash import CrashJournal
from dask_image_ingest.decode.decoders import decode_one
from dask_image_ingest.decode.formats import SWAPPED, Stored, measure
from dask_image_ingest.decode.formats.bad_image import printable
from dask_image_ingest.decode.formats.header import (
    LONGEST_EDGE,
    Header,
    header_of,
    read_header,
)
from dask_image_ingest.decode.formats.jpeg_frame import read_jpeg_frame
from dask_image_ingest.decode.images import decode
from dask_image_ingest.decode.options import (
    LARGEST_SIZE,
    MAX_PIXELS,
    Decoding,
    ImageShape,
    make_decoding,
)
from dask_image_ingest.decode.origin import Origin
from dask_image_ingest.decode.pixels import PixelBuffer, Pixels
from dask_image_ingest.decode.resize import ResizedImage
from dask_image_ingest.decode.scaled import require_simplejpeg
from dask_image_ingest.decode.threads import decode_pool, decode_threads

__all__ = [
    "LARGEST_SIZE",
    "LONGEST_EDGE",
    "MAX_PIXELS",
    "SWAPPED",
    "CrashJournal",
    "Decoding",
    "Header",
    "ImageShape",
    "Origin",
    "PixelBuffer",
    "Pixels",
    "ResizedImage",
    "Stored",
    "decode",
    "decode_one",
    "decode_pool",
    "decode_threads",
    "header_of",
    "make_decoding",
    "measure",
    "printable",
    "read_header",
    "read_jpeg_frame",
    "require_simplejpeg",
    "resize_arrays",
]
