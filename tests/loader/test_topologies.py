"""The order of an epoch is one for all ranks and workers, against a simulation in plain Python."""

from __future__ import annotations

import functools
import io
import itertools
import json
import re
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from small_frames import lazy_frame, small_frame
from tars import tar
from topologies import STEP, TOPOLOGIES, expected_steps, rows_of, steps_of

import dask_image_ingest as dii

pytestmark = pytest.mark.slow


def random_parts(rng):
    """Up to 240 rows in partitions of unequal size, some without rows, some without images."""
    keys, parts = iter(range(240)), []
    for _ in range(rng.randint(1, 7)):
        rows = list(itertools.islice(keys, rng.choice([0, 0, 1, 3, 20, 34, 50])))
        share = rng.choice([0, 0, 0.2, 1])
        parts.append((rows, {key for key in rows if rng.random() < share}))
    return parts


def lazy(parts, tmp_path):
    return lazy_frame([small_frame(rows, bad=bad) for rows, bad in parts])


def in_memory(parts, tmp_path):
    return pd.concat([small_frame(rows, bad=bad) for rows, bad in parts], ignore_index=True)


def filtered(parts, tmp_path):
    """Each second row is filtered away."""
    doubled = [[row for key in rows for row in (key, key)] for rows, _ in parts]
    frames = [
        small_frame(rows, bad=bad).assign(second=[0, 1] * (len(rows) // 2))
        for rows, (_, bad) in zip(doubled, parts, strict=True)
    ]
    frame = lazy_frame(frames)
    return frame[frame.second == 0]


def decoded(parts, tmp_path):
    """Shards whose images are decoded last."""
    for number, (rows, bad) in enumerate(parts):
        files = {"note.txt": b""}
        for key in rows:
            files[f"{key:03d}.png"] = b"none" if key in bad else picture(key)
            files[f"{key:03d}.cls"] = str(key).encode()
        (tmp_path / f"{number:02d}.tar").write_bytes(tar(files))
    read = dii.read_webdataset_images(tmp_path, backend="pandas")
    if "cls" not in read.columns:  # no shard has a sample
        return lazy(parts, tmp_path)
    return read[["image", "cls"]].rename(columns={"cls": "key"})


def with_a_column_of_a_function(parts, tmp_path):
    return decoded(parts, tmp_path).images.map_batches(
        lambda images: images.mean((1, 2, 3)), {"mean": "float32"}, keep_image=True
    )


def persisted(parts, tmp_path):
    return decoded(parts, tmp_path).persist()


def without_images(parts, tmp_path):
    return lazy(parts, tmp_path)[["key"]]


KINDS = [
    lazy,
    in_memory,
    filtered,
    decoded,
    with_a_column_of_a_function,
    persisted,
    without_images,
]


@functools.cache
def picture(value):
    file = io.BytesIO()
    Image.new("RGB", (2, 2), (value, value, value)).save(file, "PNG")
    return file.getvalue()


class Case:
    """A random frame, and options of its epochs."""

    def __init__(self, kind, rng, tmp_path):
        parts = random_parts(rng)
        self.counts = [len(rows) for rows, _ in parts]
        self.keys = [key for rows, _ in parts for key in rows]
        self.bad = set() if kind is without_images else {key for _, bad in parts for key in bad}
        self.frame = kind(parts, tmp_path)
        self.seed = rng.choice([None, rng.randint(0, 5)])
        self.epoch = rng.randint(0, 2)

    def make(self, batch_size, **options):
        options = {"shuffle": self.seed, "epoch": self.epoch} | options
        return self.frame.images.iter_batches(batch_size, columns=["key"], **options)

    def order(self, epoch):
        """The rows of an epoch: of a frame of the same counts that has no bad images."""
        if self.seed is None or not self.keys:
            return self.keys
        batches = self.clean.images.iter_batches(1, shuffle=self.seed, epoch=epoch)
        return [int(key) for batch in batches for key in batch["key"]]

    @functools.cached_property
    def clean(self):
        ends = np.cumsum(self.counts)
        parts = [self.keys[end - n : end] for end, n in zip(ends, self.counts, strict=True)]
        return lazy_frame([pd.DataFrame({"key": np.array(part, int)}) for part in parts])


@pytest.fixture
def topologies(kind, rng, request):
    """All in nightly runs; else as many processes as the kind of frame has time for."""
    if request.config.option.nightly:
        return TOPOLOGIES
    if kind in (in_memory, without_images):
        return [TOPOLOGIES[0], *rng.sample(TOPOLOGIES[1:], 2)]
    return [rng.choice(TOPOLOGIES[:3]), rng.choice(TOPOLOGIES[1:4])]


@pytest.mark.rounds(1, nightly=30)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_global_batch_has_the_same_rows_and_any_topology_resumes_it(
    kind, rng, tmp_path, topologies
):
    case = Case(kind, rng, tmp_path)
    drop_last = rng.random() < 0.3
    order = case.order(case.epoch)
    assert sorted(order) == case.keys
    expected = expected_steps(order, case.bad, STEP, drop_last)
    done = rng.randint(0, len(expected))
    ranks, _ = rng.choice(TOPOLOGIES)
    stopped = case.make(STEP // ranks, shard=(rng.randrange(ranks), ranks), drop_last=drop_last)
    for _ in itertools.islice(stopped, done):
        pass
    stopped.close()
    counted = case.make(STEP, drop_last=drop_last, shard=(0, 1)).position_after(done)
    for ranks, workers in topologies:
        options = {"batch_size": STEP // ranks, "drop_last": drop_last}
        whole = steps_of(case.make, ranks, workers, **options)
        assert rows_of(whole) == expected
        for step, rows in zip(whole, expected, strict=True):
            if sum(rows.values()) == STEP:
                assert {len(batch) for batch in step} == {STEP // ranks}
        start = rng.choice([json.loads(json.dumps(stopped.position)), counted, done])
        rest = steps_of(case.make, ranks, workers, start=start, **options)
        assert rest == whole[done:], start


@pytest.mark.rounds(3, nightly=100)
def test_a_position_goes_on_with_steps_of_another_size(rng, tmp_path):
    case = Case(lazy, rng, tmp_path)
    order = case.order(case.epoch)
    done = rng.randint(0, len(order) // 8)
    position = case.make(2, shard=(0, 4)).position_after(done)
    for ranks, size in ((3, 5), (5, 2), (1, 7)):
        rest = steps_of(case.make, ranks, 1, batch_size=size, start=position)
        assert rows_of(rest) == expected_steps(order[8 * done :], case.bad, ranks * size, False)


@pytest.mark.rounds(2, nightly=50)
@pytest.mark.parametrize("kind", [lazy, in_memory])
def test_epochs_of_fixed_length_go_through_all_rows_again_and_again(
    kind, rng, tmp_path, topologies
):
    case = Case(kind, rng, tmp_path)
    steps = rng.randint(1, 1 + len(case.keys) // STEP)
    if not case.keys:
        assert list(case.make(STEP, steps=steps)) == []
        return
    passes = -(-4 * steps * STEP // len(case.keys))
    stream = [key for number in range(passes) for key in case.order(number)]
    for epoch in range(3):
        rows = stream[epoch * steps * STEP : (epoch + 1) * steps * STEP]
        expected = expected_steps(rows, case.bad, STEP, False)
        ranks, workers = topologies[epoch % len(topologies)]
        options = {"batch_size": STEP // ranks, "steps": steps, "epoch": epoch}
        assert rows_of(steps_of(case.make, ranks, workers, **options)) == expected
    for_ever = case.make(STEP, repeat=True, epoch=0)
    with pytest.raises(TypeError, match="never ends"):
        len(for_ever)
    got = [batch["key"].tolist() for batch in itertools.islice(for_ever, 4 * steps)]
    for_ever.close()
    assert list(map(Counter, got)) == expected_steps(
        stream[: 4 * steps * STEP], case.bad, STEP, False
    )
    rest = case.make(STEP, repeat=True, epoch=0, start=for_ever.position)
    following = next(rest)["key"].tolist()
    rest.close()
    more = [*stream, *case.order(passes)][4 * steps * STEP :][:STEP]
    assert len(more) < STEP or Counter(following) == expected_steps(more, case.bad, STEP, False)[0]


LABELS = ["cat"] * 6 + ["dog"] * 30 + [None] * 12 + ["eel"] * 12


@pytest.fixture(scope="module")
def in_one():
    return small_frame(range(60)).assign(label=LABELS, weight=[0.0] * 20 + [1.0] * 20 + [3.0] * 20)


@pytest.fixture(scope="module")
def labelled(in_one):
    return lazy_frame([in_one.iloc[:25], in_one.iloc[25:25], in_one.iloc[25:]])


def drawn(frame, epochs, **options):
    """How often each row is drawn in so many epochs."""
    return Counter(
        int(key)
        for epoch in range(epochs)
        for batch in frame.images.iter_batches(60, columns=["key"], epoch=epoch, **options)
        for key in batch["key"]
    )


@pytest.mark.parametrize("shuffle", [None, 3])
def test_rows_are_drawn_as_often_as_their_weights_say(in_one, shuffle):
    times = drawn(in_one, 50, weights="weight", shuffle=shuffle)
    assert sum(times.values()) == 3000
    assert not set(range(20)) & set(times)
    # Standard deviations of 6 and 10.
    assert all(abs(times[key] - 37.5) < 25 for key in range(20, 40))
    assert all(abs(times[key] - 112.5) < 40 for key in range(40, 60))


def test_values_are_drawn_equally_often_and_nulls_never(in_one):
    times = drawn(in_one, 30, balance="label", shuffle=1)
    by_label = Counter()
    for key, count in times.items():
        by_label[LABELS[key]] += count
    assert by_label.keys() == {"cat", "dog", "eel"}
    assert all(abs(count - 600) < 80 for count in by_label.values())  # of 20
    assert max(times.values()) < 3 * min(times[key] for key in range(6)), "a cat is often drawn"


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "weight"},
        {"balance": "label", "shuffle": 2, "steps": 5},
    ],
    ids=str,
)
def test_what_is_drawn_is_the_same_for_all_topologies(in_one, options):
    make = functools.partial(in_one.images.iter_batches, columns=["key"])
    one, *others = (
        rows_of(steps_of(make, ranks, workers, batch_size=STEP // ranks, **options))
        for ranks, workers in TOPOLOGIES[:4]
    )
    assert all(other == one for other in others)
    start = make(STEP, **options).position_after(1)
    rest = steps_of(make, 3, 2, batch_size=STEP // 3, start=start, **options)
    assert rows_of(rest) == one[1:]


OTHERS = {
    "shuffle=1, and this is 2": {"shuffle": 2},
    "shuffle=1, and this is None": {"shuffle": None},
    "epoch=3, and this is 4": {"epoch": 4},
    "rows=60, and this is": {"steps": 2},
    "another order": {"weights": "weight"},
    "weights= and balance=": {"balance": "label"},
}


@pytest.mark.parametrize("shard", [(0, 1), (1, 3)])
def test_positions_of_other_epochs_are_refused_and_what_differs_is_named(labelled, shard):
    options = {"shuffle": 1, "epoch": 3, "columns": ["key"]}
    position = labelled.images.iter_batches(3, **options).position_after(5)
    labelled.images.iter_batches(2, start=position, shard=shard, **options)
    for told, other in OTHERS.items():
        with pytest.raises(dii.ArgumentError, match=re.escape(told)):
            labelled.images.iter_batches(3, start=position, shard=shard, **options | other)


def test_positions_of_other_rows_are_refused(labelled):
    def at(frame, **options):
        return frame.images.iter_batches(3, shuffle=1, columns=["key"], **options)

    position = at(labelled).position_after(5)
    with pytest.raises(dii.ArgumentError, match="rows=60, and this is 40"):
        at(labelled[labelled.weight > 0], start=position)
    with pytest.raises(dii.ArgumentError, match="the rows of each partition"):
        at(labelled.repartition(npartitions=1), start=position)
    heavy = at(labelled, weights="weight")
    other = labelled.assign(weight=labelled.weight + 1)
    with pytest.raises(dii.ArgumentError, match="weights"):
        at(other, weights="weight", start=heavy.position_after(5))
    with pytest.raises(dii.ArgumentError, match="ends after 60 rows"):
        at(labelled, start=position._replace(row=61))


WRONG = [[2, 1, 0], [-1, 0], [0, -1], [0], [0.0, 1], "00", -1, True, [0, 0, 1, 5, 7]]


@pytest.mark.parametrize("start", WRONG, ids=str)
def test_what_is_no_position_is_refused(labelled, start):
    with pytest.raises(dii.ArgumentError, match="start="):
        labelled.images.iter_batches(2, start=start)


def test_the_first_rows_come_from_many_shards_and_any_64_from_more_than_twelve():
    keys = np.arange(24 * 100)
    frame = lazy_frame([pd.DataFrame({"key": part}) for part in np.array_split(keys, 24)])
    batches = frame.images.iter_batches(64, shuffle=1)
    got = [batch["key"] for batch in batches]
    shards = [len(set((some // 100).tolist())) for some in got]
    assert shards[0] >= 20
    assert min(shards[:-1]) >= 20
    whole = np.concatenate(got)
    assert sorted(whole) == keys.tolist()
    assert abs(np.corrcoef(whole, keys)[0, 1]) < 0.3
    other = np.concatenate([b["key"] for b in frame.images.iter_batches(64, shuffle=1, epoch=1)])
    assert (whole != other).any()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_shard_is_read_by_few_ranks(ranks):
    """Without a decode to put off, as over a network: bytes that two ranks read cost twice."""
    keys = np.arange(64 * 32)
    parts = np.array_split(keys, 64)
    readers = Counter()
    for rank in range(ranks):
        read = set()

        def seen(frame, read=read):
            read.update((frame["key"] // 32).tolist())
            return frame

        frame = lazy_frame([pd.DataFrame({"key": part}) for part in parts])
        counted = frame.map_partitions(seen, meta=frame._meta)
        batches = counted.images.iter_batches(64 // ranks, shuffle=1, shard=(rank, ranks))
        assert len(batches) == 32
        read.clear()
        assert sum(len(batch["key"]) for batch in batches) == len(keys) // ranks
        readers.update(read)
    assert sum(readers.values()) <= 1.05 * len(parts)
