"""Frames of two reads side by side have the rows of one sample side by side, or are refused."""

from __future__ import annotations

import itertools
import operator
from pathlib import Path

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from photo_shards import encode, write_tar
from PIL import Image

import dask_image_ingest as dii

SHARDS, PER_SHARD = 4, 9
OUTPUTS = {"score": "float32"}


def brightness(images):
    return images.mean((1, 2, 3))


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("shards")
    return [write_tar(folder / f"{shard}.tar", members(shard)) for shard in range(SHARDS)]


def members(shard):
    """Pictures of one grey each, which no size changes."""
    found = {}
    for number in range(PER_SHARD):
        grey = shard + SHARDS * (number * 5 % PER_SHARD) + 100
        picture = Image.new("RGB", (9 + number, 9 + shard), (grey, grey, grey))
        found[f"{shard}-{number}.png"] = encode(picture, "png")
        found[f"{shard}-{number}.txt"] = b"word " * (number + shard)
    return found


@pytest.fixture(params=["synchronous", "threads"], autouse=True)
def scheduler(request):
    with dask.config.set(scheduler=request.param):
        yield


@pytest.fixture
def read(paths):
    def read(which=slice(None), **options):
        return dii.read_webdataset_images(paths[which], backend="pandas", **options)

    return read


@pytest.fixture
def scores(read):
    """The true score of each key."""
    frame = read(size=4).compute(scheduler="synchronous")
    means = [float(image.mean()) for image in frame.images.arrays()]
    return dict(zip(frame["__key__"], means, strict=True))


def scored(frame):
    return frame.images.map_batches(brightness, OUTPUTS)


PARTNERS = {
    "the read itself": lambda read, folder: scored(read(size=8)),
    "another read": lambda read, folder: scored(read(size=4)),
    "a checkpoint": lambda read, folder: dii.checkpoint(scored(read(size=4)), folder / "kept"),
    "a part": lambda read, folder: scored(read(size=4)).partitions[[0, 2]],
}


@pytest.mark.slow
@pytest.mark.parametrize("partner", PARTNERS)
def test_rows_of_two_reads_are_paired_shard_by_shard(partner, read, scores, tmp_path):
    other = PARTNERS[partner](read, tmp_path)
    ddf = read(size=8)
    ddf = ddf.partitions[[0, 2]] if partner == "a part" else ddf
    keys = ddf["__key__"].compute()
    middle = float(np.median(list(scores.values())))
    kept = [key for key in keys if scores[key] > middle]
    assert 0 < len(kept) < len(keys)

    assert ddf[other.score > middle]["__key__"].compute().tolist() == kept
    with_pixels = ddf[other.score > middle].compute()
    assert with_pixels["__key__"].tolist() == kept
    for key, image in zip(kept, with_pixels.images.arrays(), strict=True):
        assert image.mean() == scores[key]
    assigned = ddf.assign(score=other.score)[["__key__", "score"]].compute()
    assert assigned["score"].tolist() == [scores[key] for key in assigned["__key__"]]
    assert assigned["__key__"].tolist() == keys.tolist()
    assert ddf.width.where(other.score > middle).count().compute() == len(kept)
    both = ddf.assign(one=ddf.width + other.score).assign(score=other.score)
    assert len(both[both.score > middle]) == len(kept)


UNKNOWN = {
    "persisted": lambda read: scored(read(size=4)).persist(),
    "other shards": lambda read: scored(read(slice(1, None), size=4)),
    "other partitions": lambda read: scored(read(size=4)).partitions[[3, 1, 2, 0]],
    "sorted": lambda read: scored(read(size=4)).sort_values("__key__"),
    "repartitioned": lambda read: scored(read(size=4)).repartition(npartitions=2),
    "of pandas": lambda read: dd.from_pandas(
        scored(read(size=4)).compute().reset_index(drop=True), npartitions=3, sort=False
    ),
}
SIDE_BY_SIDE = {
    "filter": lambda ddf, other: ddf[other.score > 1],
    "index of a filter": lambda ddf, other: ddf[other.score > 1].index,
    "length of a filter": lambda ddf, other: ddf[other.score > 1].size,
    "filter a filter": lambda ddf, other: ddf[ddf.width > 1][other.score > 1]["__key__"],
    "assign": lambda ddf, other: ddf.assign(score=other.score),
    "where": lambda ddf, other: ddf.width.where(other.score > 1),
    "fillna": lambda ddf, other: ddf.width.fillna(other.score),
    "persisted frame": lambda ddf, other: ddf.persist()[other.score > 1],
}


