"""Pixels come out of DALI's memory whole, whatever else the GPU has to do meanwhile."""

import numpy as np
import played_card
import pytest


@pytest.fixture
def card():
    return played_card.Card()


@pytest.fixture
def module(card, monkeypatch):
    return played_card.loaded("dask_image_ingest.frames.cudf.pixels", monkeypatch, card)


def pictures(count, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (4 + n % 3, 5, 3), np.uint8) for n in range(count)]


def flat(arrays):
    return np.concatenate([array.reshape(-1) for array in arrays])


def read_later(card, pixels):
    """What a column holds once all work of the card is done."""
    for stream in card.streams.values():
        stream.synchronize()
    return pixels.host


def test_pixels_are_those_of_the_images_though_dali_takes_its_memory_back(card, module):
    arrays = pictures(9)
    buffer = module.DevicePixels(flat(arrays).size)
    for start in range(0, 9, 3):
        buffer.append(card.images(arrays[start : start + 3]))  # which go when this returns
    np.testing.assert_array_equal(read_later(card, buffer.finish()), flat(arrays))


def test_images_of_several_decoders_come_in_their_order(card, module):
    arrays = pictures(6)
    decoded = card.images(arrays[:4])
    turned = arrays[5].transpose(1, 0, 2)  # not contiguous
    buffer = module.DevicePixels(flat(arrays).size)
    buffer.append([decoded[0], decoded[2], arrays[4], turned, decoded[3]])
    del decoded
    expected = [arrays[0], arrays[2], arrays[4], turned, arrays[3]]
    np.testing.assert_array_equal(read_later(card, buffer.finish()), flat(expected))


@pytest.mark.parametrize("estimate", [0, 1, 500])
def test_more_pixels_than_were_estimated_are_taken(card, module, estimate):
    arrays = pictures(12)
    buffer = module.DevicePixels(estimate)
    for array in arrays:
        buffer.append(card.images([array]))
    np.testing.assert_array_equal(read_later(card, buffer.finish()), flat(arrays))


def test_what_was_reserved_for_bad_images_goes_back(card, module):
    arrays = pictures(2)
    buffer = module.DevicePixels(10_000)
    buffer.append(card.images(arrays))
    made = buffer.finish()
    np.testing.assert_array_equal(read_later(card, made), flat(arrays))
    assert made.host.base is None or made.host.base.size == flat(arrays).size


def test_a_training_step_on_the_default_stream_is_not_waited_for(card, module):
    """Else decoding and training would take turns: DALI would wait with the GIL in its hands."""
    steps = []
    arrays = pictures(2)
    buffer = module.DevicePixels(2 * flat(arrays).size)
    card.null.queue(lambda: steps.append("queued while a partition is decoded"))
    buffer.append(card.images(arrays))
    buffer.append([arrays[0], card.images(arrays)[1]])
    buffer.finish()
    assert steps == []
    assert card.null not in card.waited_for
    assert card.waits_with_the_gil == 0


def test_an_interrupt_leaves_no_copy_behind_that_reads_what_is_gone(card, module):
    class Stopped:
        def shape(self):
            raise KeyboardInterrupt

    (array,) = pictures(1)
    buffer = module.DevicePixels(array.size)
    with pytest.raises(KeyboardInterrupt):
        buffer.append([card.images([array])[0], Stopped()])
    np.testing.assert_array_equal(read_later(card, buffer.finish()), array.reshape(-1))


def test_more_than_a_column_holds_is_refused(card, module):
    class Huge:
        def shape(self):
            return [(2**15, 2**15, 3)]

    with pytest.raises(MemoryError, match="partition_size"):
        module.DevicePixels(0).append(Huge())
