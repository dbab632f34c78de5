"""Rules for decoding on a GPU, beside those for a CPU; none of it has run on one yet.

The rules are read off the sources of DALI 2.4 and nvImageCodec 0.9: see ``docs/design/gpu.md``.
"""

from __future__ import annotations

import functools
import io
import re
from typing import Any

import numpy as np
from PIL import Image

from dask_image_ingest.decode.formats import Header
from dask_image_ingest.decode.options import DecodeSpec

# Decoded bytes of a batch at most: a GPU wants more work at once than a CPU.
_MOST_BYTES = 2**30

# Of a GPU's memory. DALI has the pixels of two batches, and of one more before they are resized;
# start_cluster leaves it three tenths of the memory, the context and the decoders' tables included.
_SHARE = 1 / 24

# Height and width: whole blocks of 4:2:0, and none too small for a hardware decoder.
_EDGE = 64

# 5 and 15 are states of nvImageCodec's allocator, 21 is one of CUDA (nvimgcodecStatus_t).
_FAILURE = re.compile(
    r"CUDA (?:allocation failed|runtime API error|driver API error)|bad_alloc|[Oo]ut of memory"
    r"|[Cc]an't allocate|ALLOCATOR_FAILURE|nvImageCodec failure: '#(?:5|15|21)'"
)
_BAD_IMAGE = "Failed to decode sample #"

_NOTE = (
    "Where it is memory that is missing: DALI takes its own beside that of the frames. "
    "start_cluster(device_memory_limit=0.5) leaves it more, and size= or smaller images ask for "
    "less"
)


def current_device() -> int:
    """The number of the GPU that this process works on, as CUDA counts those it may see."""
    import cupy

    return int(cupy.cuda.runtime.getDevice())


@functools.cache
def batch_bytes(device: int) -> int:
    """Decoded bytes that a batch may hold, so that DALI has room for it beside a pool of frames."""
    import cupy

    with cupy.cuda.Device(device):
        _, total = cupy.cuda.runtime.memGetInfo()
    return min(_MOST_BYTES, int(total * _SHARE))


def decoder_options(decoding: DecodeSpec) -> dict[str, Any]:
    """Options of DALI's decoder that a CPU has none of."""
    # Without it the GPU's chroma upsampling is not the CPU's.
    options: dict[str, Any] = {"jpeg_fancy_upsampling": True}
    load = decoding.hw_load
    return options if load is None else options | {"hw_decoder_load": load}


def first_batch(decoding: DecodeSpec, size: int) -> list[np.ndarray]:
    """Tiny JPEGs for a new pipeline: ``size``, or as many as fit once they are resized.

    How many images of each batch the hardware's JPEG engines get at most is settled by the first
    one that a decoder sees, as a share of it (``assigned_batch_size_`` in nvImageCodec's
    ``image_generic_codec.h``): after one of 64 they would idle through most of each 256.
    """
    nbytes = decoding.nbytes(Header("jpeg", _EDGE, _EDGE, decoding.channels, None, False))
    fitting = batch_bytes(current_device()) // nbytes
    file = io.BytesIO()
    Image.new("RGB", (_EDGE, _EDGE)).save(file, "JPEG", subsampling="4:2:0")
    return [np.frombuffer(file.getvalue(), np.uint8)] * min(size, max(1, fitting))


def raise_gpu_failure(error: RuntimeError, decoding: DecodeSpec) -> None:
    """Raise an error of DALI that is the GPU's own, for which no image is to blame."""
    if decoding.device == "gpu" and is_gpu_failure(str(error)):
        error.add_note(_NOTE)
        raise error


def is_gpu_failure(error: str) -> bool:
    """True for the text of an error of the GPU, which no other decoder should make up for."""
    return bool(_FAILURE.search(error)) and _BAD_IMAGE not in error
