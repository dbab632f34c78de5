"""What decoding on a GPU has to know: which one it is, what fits it, and when its memory is out."""

from __future__ import annotations

import functools
import re

# Decoded bytes of a batch at most: a GPU wants more work at once than a CPU.
_MOST_BYTES = 2**30

# Of a GPU's memory. DALI has the pixels of two batches, and of one more before they are resized;
# start_cluster leaves it three tenths of the memory, the context and the decoders' tables included.
_SHARE = 1 / 24

# Above it, DALI quotes the code that made the pipeline, and with it the path of this package.
_ABOVE_THE_MESSAGE = "\nencountered:\n"

# Where in DALI's sources it happened, and the libraries on the stack: paths too.
_PATHS = re.compile(r"\[/[^\]\n]*\]|^Stacktrace.*|^\[frame \d+\].*", re.MULTILINE)

# A bad image is told by its number, or by one of nvImageCodec's states. 5 and 15 are those of its
# allocator, 21 is one of CUDA (nvimgcodecStatus_t).
_FAILURE = re.compile(
    r"CUDA|bad_alloc|out of memory|can't allocate|ALLOCATOR_FAILURE"
    r"|nvImageCodec failure: '#(5|15|21)'",
    re.IGNORECASE,
)
_BAD_IMAGE = re.compile(r"Failed to decode sample #\d+")

#: What to do where DALI finds no memory.
ROOM_FOR_DALI = (
    "Where it is memory that is missing: DALI takes its own beside that of the frames. "
    "start_cluster(device_memory_limit=0.5) leaves it more, and size= or smaller images ask for "
    "less"
)


def is_gpu_failure(error: str) -> bool:
    """Whether DALI's error is the GPU's own trouble, which no other decoder should make up for."""
    message = _PATHS.sub("", error.rpartition(_ABOVE_THE_MESSAGE)[2])
    return bool(_FAILURE.search(message)) and not _BAD_IMAGE.search(message)


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
