"""Pixels in GPU memory: the buffer that DALI's images are copied to, and counts of levels."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from dask_image_ingest.decode import as_bytes
from dask_image_ingest.errors import PartitionTooLargeError
from dask_image_ingest.frames.backend import Backend
from dask_image_ingest.frames.pandas_backend import runs

#: The most bytes of pixels in one partition: the offsets of a cuDF list column are int32.
LARGEST_PARTITION = 2**31 - 1


def check_pixels(nbytes: int) -> None:
    """Refuse what no column can hold."""
    if nbytes > LARGEST_PARTITION:
        raise PartitionTooLargeError(
            f"the images of a partition take {nbytes / 1e9:.1f} GB, more than their headers "
            "foretold, and a cuDF list column holds at most 2.1 GB of pixels. Pass "
            "partition_size='512 MiB' to split shards into smaller partitions, or repartition"
        )


class DevicePixels:
    """A flat buffer of pixels in GPU memory.

    It is filled on a stream of its own: whatever else is queued on the default stream by then, such
    as the kernels of a training step, is not waited for.
    """

    def __init__(self, nbytes: int) -> None:
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._flat = self._allocated(nbytes)
        self._end = 0

    def append(self, images: Any) -> None:
        """Take a batch: a DALI tensor list whole, or a list of NumPy arrays or DALI tensors."""
        try:
            self._queue(images)
        finally:
            # DALI's images live until here, as the caller's: the JPEG engines of an H100 write when
            # they are called, whatever their stream still waits for (torchcodec#1634), so memory
            # that a copy has yet to read must not go back to DALI.
            self._wait()

    def finish(self) -> cupy.ndarray:
        """The bytes taken."""
        if self._end < len(self._flat) * 3 // 4:
            # Many images could not be decoded: what was reserved for them goes back to the pool.
            self._move(self._end)
        return self._flat[: self._end]

    def _queue(self, images: Any) -> None:
        if not isinstance(images, list):
            self._copy(images, sum(math.prod(shape) for shape in images.shape()))
            return
        for image in images:
            if isinstance(image, np.ndarray):
                array = as_bytes(image)
                self._room(array.size).set(array, stream=self._stream)
            else:
                self._copy(image, math.prod(image.shape()))

    def _copy(self, images: Any, nbytes: int) -> None:
        room = self._room(nbytes)
        if nbytes:
            # A kernel copies a batch of many small images in one launch.
            images.copy_to_external(
                ctypes.c_void_p(room.data.ptr),
                cuda_stream=ctypes.c_void_p(self._stream.ptr),
                non_blocking=True,
                use_copy_kernel=True,
            )

    def _room(self, nbytes: int) -> cupy.ndarray:
        start, self._end = self._end, self._end + nbytes
        check_pixels(self._end)
        if self._end > len(self._flat):
            self._move(start, max(self._end, len(self._flat) * 3 // 2))
        return self._flat[start : self._end]

    def _move(self, taken: int, size: int | None = None) -> None:
        """Copy the bytes taken to a buffer of another size, by default of theirs."""
        moved = self._allocated(taken if size is None else size)
        moved.data.copy_from_device_async(self._flat.data, taken, self._stream)
        # The old memory goes back to the pool, which does not know of this stream.
        self._wait()
        self._flat = moved

    def _wait(self) -> None:
        # By CuPy, which lets other threads run: DALI would wait with the GIL.
        self._stream.synchronize()

    def _allocated(self, nbytes: int) -> cupy.ndarray:
        """Memory that this buffer's own stream may write to."""
        flat = cupy.empty(nbytes, cupy.uint8)
        # A pool's memory is free on the stream that asked for it: work queued there may still use
        # what was there before.
        ready = cupy.cuda.Event(disable_timing=True)
        self._stream.wait_event(cupy.cuda.get_current_stream().record(ready))
        return flat


# Each block counts in its own shared memory: all threads of a card would wait for the same 768
# counters of global memory.
SOURCE = """
extern "C" __global__ void count_levels(
    const unsigned char* values, long long size, int channels, unsigned long long* counts
) {
    extern __shared__ unsigned int own[];
    for (int k = threadIdx.x; k < channels * 256; k += blockDim.x) own[k] = 0;
    __syncthreads();
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < size; i += step)
        atomicAdd(&own[i % channels * 256 + values[i]], 1u);
    __syncthreads();
    for (int k = threadIdx.x; k < channels * 256; k += blockDim.x)
        if (own[k]) atomicAdd(&counts[k], (unsigned long long)own[k]);
}
"""

_THREADS = 256
_MOST_BLOCKS = 1024

_count_levels = cupy.RawKernel(SOURCE, "count_levels")


def count_levels(images: Sequence[cupy.ndarray], backend: Backend) -> np.ndarray:
    """Number of pixels by channel and value: int64 (channels, 256).

    All images are of as many channels. Those that lie side by side, as in a partition, are counted
    in one launch, and the host waits once.
    """
    channels = images[0].shape[2]
    counts = cupy.zeros((channels, 256), cupy.uint64)
    for run in runs(images, backend):
        blocks = min(_MOST_BLOCKS, -(-run.size // _THREADS))
        arguments = (run, cupy.int64(run.size), cupy.int32(channels), counts)
        _count_levels((blocks,), (_THREADS,), arguments, shared_mem=channels * 256 * 4)
    return counts.get().astype(np.int64)
