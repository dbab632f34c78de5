"""How well the buffer of ``shuffle=`` mixes, what it holds, and that it changes nothing else."""

from __future__ import annotations

import json
import math
import statistics

import numpy as np
import pandas as pd
import pytest
from small_frames import lazy_frame, small_frame

from dask_image_ingest.loader.order import Buffer, Size

SHARDS, ROWS = 24, 100


@pytest.fixture(scope="module")
def ddf():
    """24 partitions of 100 rows; the key of a row tells its partition."""
    return lazy_frame(
        [
            small_frame(range(100)).assign(key=np.arange(n * ROWS, (n + 1) * ROWS))
            for n in range(SHARDS)
        ]
    )


def keys(batches):
    return [int(key) for batch in batches for key in batch["key"]]


def test_the_first_rows_come_from_many_shards(ddf):
    def shards(rows, **options):
        first = next(ddf.images.iter_batches(rows, shuffle=1, **options))["key"]
        return len(set(first // ROWS))

    assert shards(64) >= 12  # of the 16 in the buffer
    assert shards(64, shuffle_buffer=800) >= 7  # of eight
    assert shards(64, shuffle_buffer=100) == 1
    assert shards(64, shuffle_buffer=10**6) >= 20  # of all


def test_any_64_rows_come_from_many_shards(ddf):
    got = keys(ddf.images.iter_batches(64, shuffle=1, shuffle_buffer=800))
    counts = [
        len({key // ROWS for key in got[start : start + 64]}) for start in range(0, len(got), 64)
    ]
    assert min(counts) >= 6
    assert statistics.mean(counts) >= 7


def test_a_buffer_for_all_rows_is_a_full_shuffle(ddf):
    got = np.array(keys(ddf.images.iter_batches(64, shuffle=1, shuffle_buffer=SHARDS * ROWS)))
    assert sorted(got) == list(range(SHARDS * ROWS))
    # Each quarter of the rows comes from all parts of the frame alike: chi-squared, 23 degrees.
    for quarter in np.array_split(got, 4):
        counts = np.bincount(quarter // ROWS, minlength=SHARDS)
        expected = len(quarter) / SHARDS
        assert ((counts - expected) ** 2 / expected).sum() < 60
    assert abs(np.corrcoef(got, np.arange(len(got)))[0, 1]) < 0.08


@pytest.mark.parametrize(
    "buffer",
    [None, 1, 350, *(pytest.param(n, marks=pytest.mark.nightly) for n in (150, 1000, 10**6))],
)
def test_each_image_comes_once_and_positions_go_on(ddf, buffer):
    options = {"shuffle": 3, "shuffle_buffer": buffer}
    batches = ddf.images.iter_batches(130, **options)
    whole, positions = [], []
    for batch in batches:
        whole.append(batch["key"].tolist())
        positions.append(json.loads(json.dumps(batches.position)))
    assert sorted(key for keys in whole for key in keys) == list(range(SHARDS * ROWS))
    for done in (1, 9, len(whole) - 1, len(whole)):
        rest = ddf.images.iter_batches(130, start=positions[done - 1], **options)
        assert [batch["key"].tolist() for batch in rest] == whole[done:], done
    rest = ddf.images.iter_batches(130, start=7, **options)
    assert [batch["key"].tolist() for batch in rest] == whole[7:]


@pytest.mark.parametrize("buffer", [10, 20, "100 B"])
@pytest.mark.parametrize("kind", ["lazy", "in memory"])
def test_positions_go_on_where_some_rows_lack_one_of_two_images(kind, buffer):
    parts, first = [], 0
    for count in (5, 3, 8, 2, 7, 4, 6, 2):
        numbers = range(first, first + count)
        image = small_frame(numbers, bad=[n for n in numbers if n % 7 == 3])
        mask = small_frame(numbers, bad=[n for n in numbers if n % 3 == 0])
        parts.append(image.assign(mask=mask["image"]))
        first += count
    frame = lazy_frame(parts) if kind == "lazy" else pd.concat(parts, ignore_index=True)
    options = {"shuffle": 3, "shuffle_buffer": buffer, "columns": ["key", "mask"]}
    batches = frame.images.iter_batches(4, **options)
    whole, positions = [], []
    for batch in batches:
        whole.append(batch["key"].tolist())
        positions.append(batches.position)
    complete = [number for number in range(first) if number % 3 and number % 7 != 3]
    assert sorted(key for keys in whole for key in keys) == complete
    for done, position in enumerate(positions, 1):
        rest = frame.images.iter_batches(4, start=position, **options)
        assert [batch["key"].tolist() for batch in rest] == whole[done:], done


def test_the_order_does_not_depend_on_batches_and_reading_ahead(ddf):
    options = {"shuffle": 3, "shuffle_buffer": 500}
    one = keys(ddf.images.iter_batches(7, prefetch=0, **options))
    assert one == keys(ddf.images.iter_batches(100, prefetch=5, **options))
    assert one != keys(ddf.images.iter_batches(7, **options | {"shuffle_buffer": 300}))


def test_ranks_have_each_image_once_together(ddf):
    got = [
        key
        for rank in range(3)
        for key in keys(ddf.images.iter_batches(9, shuffle=3, shuffle_buffer=350, shard=(rank, 3)))
    ]
    assert sorted(got) == list(range(SHARDS * ROWS))


def test_no_more_is_read_than_fills_the_buffer(ddf):
    read = []

    def seen(frame):
        read.append(int(frame["key"].iloc[0]) // ROWS)
        return frame

    counted = ddf.map_partitions(seen, meta=ddf._meta)
    options = {"shuffle": 1, "shuffle_buffer": 350, "prefetch": 0}
    batches = counted.images.iter_batches(64, **options)
    next(batches)
    batches.close()
    assert len(read) == math.ceil(350 / ROWS)
    # To go on, partitions of the buffer are read, and as many before.
    batches = counted.images.iter_batches(64, **options)
    for _ in range(15):
        next(batches)
    read.clear()
    next(counted.images.iter_batches(64, start=batches.position, **options))
    assert len(read) <= 2 * math.ceil(350 / ROWS)


def test_the_default_is_bounded_by_bytes_and_by_partitions():
    def mixed(nbytes):
        sizes = []
        while not Buffer().is_full(sizes):
            sizes.append(Size(1, nbytes))
        return len(sizes)

    assert [mixed(nbytes) for nbytes in (0, 2**20, 2**27, 2**29, 2**30, 2**40)] == [
        16, 16, 8, 2, 2, 2,
    ]  # fmt: skip
