"""``mix_batches``: rows of several frames by weights, each as often as promised, and resumable."""

from __future__ import annotations

import collections
import io
import itertools
import json
import pickle
import sys
from fractions import Fraction
from unittest import mock

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from PIL import Image
from small_frames import lazy_frame, small_frame
from tars import tar
from topologies import STEP, TOPOLOGIES, expected_steps, rows_of, steps_of

import dask_image_ingest as dii
from dask_image_ingest.loader import parse_shard


@pytest.fixture(scope="module")
def frames(shards):
    """Sixteen and eight rows; keys tell them apart."""
    read = [dii.read_webdataset_images(some, size=16) for some in (shards[:2], shards[2:])]
    return [frame[["__key__", "image", "cls"]] for frame in read]


def keys(batches, column="__key__"):
    return [key for batch in batches for key in batch[column]]


def of(frame):
    return frame["__key__"].compute().tolist()


def test_all_rows_come_once_with_their_own_pixels(frames):
    batches = list(dii.mix_batches(frames, 5))
    assert [len(batch["image"]) for batch in batches] == [5, 5, 5, 5, 4]
    assert sorted(keys(batches)) == sorted(of(frames[0]) + of(frames[1]))
    mixed = dict(zip(keys(batches), np.concatenate([b["image"] for b in batches]), strict=True))
    for frame in frames:
        table = frame.compute()
        for key, pixels in zip(table["__key__"], table.images.arrays(), strict=True):
            np.testing.assert_array_equal(mixed[key], pixels)


def test_rows_of_a_frame_keep_the_order_that_they_have_alone(frames):
    mixed = keys(dii.mix_batches(frames, 3))
    for frame in frames:
        alone = of(frame)
        assert [key for key in mixed if key in set(alone)] == alone


class Case:
    """A random mix, and what is promised of it."""

    def __init__(self, rng):
        keys, self.frames, self.own, self.bad = itertools.count(), [], [], set()
        has_images = rng.random() < 0.4
        sizes = [1, 3, 20, 34] if has_images else [0, 1, 20, 34, 150, 600]
        for _ in range(rng.randint(2, 4)):
            parts = [list(itertools.islice(keys, rng.choice(sizes))) for _ in range(2)]
            bad = {key for part in parts for key in part if has_images and rng.random() < 0.1}
            made = [
                small_frame(part, bad=bad) if has_images else pd.DataFrame({"key": part}, dtype=int)
                for part in parts
            ]
            self.frames.append(lazy_frame(made) if rng.random() < 0.8 else pd.concat(made))
            self.own.append([key for part in parts for key in part])
            self.bad |= bad
        self.owner = {key: frame for frame, own in enumerate(self.own) for key in own}
        self.seed = rng.choice([None, rng.randint(0, 5)])
        self.epoch = rng.randint(0, 2)
        self.weights = rng.choice([None, [rng.choice([1, 2, 4, 16]) for _ in self.frames]])
        self.steps = rng.choice([None, None, rng.randint(1, 30)])
        self.stop = None
        if self.weights and self.steps is None:
            self.stop = rng.choice(["first", "all", None])

    def make(self, batch_size, **options):
        options = {"steps": self.steps, "epoch": self.epoch, "stop": self.stop} | options
        return dii.mix_batches(
            self.frames, batch_size, self.weights, columns=["key"], shuffle=self.seed, **options
        )

    def shares(self):
        """Rows of each frame in a pass; or of its relative number, if passes never end."""
        lengths = list(map(len, self.own))
        if self.weights is None:
            return lengths
        if self.steps is None and self.stop != "all" and not all(lengths):
            return [0] * len(lengths)
        weights = [weight * bool(rows) for weight, rows in zip(self.weights, lengths, strict=True)]
        if self.steps is not None:
            return weights
        ends = [
            Fraction(rows, weight) for rows, weight in zip(lengths, weights, strict=True) if rows
        ]
        end = max(ends, default=0) if self.stop == "all" else min(ends)
        return [int(end * weight) for weight in weights]

    def dealt(self, format, **options):
        """The batches of a rank and worker, of a torch that is simulated."""
        module = sys.modules["dask_image_ingest.loader.mix_batches"]
        with mock.patch.object(module, "parse_shard", return_value=parse_shard("auto", format)):
            return self.make(**options)

    def order(self, epoch, steps):
        """Rows of an epoch, one by one: of frames of the same counts that have no bad images."""
        frames = [frame[["key"]] for frame in self.frames]
        options = {"stop": self.stop, "steps": None if steps is None else steps * STEP}
        batches = dii.mix_batches(
            frames, 1, self.weights, shuffle=self.seed, epoch=epoch, **options
        )
        rows = [int(key) for batch in batches for key in batch["key"]]
        assert len(rows) == len(batches)
        return rows

    def alone(self, frame, first_pass, rows):
        """Rows of a frame, pass after pass, as it has them alone."""
        seen, number = [], first_pass
        while len(seen) < rows:
            batches = self.frames[frame][["key"]].images.iter_batches(
                1, shuffle=self.seed, epoch=number
            )
            seen += [int(key) for batch in batches for key in batch["key"]]
            number += 1
        return seen[:rows]


