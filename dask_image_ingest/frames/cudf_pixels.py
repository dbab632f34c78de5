"""The pixels of a cuDF partition: one flat buffer in GPU memory, filled by DALI."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import cupy
import numpy as np

from dask_image_ingest.errors import PartitionTooLargeError

#: The most bytes of pixels in one partition: the offsets of a cuDF list column are int32.
LARGEST_PARTITION = 2**31 - 1


def check_pixels(nbytes: int) -> None:
    """Refuse what no column can hold.

    Raises
    ------
    PartitionTooLargeError
    """
    if nbytes > LARGEST_PARTITION:
        raise PartitionTooLargeError(
            f"the images of a partition take {nbytes / 1e9:.1f} GB, more than their headers "
            "foretold, and a cuDF list column holds at most 2.1 GB of pixels. Pass "
            "partition_size='512 MiB' to split shards into smaller partitions, or repartition"
        )


class DevicePixels:
    """A flat buffer of pixels in GPU memory."""

    def __init__(self, nbytes: int) -> None:
        self._flat = cupy.empty(nbytes, cupy.uint8)
        self._end = 0
        # Memory from a pool is free on the stream that asked for it, and on no other: DALI has to
        # copy on this one.
        self._stream = cupy.cuda.get_current_stream()

    def append(self, images: Any) -> None:
        """Take a batch: a DALI tensor list whole, or a list of NumPy arrays or DALI tensors."""
        if not isinstance(images, list):
            self._copy(images, sum(math.prod(shape) for shape in images.shape()))
            return
        for image in images:
            if isinstance(image, np.ndarray):
                self._room(image.size).set(np.ascontiguousarray(image).reshape(-1))
            else:
                self._copy(image, math.prod(image.shape()))

    def finish(self) -> cupy.ndarray:
        """The bytes taken."""
        flat = self._flat[: self._end]
        if len(flat) < len(self._flat) * 3 // 4:
            # Many images could not be decoded: what was reserved for them goes back to the pool.
            flat = flat.copy()
        # pylibcudf wraps memory without waiting for whoever still writes to it.
        self._stream.synchronize()
        return flat

    def _copy(self, images: Any, nbytes: int) -> None:
        room = self._room(nbytes)
        if nbytes:
            # The host waits for the copy. Else DALI would have its stream wait, and take the memory
            # back at once; but the JPEG engines of an H100 write when they are called, whatever
            # their stream still waits for (torchcodec#1634). A kernel copies a batch of many small
            # images in one launch.
            images.copy_to_external(
                ctypes.c_void_p(room.data.ptr),
                cuda_stream=ctypes.c_void_p(self._stream.ptr),
                non_blocking=False,
                use_copy_kernel=True,
            )

    def _room(self, nbytes: int) -> cupy.ndarray:
        start, self._end = self._end, self._end + nbytes
        check_pixels(self._end)
        if self._end > len(self._flat):
            grown = cupy.empty(max(self._end, len(self._flat) * 3 // 2), cupy.uint8)
            grown[:start] = self._flat[:start]
            self._flat = grown
        return self._flat[start : self._end]
