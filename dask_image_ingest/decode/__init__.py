"""Decode images.

In: the bytes of images, their headers, and decode options. Out: one flat buffer of pixels for a
partition, with an error for every image that can't be decoded.
"""

from dask_image_ingest.decode.augment import (
    Augment,
    AutoAugment,
    ColorJitter,
    RandAugment,
    RandomErasing,
    RandomHorizontalFlip,
)
from dask_image_ingest.decode.buffers import (
    VALUE_TYPES,
    EncodedImages,
    Origin,
    PixelBuffer,
    Pixels,
    as_bytes,
    from_bytes,
    pixels_of,
)
from dask_image_ingest.decode.dali import decode_pool, decode_threads, import_decoders
from dask_image_ingest.decode.decode import decode
from dask_image_ingest.decode.decode_spec import (
    LARGEST_SIZE,
    MAX_PIXELS,
    DecodeSpec,
    ImageShape,
    Mode,
    Outside,
    Resize,
    make_decode_spec,
)
from dask_image_ingest.decode.formats import (
    SWAPPED,
    BadImage,
    StoredHeader,
    has_several_pages,
    page_shapes,
    read_stored_header,
)
from dask_image_ingest.decode.formats.header import (
    LONGEST_EDGE,
    Header,
    header_of,
    too_large,
)
from dask_image_ingest.decode.formats.jpeg import is_baseline_jpeg
from dask_image_ingest.decode.formats.stored import printable
from dask_image_ingest.decode.formats.tiff import OpenTiff, is_tiff
from dask_image_ingest.decode.placement import Placement, Placements
from dask_image_ingest.decode.planner import decode_one, resize_arrays
from dask_image_ingest.decode.random_crop import RandomResizedCrop
from dask_image_ingest.decode.region import Part, Region
from dask_image_ingest.decode.resize import Interpolation, ResizedImage, resized_cubic

__all__ = [
    "LARGEST_SIZE",
    "LONGEST_EDGE",
    "MAX_PIXELS",
    "SWAPPED",
    "VALUE_TYPES",
    "Augment",
    "AutoAugment",
    "BadImage",
    "ColorJitter",
    "DecodeSpec",
    "EncodedImages",
    "Header",
    "ImageShape",
    "Interpolation",
    "Mode",
    "OpenTiff",
    "Origin",
    "Outside",
    "Part",
    "PixelBuffer",
    "Pixels",
    "Placement",
    "Placements",
    "RandAugment",
    "RandomErasing",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "Region",
    "Resize",
    "ResizedImage",
    "StoredHeader",
    "as_bytes",
    "decode",
    "decode_one",
    "decode_pool",
    "decode_threads",
    "from_bytes",
    "has_several_pages",
    "header_of",
    "import_decoders",
    "is_baseline_jpeg",
    "is_tiff",
    "make_decode_spec",
    "page_shapes",
    "pixels_of",
    "printable",
    "read_stored_header",
    "resize_arrays",
    "resized_cubic",
    "too_large",
]