@pytest.mark.slow
@pytest.mark.rounds(6, nightly=200)
def test_rows_come_as_often_as_promised_and_any_topology_has_and_resumes_them(rng):
    case = Case(rng)
    shares, lengths = case.shares(), list(map(len, case.own))
    is_endless = case.steps is not None and case.weights is not None
    order = whole = case.order(case.epoch, case.steps)
    first_passes = [case.epoch * -(-n // max(1, m)) for n, m in zip(shares, lengths, strict=True)]
    if case.steps is None:
        assert len(order) == sum(shares)
    else:  # epochs go on where the one before ended
        assert len(order) == case.steps * STEP * any(lengths)
        whole = case.order(0, (case.epoch + 1) * case.steps)
        assert whole[len(whole) - len(order) :] == order
        first_passes = [0] * len(shares)

    for frame, (own, first_pass) in enumerate(zip(case.own, first_passes, strict=True)):
        seen = [key for key in whole if case.owner[key] == frame]
        assert seen == case.alone(frame, first_pass, len(seen))
        times = collections.Counter(seen)
        least, more = divmod(len(seen), max(1, len(own)))
        assert {times[key] for key in own} <= {least, least + bool(more)}
    rows_of_pass = len(whole) + 1 if is_endless else max(1, sum(shares))
    for first in range(0, len(whole), rows_of_pass):
        here = whole[first : first + rows_of_pass]
        for edge in range(0, len(here), 1024):
            owner = collections.Counter(case.owner[key] for key in here[:edge])
            for frame, share in enumerate(shares):
                assert abs(owner[frame] - edge * share / sum(shares)) <= len(shares)

    ranks, workers = rng.choice(TOPOLOGIES)
    got = steps_of(case.dealt, ranks, workers, batch_size=STEP // ranks)
    expected = expected_steps(order, case.bad, STEP, False)
    assert rows_of(got) == expected
    position = case.make(STEP, shard=(0, 1)).position_after(rng.randint(0, len(expected)))
    ranks, size = rng.choice([(1, 7), (2, 12), (3, 5), (4, 6)])
    start = json.loads(json.dumps(position))
    if case.steps is None:
        rest = steps_of(case.dealt, ranks, rng.randint(1, 3), batch_size=size, start=start)
        expected = expected_steps(order[position.row :], case.bad, ranks * size, False)
        assert rows_of(rest) == expected


def test_the_stream_ends_with_the_first_frame_that_ends(frames):
    few = set(of(frames[1]))
    seen = keys(dii.mix_batches(frames, 4, weights=[1, 9]))
    assert few <= set(seen)
    assert len(seen) < 24
    assert all(
        len(b["cls"]) == 4 for b in dii.mix_batches(frames, 4, weights=[1, 9], drop_last=True)
    )


@pytest.mark.parametrize("weights", [[1e308, 1e308], [5e-324, 5e-324], [3, 3]])
def test_the_size_of_the_weights_does_not_matter(frames, weights):
    ours = keys(dii.mix_batches(frames, 4, weights, shuffle=1))
    assert ours == keys(dii.mix_batches(frames, 4, [1, 1], shuffle=1))
    assert sorted(keys(dii.mix_batches(frames, 4, [1e-320, 1e308]))) == sorted(of(frames[1]))


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_batches_that_are_no_dataset_say_so_to_a_data_loader(frames):
    data = pytest.importorskip("torch.utils.data", reason="pip install torch==2.13.0")
    for batches in (dii.mix_batches(frames, 4), frames[0].images.iter_batches(4, format="torch")):
        for options in ({}, {"num_workers": 1}):
            with pytest.raises(dii.ArgumentError, match=r"takes mix_batches.*torch"):
                next(iter(data.DataLoader(batches, batch_size=None, **options)))
        with pytest.raises(dii.ArgumentError, match=r"takes mix_batches.*torch"):
            pickle.dumps(batches)
    same = dii.mix_batches(frames, 4, format="torch", columns=["cls"])
    labels = [batch["cls"].tolist() for batch in data.DataLoader(same, batch_size=None)]
    assert labels == [b["cls"].tolist() for b in dii.mix_batches(frames, 4, columns=["cls"])]


def test_shares_are_the_weights():
    few, many = (pd.DataFrame({"frame": np.full(rows, rows)}) for rows in (30, 500))
    mix = dii.mix_batches([few, many], 64, [3, 1], shuffle=1, repeat=True)
    batches = [batch["frame"] for batch in itertools.islice(mix, 16)]
    mix.close()
    assert abs((np.concatenate(batches) == 30).sum() - 768) <= 1
    counts = [int((batch == 30).sum()) for batch in batches]
    # As if each row was drawn alone: a standard deviation of 3.5.
    assert 1.5 < np.std(counts) < 6


@pytest.mark.parametrize(
    "options",
    [
        {"weights": [1, 2]},
        {"shuffle": 3},
        pytest.param({}, marks=pytest.mark.more),
        pytest.param({"weights": [1, 2], "stop": "all", "shuffle": 3}, marks=pytest.mark.more),
    ],
)
def test_a_stream_goes_on_from_any_position(frames, options):
    def make(start=0):
        return dii.mix_batches(frames, 3, start=start, **options)

    whole = [keys([batch]) for batch in make()]
    stream = make()
    positions = [json.dumps(stream.position), *(json.dumps(stream.position) for _ in stream)]
    assert len(whole) >= 3
    for number, position in enumerate(positions[: len(whole) + 1]):
        assert [keys([batch]) for batch in make(json.loads(position))] == whole[number:]


@pytest.mark.parametrize("weights", [None, [1, 1]])
def test_a_loop_over_a_stream_that_ended_begins_again(frames, weights):
    stream = dii.mix_batches(frames, 3, weights, shuffle=2)
    assert [keys([batch]) for batch in stream] == [keys([batch]) for batch in stream] != []


def test_its_repr_tells_frames_and_place(frames):
    stream = dii.mix_batches(frames, 3, weights=[1, 3])
    assert "batches of 3 rows; epoch 0; " in repr(stream)
    next(stream)
    assert "; at row 3;" in repr(stream)


def test_a_stream_that_failed_goes_on_where_it_was(frames):
    calls = iter(range(100))

    def fail_once(images):
        if next(calls) == 1:
            raise OSError("once")
        return images

    made = frames[0].images.map_batches(fail_once, {"image": "image"})
    stream = dii.mix_batches([made, frames[1]], 3)
    seen = []

    def read():
        for batch in stream:
            seen.extend(batch["__key__"])

    with pytest.raises(dii.FunctionError, match="once"):
        read()
    read()
    assert sorted(seen) == sorted(of(frames[0]) + of(frames[1]))


def test_frames_of_other_shapes_give_lists(shards):
    sizes = [dii.read_webdataset_images(shards, size=size)[["__key__", "image"]] for size in (8, 9)]
    shapes = {
        image.shape
        for batch in itertools.islice(dii.mix_batches(sizes, 8), 3)
        for image in batch["image"]
    }
    assert shapes == {(8, 8, 3), (9, 9, 3)}


def test_a_row_that_two_frames_have_gets_two_crops(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (8, 60, 60, 3), np.uint8)
    files = {}
    for number, pixels in enumerate(noise):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        files[f"{number}.png"] = file.getvalue()
    (tmp_path / "0.tar").write_bytes(tar(files))
    ddf = dii.read_webdataset_images(tmp_path, size=16, augment="random_resized_crop")
    computed = ddf.map_partitions(lambda frame: frame)  # partitions are computed whole
    for frames in ([ddf, ddf], [ddf, ddf[ddf["__key__"] < "9"]], [computed, computed]):
        for seed in (None, 1):
            crops = collections.defaultdict(list)
            for batch in dii.mix_batches(frames, 4, columns=["__key__"], shuffle=seed):
                for key, image in zip(batch["__key__"], batch["image"], strict=True):
                    crops[key].append(image.tobytes())
            assert sorted(map(len, crops.values())) == [2] * 8
            assert sum(one == other for one, other in crops.values()) == 0


@pytest.mark.torch
def test_tensors_stay_tensors(frames):
    torch = pytest.importorskip("torch", reason="pip install torch==2.13.0")
    batch = next(dii.mix_batches(frames, 6, format="torch", columns=["cls"], normalize=(0.5, 0.5)))
    assert batch["image"].shape == (6, 3, 16, 16)
    assert batch["image"].dtype == torch.float32
    assert batch["cls"].shape == (6,)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_of_a_data_loader_take_its_steps_in_turn(frames):
    data = pytest.importorskip("torch.utils.data", reason="pip install torch==2.13.0")
    options = {"shuffle": 4, "columns": ["cls", "__key__"]}
    batches = dii.mix_batches(frames, 5, format="torch", **options)
    loader = data.DataLoader(batches, batch_size=None, num_workers=2)
    for epoch in (0, 1):
        batches.set_epoch(epoch)
        want = dii.mix_batches(frames, 5, epoch=epoch, **options)
        assert len(loader) == len(want)
        assert [keys([batch]) for batch in loader] == [keys([batch]) for batch in want]


def test_balance_draws_each_value_of_each_frame_equally_often():
    pets = pd.DataFrame({"cls": ["cat"] * 90 + ["dog"] * 10})
    birds = pd.DataFrame({"cls": ["cat"] * 5 + ["owl"] * 45})
    mix = dii.mix_batches([pets, birds], 64, [1, 1], shuffle=1, balance="cls", steps=80)
    drawn = collections.Counter(label for batch in mix for label in batch["cls"])
    assert drawn.total() == 80 * 64
    assert all(abs(drawn[label] - share * 80 * 64) < 120 for label, share in
               {"cat": 0.5, "dog": 0.25, "owl": 0.25}.items())  # fmt: skip


def latents(first, edges):
    """Rows with an array of two shapes, their edges, and its numbers: those of the row."""
    rows = pd.DataFrame({"key": range(first, first + len(edges)), "width": edges})
    lists = [np.full((2, width, 3), key).tolist() for key, width in rows.to_numpy()]
    return rows.assign(latent=pd.Series(lists).astype("list<list<list<float32>>>"))


@pytest.mark.parametrize(
    ("buckets", "steps"), [("latent", None), (["width"], 5), (("width", "key2"), None)]
)
def test_buckets_of_a_column_are_one_stream_for_all_frames_and_ranks(rng, buckets, steps):
    edges = [[rng.choice([4, 5]) for _ in range(rows)] for rows in (40, 23)]
    made = [latents(100 * number, some).assign(key2=1) for number, some in enumerate(edges)]
    frames = [dd.from_pandas(made[0], npartitions=3, sort=False), made[1]]
    width = dict(pd.concat(made)[["key", "width"]].to_numpy())
    weights = None if steps is None else [1, 2]

    def make(batch_size=12, **options):
        options = {"shuffle": 4, "epoch": 1, "steps": steps, "buckets": buckets} | options
        columns = ["key", "latent"]
        return dii.mix_batches(frames, batch_size, weights, columns=columns, **options)

    whole = list(make())
    for batch in whole:
        (edge,) = {width[key] for key in batch["key"]}
        rows = list(batch["latent"])
        assert {row.shape for row in rows} == {(2, edge, 3)}
        assert [row.max() for row in rows] == batch["key"].tolist()
        if buckets == "latent":
            assert batch["latent"].shape == (len(rows), 2, edge, 3)
            assert batch["latent"].dtype == np.float32
    lengths = [len(batch["key"]) for batch in whole]
    assert lengths == sorted(lengths, key=lambda length: length < 12)
    unplanned = dii.mix_batches(frames, 12, weights, shuffle=4, epoch=1, steps=steps)
    assert collections.Counter(keys(whole, "key")) == collections.Counter(keys(unplanned, "key"))
    begun = make()
    ranks = [make(batch_size=4, shard=(rank, 3)) for rank in range(3)]
    for number, want in enumerate(whole):
        if number == 2:
            position = json.loads(json.dumps(begun.position))
            rest = [make(batch_size=3, shard=(rank, 4), start=position) for rank in range(4)]
            for parts in zip(whole[2:], *map(list, rest), strict=True):
                assert sorted(parts[0]["key"]) == sorted(keys(parts[1:], "key"))
        parts = [next(rank) for rank in ranks]
        assert sorted(keys(parts, "key")) == sorted(want["key"]) == sorted(next(begun)["key"])
        if buckets == "latent":  # of a rank without rows, too
            assert len({part["latent"].shape[1:] for part in parts}) == 1
            assert {part["latent"].dtype for part in parts} == {np.dtype("float32")}


def test_buckets_of_images_have_rows_of_all_frames(shards):
    frames = [dii.read_webdataset_images(shards[:2]), dii.read_webdataset_images(shards[2:])]
    sizes = [(16, 24), (24, 16)]
    options = {"columns": ["__key__"], "shuffle": 1, "buckets": sizes}
    mixed = list(dii.mix_batches(frames, 4, **options))
    whole = dii.read_webdataset_images(shards).images.iter_batches(4, **options)
    of_key = {
        key: image for b in whole for key, image in zip(b["__key__"], b["image"], strict=True)
    }
    assert sorted(keys(mixed)) == sorted(of_key)
    for batch in mixed:
        assert batch["image"].shape[1:3] in sizes
        for key, image in zip(batch["__key__"], batch["image"], strict=True):
            np.testing.assert_array_equal(image, of_key[key])


def test_wrong_buckets_are_refused(frames):
    strings = pd.DataFrame({"words": pd.Series([["a"], ["b"]]).astype("list<string>")})
    for frame, buckets, said in [
        (frames[0], "image", "known after their decode"),
        (frames[0], 5, "buckets=5: pass a list"),
        (frames[0], [(1, 2)], "no height and no width"),
        (strings, "words", "neither"),
    ]:
        with pytest.raises(dii.ArgumentError, match=said):
            next(frame.images.iter_batches(2, buckets=buckets))


def test_wrong_arguments_are_refused(frames):
    for arguments, said in [
        ({"frames": []}, "pass at least one dataframe"),
        ({"weights": [1]}, "a number above 0 for each of 2 frames"),
        ({"weights": [1, 0]}, "a number above 0 for each of 2 frames"),
        ({"weights": "ab"}, "a number above 0 for each of 2 frames"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"format": "jax"}, "format='jax'; choose 'numpy'"),
        ({"shuffle": -1}, "shuffle=-1"),
        ({"start": [0]}, "the position of an earlier iterator"),
        ({"stop": "last", "weights": [1, 2]}, "choose 'first' or 'all'"),
        ({"stop": "all"}, "pass weights= too, or leave stop= out"),
        ({"stop": "first", "weights": [1, 2], "steps": 3}, "stop= and steps= both tell where"),
        ({"stop": "all", "repeat": True}, "stop= and repeat= both tell where an epoch ends"),
        ({"steps": 3, "repeat": True}, "pass one of them"),
        ({"balance": "clss"}, "balance='clss'"),
        ({"buckets": "clss"}, "buckets= names 'clss'"),
        ({"frames": [3]}, "frames=3"),
        ({"columns": ["clss"]}, "columns= names 'clss'"),
    ]:
        with pytest.raises(dii.ArgumentError, match=said):
            dii.mix_batches(**{"frames": frames, "batch_size": 4} | arguments)


def test_frames_of_other_columns_are_refused(frames):
    others = [frames[0], frames[1].drop(columns="cls")]
    with pytest.raises(dii.ArgumentError, match="pass columns= that all have"):
        list(dii.mix_batches(others, 8))
    assert len(list(dii.mix_batches(others, 8, columns=[]))) == 3
