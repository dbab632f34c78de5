"""Pixels in GPU memory: the buffer that DALI's images are copied to, and histograms."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import cupy
import numpy as np

from dask_image_ingest.decode import as_bytes
from dask_image_ingest.errors import PartitionTooLargeError
from dask_image_ingest.frames.backend import Backend
from dask_image_ingest.frames.pandas_backend import flat_views
from dask_image_ingest.typedefs import ImageBatch, TensorList

#: Most bytes of pixels in one partition: the offsets of a cuDF list column are int32.
LARGEST_PARTITION = 2**31 - 1


_NOTE = (
    "No room for {:,.0f} MB of pixels in the GPU memory of the frames. Smaller partitions need "
    "less, partition_size='256 MiB', as do smaller images, size=. More of the GPU for the frames: "
    "start_cluster(device_memory_limit=0.8). What is persisted stays there: persist less, or "
    "checkpoint() it to files"
)


def check_pixels(nbytes: int) -> None:
    """Raise if a column can't hold that many bytes."""
    if nbytes > LARGEST_PARTITION:
        raise PartitionTooLargeError(
            f"the images of a partition take {nbytes / 1e9:.1f} GB, more than estimated from "
            "their headers, and a cuDF list column holds at most 2.1 GB of pixels. Pass "
            "partition_size='512 MiB' to split shards into smaller partitions, or repartition"
        )


class DevicePixels:
    """`PixelBuffer` in GPU memory.

    It is filled on its own stream, so as not to wait for other work on the default stream, such as
    the kernels of a training step.
    """

    def __init__(self, nbytes: int) -> None:
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._flat = self._allocated(nbytes)
        self._end = 0

    def append(self, images: ImageBatch) -> None:
        """Append a batch: a DALI tensor list, or a list of NumPy arrays or DALI tensors."""
        try:
            self._queue(images)
        finally:
            # Wait for the copies while the caller holds DALI's images: the JPEG engines of an H100
            # write at once, without waiting for their stream (torchcodec#1634), so DALI must not
            # reuse memory that a copy has yet to read.
            self._wait()

    def finish(self) -> cupy.ndarray:
        """All bytes as one array."""
        if self._end < len(self._flat) * 3 // 4:
            # Many images could not be decoded: return their memory to the pool.
            self._move(self._end)
        return self._flat[: self._end]

    def _queue(self, images: ImageBatch) -> None:
        if not isinstance(images, list):
            self._copy(images, sum(math.prod(shape) for shape in images.shape()))
            return
        for image in images:
            if isinstance(image, np.ndarray):
                array = as_bytes(image)
                self._reserve(array.size).set(array, stream=self._stream)
            else:
                self._copy(image, math.prod(image.shape()))

    def _copy(self, images: TensorList, nbytes: int) -> None:
        out = self._reserve(nbytes)
        if nbytes:
            # A kernel copies many small images in one launch.
            images.copy_to_external(
                ctypes.c_void_p(out.data.ptr),
                cuda_stream=ctypes.c_void_p(self._stream.ptr),
                non_blocking=True,
                use_copy_kernel=True,
            )

    def _reserve(self, nbytes: int) -> cupy.ndarray:
        start, self._end = self._end, self._end + nbytes
        check_pixels(self._end)
        if self._end > len(self._flat):
            self._move(start, max(self._end, len(self._flat) * 3 // 2))
        return self._flat[start : self._end]

    def _move(self, used: int, size: int | None = None) -> None:
        """Copy the first ``used`` bytes to a new buffer, by default of just that size."""
        moved = self._allocated(used if size is None else size)
        moved.data.copy_from_device_async(self._flat.data, used, self._stream)
        # Wait before the old memory returns to the pool, which does not track this stream.
        self._wait()
        self._flat = moved

    def _wait(self) -> None:
        # With CuPy, which releases the GIL; DALI would hold it.
        self._stream.synchronize()

    def _allocated(self, nbytes: int) -> cupy.ndarray:
        """Allocate memory that this buffer's stream may write to."""
        try:
            flat = cupy.empty(nbytes, cupy.uint8)
        except MemoryError as error:
            error.add_note(_NOTE.format(nbytes / 1e6))
            raise
        # The pool's memory is ordered by the current stream, where pending work may still use it.
        ready = cupy.cuda.Event(disable_timing=True)
        self._stream.wait_event(cupy.cuda.get_current_stream().record(ready))
        return flat


# Each block counts in its own shared memory, as atomics on 768 counters in global memory would
# serialize all threads.
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
_MAX_BLOCKS = 1024

_count_levels = cupy.RawKernel(SOURCE, "count_levels")


def count_levels(images: Sequence[cupy.ndarray], backend: Backend) -> np.ndarray:
    """Number of pixels by channel and value: int64 (channels, 256).

    All images have the same number of channels. Adjacent images, as in a partition, are counted in
    one launch.
    """
    channels = images[0].shape[2]
    counts = cupy.zeros((channels, 256), cupy.uint64)
    for run in flat_views(images, backend):
        blocks = min(_MAX_BLOCKS, -(-run.size // _THREADS))
        arguments = (run, cupy.int64(run.size), cupy.int32(channels), counts)
        _count_levels((blocks,), (_THREADS,), arguments, shared_mem=channels * 256 * 4)
    return counts.get().astype(np.int64)
