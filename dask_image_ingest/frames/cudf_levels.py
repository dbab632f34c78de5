"""How many pixels have each value, counted on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import cupy
import numpy as np

from dask_image_ingest.frames.backend import Backend
from dask_image_ingest.frames.joined import runs

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
    """How many pixels of each channel have each of the 256 values: int64 (channels, 256).

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