# Each partner by a filter, each way with one partner: the rest is more of the same.
ONLY_NIGHTLY = {
    (partner, way)
    for partner in UNKNOWN
    for way in SIDE_BY_SIDE
    if partner != "persisted" and way != "filter"
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("partner", "way"),
    [
        pytest.param(*pair, marks=[pytest.mark.nightly] if pair in ONLY_NIGHTLY else [])
        for pair in itertools.product(UNKNOWN, SIDE_BY_SIDE)
    ],
)
def test_rows_that_nobody_can_pair_are_refused(partner, way, read):
    with pytest.raises(dii.ArgumentError, match=r"labels begin anew in each shard.*merge\("):
        SIDE_BY_SIDE[way](read(size=8), UNKNOWN[partner](read)).compute()


@pytest.mark.parametrize("partner", ["other partitions", "sorted"])
def test_sums_of_other_rows_are_refused(partner, read):
    with pytest.raises(dii.ArgumentError, match="labels begin anew"):
        operator.add(read().width, UNKNOWN[partner](read).score).compute()


@pytest.mark.slow
def test_the_way_that_the_error_names_is_right(read, scores):
    kept = scored(read(size=4)).persist()
    middle = float(np.median(list(scores.values())))
    right = sorted(key for key, score in scores.items() if score > middle)
    assert sorted(kept[kept.score > middle]["__key__"].compute()) == right
    merged = read().merge(kept[["__key__", "score"]], on="__key__")
    assert sorted(merged[merged.score > middle]["__key__"].compute()) == right


@pytest.mark.slow
def test_labels_of_one_shard_and_labels_of_ones_own_are_dasks_affair(read, scores):
    one = read(slice(1), partition_size=1000)
    other = read(slice(1), partition_size=2000)
    assert one.npartitions > other.npartitions > 1
    found = one.assign(twin=other["__key__"])[["__key__", "twin"]].compute()
    assert found["twin"].tolist() == found["__key__"].tolist()
    left = read().set_index("__key__")
    right = scored(read(size=4)).persist().set_index("__key__")
    found = left.assign(score=right.score).score.compute()
    assert found.to_dict() == scores


@pytest.mark.slow
@pytest.mark.rounds(1, nightly=5)
def test_random_columns_of_two_reads_are_those_of_their_keys(read, scores, rng):
    reference = read(size=4).compute(scheduler="synchronous").set_index("__key__")
    for _ in range(15):
        parts = sorted(rng.sample(range(SHARDS), rng.randint(2, SHARDS)))
        one, other = (
            rng.choice(list(STEPS.values()))(rng, read(size=rng.choice([4, 8])).partitions[parts])
            for _ in range(2)
        )
        column = rng.choice(["width", "nbytes", "txt", "__key__"])
        found = one.assign(found=other[column])[["__key__", "found"]].compute()
        there = set(other["__key__"].compute())
        for key, value in zip(found["__key__"], found["found"], strict=True):
            if key not in there:
                assert pd.isna(value)
            else:
                assert value == (key if column == "__key__" else reference[column][key])


# None leaves a partition without rows: pandas gives such a frame those of an assigned column.
STEPS = {
    "as it is": lambda rng, frame: frame,
    "filtered": lambda rng, frame: frame[frame.width > rng.randint(8, 16)],
    "filtered late": lambda rng, frame: frame[frame.txt.str.len() > rng.randint(1, 35)],
    "scored": lambda rng, frame: scored(frame),
    "assigned": lambda rng, frame: frame.assign(area=frame.width * frame.height),
    "projected": lambda rng, frame: frame[["width", "txt", "nbytes", "__key__"]],
    "mapped": lambda rng, frame: frame.map_partitions(lambda part: part, meta=frame._meta),
}
