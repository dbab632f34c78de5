"""Encoded images to pixels.

In: the bytes of images, what their headers tell, and the options of a read. Out: one flat buffer of
pixels for a partition, with a reason for every image that has none.
"""

from dask_image_ingest.decode.images import decode
from dask_image_ingest.decode.options import Decoding
from dask_image_ingest.decode.origin import Origin
from dask_image_ingest.decode.pixels import PixelBuffer, Pixels

__all__ = ["Decoding", "Origin", "PixelBuffer", "Pixels", "decode"]
