"""Frames of two reads side by side have the rows of one sample side by side."""

from __future__ import annotations

from pathlib import Path

import dask
import numpy as np
import pandas as pd
import pytest
from photo_shards import encode, write_tar
from PIL import Image

import dask_image_ingest as dii

SHARDS, PER_SHARD = 4, 9
OUTPUTS = {"score": "float32"}
COLUMNS = ["__key__", "width", "nbytes"]


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


@pytest.fixture(autouse=True)
def scheduler():
    with dask.config.set({"scheduler": "synchronous", "dataframe.shuffle.method": "tasks"}):
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

    # Of one column, Dask moves the rows of both.
    assert sorted(ddf[other.score > middle]["__key__"].compute()) == sorted(kept)
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


@pytest.mark.parametrize("pixels", [False, pytest.param(True, marks=pytest.mark.more)])
def test_rows_of_other_partitions_are_paired_by_their_labels(pixels, read, tmp_path):
    """By Dask and pandas themselves, whose errors are left as they are."""
    ddf = read(size=8) if pixels else read()[COLUMNS]
    all_keys = set(ddf["__key__"].compute())
    partners = {
        "persisted": read()[COLUMNS].persist(),
        "sorted": read()[COLUMNS].sort_values("__key__", ascending=False),
        "repartitioned": read()[COLUMNS].repartition(npartitions=2),
        "in other partitions": read()[COLUMNS].partitions[[3, 1, 2, 0]],
        "split": read(size=8, partition_size=600)[COLUMNS],
        "together": read(shards_per_partition=3)[COLUMNS],
        "other shards": read(slice(1, None))[COLUMNS],
        "filtered": read()[read().width > 11][COLUMNS],
    }
    for name, other in partners.items():
        theirs = set(other["__key__"].compute())
        found = ddf.assign(twin=other["__key__"], size=other["nbytes"])
        found = found[["__key__", "nbytes", "twin", "size"]].compute()
        paired = found[found["twin"].notna()]
        assert sorted(found["__key__"]) == sorted(all_keys), name
        assert set(paired["__key__"]) == theirs, name
        assert paired["twin"].tolist() == paired["__key__"].tolist(), name
        assert paired["size"].tolist() == paired["nbytes"].tolist(), name
        wide = set(other["__key__"].compute()[other.width.compute() > 13])
        where = ddf["__key__"].where(other.width > 13).compute().dropna()
        assert sorted(where) == sorted(wide), name
        if theirs == all_keys:  # else pandas refuses the mask
            assert sorted(ddf[other.width > 13]["__key__"].compute()) == sorted(wide), name
        merged = ddf[["__key__"]].merge(other, left_index=True, right_index=True).compute()
        assert sorted(merged["__key___x"]) == sorted(theirs), name
        assert (merged["__key___x"] == merged["__key___y"]).all(), name


def test_sums_of_other_rows_are_null_at_worst(read):
    ddf = read()
    want = ddf["nbytes"].compute() * 2
    for other in (read().partitions[[3, 1, 2, 0]], read().sort_values("__key__"), read(size=8)):
        found = (ddf["nbytes"] + other["nbytes"]).compute().dropna()
        assert found.tolist() == want.loc[found.index].tolist()


def test_frames_of_the_same_partitions_are_paired_without_a_shuffle(read, tmp_path):
    ddf = read(size=8)
    stored = dii.checkpoint(scored(read(size=4)), tmp_path / "kept")
    for query in (ddf.assign(score=stored.score), ddf[stored.score > 1]):
        optimized = query.optimize()
        assert optimized.npartitions == SHARDS
        assert not [key for key in optimized.dask if "shuffle" in str(key)]
        last = query.tail(2)["__key__"].tolist()
        assert last == ddf["__key__"].compute().tolist()[-2:]


def test_what_is_computed_of_paired_rows_is_theirs(read, scores):
    """Dask moves the rows of a frame with two parents only where both frames are used."""
    paired = read(size=4).assign(twin=read(partition_size=600, size=8)["__key__"])
    found = paired.assign(score=scored(paired).score).compute()
    assert dict(zip(found["__key__"], found["score"], strict=True)) == scores
    assert found["twin"].tolist() == found["__key__"].tolist()


def test_a_label_finds_its_row(read):
    ddf = read()
    keys = ddf["__key__"].compute()
    assert ddf.loc[keys.index[12]]["__key__"].compute().tolist() == [keys.iloc[12]]


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
