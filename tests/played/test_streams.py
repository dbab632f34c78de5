"""What streams may do in any order, when the work of each is done as late as CUDA allows."""

import cupy
import numpy as np
import pytest
from simulated.decoder import Images
from simulated.streams import prompt

from dask_image_ingest.decode.dali import tensor_list
from dask_image_ingest.frames.cudf.pixels import DevicePixels

NULL = cupy.cuda.Stream.null


def batches():
    random = np.random.default_rng(0)
    return [[random.integers(0, 256, (9, 8 + n, 3), np.uint8) for n in range(m)] for m in (7, 5, 9)]


WANT = np.concatenate([image.reshape(-1) for batch in batches() for image in batch])


def of_dali(batch):
    """Images on the GPU, whose memory DALI takes back with their last reference."""
    return Images(tensor_list(batch))


@pytest.mark.parametrize("images", [of_dali, list, lambda batch: [*of_dali(batch)]])
@pytest.mark.parametrize("predicted", [0, len(WANT), 2 * len(WANT)])
def test_pixels_are_copied_before_their_memory_is_used_again(images, predicted):
    """Freed memory of frames is written to at once: the default stream is idle."""
    buffer = DevicePixels(predicted)
    with prompt(NULL):
        for batch in batches():
            buffer.append(images(batch))
        pixels = buffer.finish()
    np.testing.assert_array_equal(pixels.get(), WANT)


def test_memory_that_the_default_stream_still_uses_is_written_to_later():
    freed = cupy.zeros(len(WANT), cupy.uint8)
    freed += 1
    address = freed.data.ptr
    del freed
    assert not NULL.done
    buffer = DevicePixels(len(WANT))
    assert buffer.finish()[:0].size == 0
    for batch in batches():
        buffer.append(of_dali(batch))
    pixels = buffer.finish()
    assert pixels.data.ptr == address
    np.testing.assert_array_equal(pixels.get(), WANT)


def test_copies_do_not_wait_for_the_default_stream():
    buffer = DevicePixels(len(WANT))
    cupy.zeros(3)[:] = 1
    for batch in batches():
        buffer.append(of_dali(batch))
        buffer.append([np.zeros((0, 0, 3), np.uint8)])
        assert not NULL.done
