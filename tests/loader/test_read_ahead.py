"""Reading ahead: never deeper than asked for, in order, and nothing kept that was handed out."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future

import pytest
from small_frames import BACKEND, small_frame

from dask_image_ingest.loader.iter_batches import ReadAhead, portions
from dask_image_ingest.loader.order import Buffer, Position, Shuffle
from dask_image_ingest.loader.source import Source


class Reads(Source):
    """Partitions of three images, and what was done with them."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.frames: list[weakref.ref] = []
        self.open = False

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


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 100])
def test_no_more_than_its_depth_is_read_ahead(depth):
    source = Reads()
    order = [4, 2, 9, 0, 7, 1]
    ahead = ReadAhead(source, order, depth)
    assert source.begun == []
    seen = []
    for used, rows in enumerate(ahead.partitions("image", BACKEND), 1):
        assert len(source.begun) <= max(used, used - 1 + depth)
        seen.append(rows.columns["key"][0] // 3)
        ahead.fill()
        assert len(source.begun) == min(used + depth, len(order))
    assert seen == source.begun == order


def test_nothing_is_read_until_the_queue_may_be_filled():
    source = Reads()
    partitions = ReadAhead(source, range(9), 2).partitions("image", BACKEND)
    next(partitions)
    assert source.begun == [0, 1]


@pytest.mark.parametrize("depth", [0, 2, 5])
def test_it_goes_on_while_a_shuffle_fills_its_buffer(depth):
    source = Reads()
    order = Shuffle(1, 20, (0, 1), Buffer(rows=24))
    ahead = ReadAhead(source, order.partitions, depth)
    partitions = ahead.partitions("image", BACKEND)
    next(portions(order, Position(0, 0), partitions, {}, ahead.fill, BACKEND))
    assert source.begun == order.partitions[: 8 + depth]  # of three images each


@pytest.mark.slow
def test_what_was_handed_out_or_is_no_longer_wanted_is_not_kept():
    source = Reads()
    partitions = ReadAhead(source, range(9), 3).partitions("image", BACKEND)
    rows = next(partitions)
    assert source.open
    gc.collect()
    assert [frame() is None for frame in source.frames] == [True, False, False]
    assert len(rows) == 3
    partitions.close()
    gc.collect()
    assert [frame() is None for frame in source.frames] == [True] * 3
    assert not source.open
