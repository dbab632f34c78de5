"""Reading ahead: never deeper than asked for, in order, and nothing kept that was handed out."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future

import numpy as np
import pytest
from small_frames import small_frame

from dask_image_ingest.loader import Batches, Schedule
from dask_image_ingest.loader.position import Share
from dask_image_ingest.loader.source import FrameSource


class Reads(FrameSource):
    """Partitions of three images, and what was done with them."""

    def __init__(self) -> None:
        super().__init__(small_frame([]), "image")
        self.begun: list[int] = []
        self.frames: list[weakref.ref] = []
        self.open = False
        self.partitions = 9

    def counts(self):
        return np.full(9, 3)

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


def batches_of(source, depth, **options):
    return Batches(
        [source],
        batch_size=3,
        format="numpy",
        normalize=None,
        channels_first=False,
        schedule=Schedule(**options),
        drop_last=False,
        prefetch=depth,
        start=0,
        share=Share(),
    )


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 100])
def test_no_more_than_its_depth_is_read_ahead(depth):
    source = Reads()
    batches = batches_of(source, depth)
    assert source.begun == []
    for used, batch in enumerate(batches, 1):
        assert batch["key"].tolist() == [3 * used - 3, 3 * used - 2, 3 * used - 1]
        assert len(source.begun) <= min(max(used, used - 1 + depth), 9)
    assert source.begun == list(range(9))


@pytest.mark.parametrize("depth", [0, 2])
def test_a_shuffle_reads_each_partition_once(depth):
    source = Reads()
    batches = batches_of(source, depth, shuffle=1)
    assert sorted(key for batch in batches for key in batch["key"].tolist()) == list(range(27))
    assert sorted(source.begun) == list(range(9))


@pytest.mark.slow
def test_what_was_handed_out_or_is_no_longer_wanted_is_not_kept():
    source = Reads()
    batches = batches_of(source, 3)
    batch = next(batches)
    next(batches)
    assert len(batch["key"]) == 3
    del batch
    gc.collect()
    assert source.frames[0]() is None
    batches.close()
    gc.collect()
    assert [frame() for frame in source.frames] == [None] * len(source.frames)


def test_a_stream_that_is_left_closes_what_it_reads_from():
    source = Reads()
    batches = batches_of(source, 3)
    next(batches)
    assert source.open
    batches.close()
    assert not source.open
