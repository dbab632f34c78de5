"""Reading ahead: never deeper than asked for, in order, and nothing kept that was handed out."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future

import pytest
from small_frames import BACKEND, small_frame

from dask_image_ingest.loader.iter_batches import Batches, portions
from dask_image_ingest.loader.order import Buffer, Order, Position, Shuffle
from dask_image_ingest.loader.source import Source


class Reads(Source):
    """Partitions of three images, and what was done with them."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.frames: list[weakref.ref] = []
        self.open = False
        self.partitions = 9

    def __enter__(self):
        self.open = True
        return self

    def __exit__(self, *_):
        self.open = False

    def read(self, number):
        self.begun.append(number)
        frame = small_frame(range(3 * number, 3 * number + 3))
        self.frames.append(weakref.ref(frame))
        done = Future()
        done.set_result(frame)
        return done


def in_order(source, numbers, depth):
    order = Order(0, (0, 1))
    order.partitions = list(numbers)
    return portions(order, Position(0, 0), source, depth, "image", BACKEND)


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 100])
def test_no_more_than_its_depth_is_read_ahead(depth):
    source = Reads()
    numbers = [4, 2, 9, 0, 7, 1]
    ahead, rows = in_order(source, numbers, depth)
    assert source.begun == []
    ahead.fill()
    seen = []
    for used, portion in enumerate(rows, 1):
        assert len(source.begun) <= max(used, used - 1 + depth)
        seen.append(portion.rows.columns["key"][0] // 3)
        ahead.fill()
        assert len(source.begun) == min(used + depth, len(numbers))
    assert seen == source.begun == numbers


def test_nothing_is_read_until_the_queue_may_be_filled():
    source = Reads()
    ahead, rows = in_order(source, range(9), 2)
    ahead.fill()
    next(rows)
    assert source.begun == [0, 1]


@pytest.mark.parametrize("depth", [0, 2, 5])
def test_it_goes_on_while_a_shuffle_fills_its_buffer(depth):
    source = Reads()
    order = Shuffle(1, 20, (0, 1), Buffer(rows=24))
    _, rows = portions(order, Position(0, 0), source, depth, "image", BACKEND)
    next(rows)
    assert source.begun == order.partitions[: 8 + depth]  # of three images each


@pytest.mark.slow
def test_what_was_handed_out_or_is_no_longer_wanted_is_not_kept():
    source = Reads()
    ahead, rows = in_order(source, range(9), 3)
    ahead.fill()
    portion = next(rows)
    gc.collect()
    assert [frame() is None for frame in source.frames] == [True, False, False]
    assert len(portion.rows) == 3
    ahead.clear()
    gc.collect()
    assert [frame() is None for frame in source.frames] == [True] * 3


def test_a_stream_that_is_left_closes_what_it_reads_from():
    source = Reads()
    meta = small_frame([])
    options = {"batch_size": 2, "format": "numpy", "normalize": None, "drop_last": False}
    options |= {"shuffle": None, "shuffle_buffer": None, "prefetch": 3, "start": 0, "shape": None}
    batches = Batches(source, meta, "image", shard=(0, 1), **options)
    next(batches)
    assert source.open
    batches.close()
    assert not source.open
