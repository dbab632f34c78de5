"""The first batch of a pipeline on a GPU, by which nvImageCodec judges all that follow."""

from __future__ import annotations

import functools
import io

import numpy as np
from PIL import Image

from dask_image_ingest.decode.formats import Header
from dask_image_ingest.decode.options import Decoding

# Height and width: whole blocks of 4:2:0, and none too small for a hardware decoder.
_EDGE = 64


def first_batch(decoding: Decoding, size: int, room: int) -> list[np.ndarray]:
    """Tiny JPEGs, as many as a batch can have: ``size``, or what fits ``room`` once it is resized.

    How many images of each batch the hardware's JPEG engines get at most is settled by the first
    one that a decoder sees, as a share of it (``assigned_batch_size_`` in nvImageCodec's
    ``image_generic_codec.h``): after one of 64 they would idle through most of each 256, after a
    ``head(1)`` through nearly all.
    """
    nbytes = decoding.nbytes(Header("jpeg", _EDGE, _EDGE, decoding.channels, None, False))
    return [tiny_jpeg()] * min(size, max(1, room // nbytes))


@functools.cache
def tiny_jpeg() -> np.ndarray:
    """A small file that any JPEG decoder takes, a hardware one too."""
    file = io.BytesIO()
    Image.new("RGB", (_EDGE, _EDGE)).save(file, "JPEG", subsampling="4:2:0")
    return np.frombuffer(file.getvalue(), np.uint8)
