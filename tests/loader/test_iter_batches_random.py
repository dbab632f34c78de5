"""``iter_batches`` against a plain list: shuffles, shards, starts and failures at random."""

from __future__ import annotations

import gc
import json
from collections import Counter

import pytest
from small_frames import lazy_frame, small_frame

import dask_image_ingest as dii

pytestmark = pytest.mark.slow


def random_partitions(rng):
    """Up to six partitions of up to seven rows, some of them without rows, or without images."""
    partitions, keys = [], iter(range(100))
    for _ in range(rng.randint(1, 6)):
        rows = [next(keys) for _ in range(rng.choice([0, 0, 1, 2, 3, 5, 7]))]
        share = rng.choice([0, 0.3, 1])
        partitions.append((rows, {key for key in rows if rng.random() < share}))
    return partitions


def frames(partitions):
    return [small_frame(rows, bad=bad) for rows, bad in partitions]


def keys(batches):
    got = []
    for batch in batches:
        assert [int(image.flat[0]) for image in batch["image"]] == batch["key"].tolist()
        got.append(batch["key"].tolist())
    return got


def batched(rows, size, drop_last):
    whole = [rows[start : start + size] for start in range(0, len(rows), size)]
    return whole[:-1] if drop_last and whole and len(whole[-1]) < size else whole


@pytest.mark.rounds(5, nightly=200)
def test_each_image_comes_once_whoever_iterates_and_wherever_they_go_on(rng):
    partitions = random_partitions(rng)
    ddf = lazy_frame(frames(partitions))
    good = [[key for key in rows if key not in bad] for rows, bad in partitions]
    size, world = rng.randint(1, 9), rng.randint(1, 4)
    shuffle = rng.choice([None, rng.randint(0, 5)])
    buffer = None if shuffle is None else rng.choice([None, 1, 2, 4, 8, 100])
    drop_last, prefetch = rng.random() < 0.3, rng.choice([None, 0, 1, 3])
    options = {"shuffle": shuffle, "drop_last": drop_last, "prefetch": prefetch}
    options["shuffle_buffer"] = buffer

    seen = Counter()
    for rank in range(world):
        mine = {"shard": (rank, world) if world > 1 else None, **options}
        with_warnings(ddf, size, mine, partitions)
        whole = keys(iterate(ddf, size, mine))
        assert all(len(batch) == size for batch in whole[:-1])
        seen.update(key for batch in whole for key in batch)
        if shuffle is None:
            rows = [key for part in good[rank::world] for key in part]
            assert whole == batched(rows, size, drop_last)
        elif not drop_last and buffer is not None:
            check_buffer([key for batch in whole for key in batch], good, buffer)
        check_going_on(ddf, size, mine, whole, rng)
    every = Counter(key for part in good for key in part)
    assert seen <= every
    if not drop_last:
        assert seen == every
    else:
        assert sum((every - seen).values()) < size * world


def iterate(ddf, size, options, **more):
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "iter_batches: .* processes share")
        return ddf.images.iter_batches(size, **options, **more)


def with_warnings(ddf, size, options, partitions):
    """A process that gets nothing is told so."""
    rank, world = options["shard"] or (0, 1)
    if rank >= len(partitions):
        with pytest.warns(UserWarning, match=f"{world} processes share {len(partitions)} part"):
            ddf.images.iter_batches(size, **options)


def check_buffer(rows, good, buffer):
    """Of no more partitions than fill the buffer, rows are given and others still to come."""
    place = {key: number for number, part in enumerate(good) for key in part}
    spans = {}
    for index, key in enumerate(rows):
        first, _ = spans.get(place[key], (index, index))
        spans[place[key]] = (first, index)
    for index in range(len(rows)):
        open_ = [number for number, (first, last) in spans.items() if first <= index < last]
        # Without the one that has begun last, and the largest, they don't fill it.
        sizes = sorted(len(good[number]) for number in open_)
        assert sum(sizes[:-1]) < buffer + max(map(len, good))


def check_going_on(ddf, size, options, whole, rng):
    """From every number of batches and from every position the rest is exactly the rest."""
    batches = iterate(ddf, size, options)
    positions = [batches.position]
    positions += [json.loads(json.dumps(batches.position)) for _ in batches]
    assert len(positions) == len(whole) + 1
    for done, position in enumerate(positions):
        assert keys(iterate(ddf, size, options, start=position)) == whole[done:]
    done = rng.randint(0, len(whole))
    rest = iterate(ddf, size, options, start=done)
    if rng.random() < 0.5:
        assert keys(iterate(ddf, size, options, start=rest.position)) == whole[done:]
    assert keys(rest) == whole[done:]
    assert keys(iterate(ddf, size, options, start=len(whole) + rng.randint(1, 5))) == []


@pytest.mark.rounds(5, nightly=100)
def test_after_a_failure_or_a_break_the_position_is_where_to_go_on(rng):
    parts = frames(random_partitions(rng))
    sound = lazy_frame(parts)
    options = {"shuffle": rng.choice([None, 3]), "prefetch": rng.choice([0, 1, 2])}
    if options["shuffle"] is not None:
        options["shuffle_buffer"] = rng.choice([None, 1, 5, 50])
    size = rng.randint(1, 5)
    whole = keys(sound.images.iter_batches(size, **options))
    failing = lazy_frame(parts, fails={rng.randrange(len(parts))})
    batches, done = failing.images.iter_batches(size, **options), []
    with pytest.raises(OSError, match="can't be read"):
        done.extend(batch["key"].tolist() for batch in batches)
    assert next(batches, None) is None
    rest = sound.images.iter_batches(size, **options, start=batches.position)
    assert done + keys(rest) == whole

    batches = sound.images.iter_batches(size, **options)
    stop = rng.randint(0, len(whole))
    done = [keys([next(batches)])[0] for _ in range(stop)]
    position = batches.position
    if rng.random() < 0.5:
        batches.close()
        assert next(batches, None) is None
        assert batches.position == position
    del batches
    gc.collect()
    assert done + keys(sound.images.iter_batches(size, **options, start=position)) == whole


def test_positions_of_other_iterations_are_refused():
    ddf = lazy_frame([small_frame(range(3)), small_frame(range(3, 5))])
    for start in ([2, 1], [3, 0], [-1, 0], [0, -1], [0], [0, 1, 2], [0.0, 1], "00", None, -1, True):
        with pytest.raises(dii.ArgumentError, match="start="):
            ddf.images.iter_batches(2, start=start)
    assert list(ddf.images.iter_batches(2, start=(2, 0))) == []
    assert list(ddf.images.iter_batches(2, start=(2, 0), shuffle=1)) == []
    with pytest.raises(dii.ArgumentError, match="has 3 rows"):
        next(ddf.images.iter_batches(2, start=(0, 4)))
