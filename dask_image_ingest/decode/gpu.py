"""Settings for decoding on a GPU. Not yet run on one.

They follow the sources of DALI 2.4 and nvImageCodec 0.9: see ``docs/design/gpu.md``.
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

# Limit of a batch's decoded bytes: larger than on a CPU, to keep a GPU busy.
_MAX_BYTES = 2**30

# Limit of a batch as a share of the GPU's memory. DALI holds the pixels of two batches, and of one
# more before its resize; start_cluster leaves it 3/10 of the memory, for these and for its context
# and decoder tables.
_MAX_SHARE = 1 / 24

# Edge of the images in `first_batch`: whole blocks of 4:2:0, large enough for hardware decoders.
_EDGE = 64

# Codes of nvimgcodecStatus_t: 5 and 15 are allocator errors, 21 is a CUDA error.
_FAILURE = re.compile(
    r"CUDA (?:allocation failed|runtime API error|driver API error)|bad_alloc|[Oo]ut of memory"
    r"|[Cc]an't allocate|ALLOCATOR_FAILURE|nvImageCodec failure: '#(?:5|15|21)'"
)
_BAD_IMAGE = "Failed to decode sample #"

_NOTE = (
    "If the GPU is out of memory: DALI allocates its own, outside the pool of the frames. "
    "start_cluster(device_memory_limit=0.5) leaves it more; size= or smaller images need less"
)


def current_device() -> int:
    """CUDA device number of the GPU that this process uses."""
    import cupy

    return int(cupy.cuda.runtime.getDevice())


@functools.cache
def batch_bytes(device: int) -> int:
    """Limit of a batch's decoded bytes, so that it fits beside the memory pool of the frames."""
    import cupy

    with cupy.cuda.Device(device):
        _, total = cupy.cuda.runtime.memGetInfo()
    return min(_MAX_BYTES, int(total * _MAX_SHARE))


def decoder_options(decoding: DecodeSpec) -> dict[str, Any]:
    """Options of DALI's decoder for a GPU."""
    # Otherwise chroma upsampling differs from the CPU's.
    options: dict[str, Any] = {"jpeg_fancy_upsampling": True}
    load = decoding.hw_load
    return options if load is None else options | {"hw_decoder_load": load}


def first_batch(decoding: DecodeSpec, size: int) -> list[np.ndarray]:
    """Tiny JPEGs to prime a new pipeline: ``size``, or as many as fit after their resize.

    The first batch of a decoder fixes how many images of every later batch go to the hardware JPEG
    engines: a share of that first batch (``assigned_batch_size_`` in nvImageCodec's
    ``image_generic_codec.h``). After a first batch of 64 they would be idle for most of each 256.
    """
    nbytes = decoding.nbytes(Header("jpeg", _EDGE, _EDGE, decoding.channels, None, False))
    fit = batch_bytes(current_device()) // nbytes
    file = io.BytesIO()
    Image.new("RGB", (_EDGE, _EDGE)).save(file, "JPEG", subsampling="4:2:0")
    return [np.frombuffer(file.getvalue(), np.uint8)] * min(size, max(1, fit))


def raise_gpu_failure(error: RuntimeError, decoding: DecodeSpec) -> None:
    """Re-raise an error of DALI, with a note, if the GPU failed rather than an image."""
    if decoding.device == "gpu" and is_gpu_failure(str(error)):
        error.add_note(_NOTE)
        raise error


def is_gpu_failure(error: str) -> bool:
    """True if this is the text of an error of the GPU, for which Pillow must not be a fallback."""
    return bool(_FAILURE.search(error)) and _BAD_IMAGE not in error
