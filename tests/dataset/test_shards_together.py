"""Several shards in one partition: rows, order and pixels are those of one partition a shard."""

from __future__ import annotations

import shutil
import tarfile
from io import BytesIO

import numpy as np
import pandas as pd
import pytest
from photo_shards import write_photo_shards
from PIL import Image
from query_answers import answer, unlabelled
from witnesses import contents

import dask_image_ingest as dii

SHARDS = 6  # of four photographs each
TOGETHER = [(2, 3), (4, 2), (SHARDS, 1), (100, 1), ("auto", 1)]


@pytest.fixture(scope="module")
def folder(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    write_photo_shards(photos, folder, per_shard=4)
    return folder


@pytest.fixture(scope="module")
def read(folder):
    def read(together=1, **options):
        options = {"backend": "pandas", "size": 16} | options
        return dii.read_webdataset_images(folder, shards_per_partition=together, **options)

    return read


@pytest.mark.parametrize(("together", "partitions"), TOGETHER)
def test_rows_order_and_pixels_are_the_same(read, photos, together, partitions):
    ddf = read(together, size=None)
    assert ddf.npartitions == partitions
    frame = ddf.compute()
    assert frame["__key__"].tolist() == [photo.key for photo in photos]
    for photo, image in zip(photos, frame.images.arrays(), strict=True):
        # JPEG decoders differ by a few levels.
        assert np.abs(image.astype(int) - photo.pixels).mean() < 1
    assert unlabelled(answer(frame)) == unlabelled(answer(read(size=None).compute()))


QUESTIONS = {
    "len": len,
    "filter": lambda ddf: ddf[ddf.cls >= 3].compute(),
    "filter of the read's": lambda ddf: ddf[ddf["__key__"] > "00000009"][
        ["txt", "image"]
    ].compute(),
    "computed": lambda ddf: ddf[ddf.height * ddf.width > 100_000].compute(),
    "len of a filter": lambda ddf: len(ddf[ddf.width > ddf.height]),
    "head": lambda ddf: ddf.head(10, npartitions=-1),
    "head of a filter": lambda ddf: ddf[ddf.cls > 2].head(5, npartitions=-1),
    "filter of a head": lambda ddf: ddf[["__key__", "cls"]].head(7, npartitions=-1),
    "head of good ones": lambda ddf: ddf[ddf.error.isna()].head(9, npartitions=-1),
    "tail": lambda ddf: ddf.tail(3),
    "sizes": lambda ddf: ddf.groupby("cls").size().compute().sort_index(),
    "stack": lambda ddf: ddf.images.stack().compute(),
    "sorted": lambda ddf: ddf.sort_values("__key__", ascending=False).compute(),
    "shuffled": lambda ddf: ddf.shuffle("cls").compute().sort_values("__key__"),
    "late": lambda ddf: dii.decode_images(ddf.drop(columns=["image", "error"]), size=16).compute(),
    "references": lambda ddf: dii.decode_images(
        ddf[["__key__", "__url__", "offset", "nbytes"]].repartition(npartitions=1), size=8
    ).compute(),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_have_the_same_answers(read, question):
    ask = QUESTIONS[question]
    want = unlabelled(answer(ask(read())))
    for together in (4, "auto"):
        assert unlabelled(answer(ask(read(together)))) == want


@pytest.mark.parametrize("text", ["nbytes > nbytes.mean()", "cls == cls.max()", "width > 100"])
def test_a_query_is_about_a_partition(read, text):
    ddf = read(4)
    wanted = pd.concat([part.compute().query(text) for part in ddf.partitions])
    found = ddf.query(text).compute()
    assert found["__key__"].tolist() == wanted["__key__"].tolist()
    assert unlabelled(answer(found)) == unlabelled(answer(wanted))


def test_a_head_opens_no_more_shards_than_it_needs(folder, tmp_path):
    few = shutil.copytree(folder, tmp_path / "few")
    ddf = dii.read_webdataset_images(few, backend="pandas", size=8, shards_per_partition="auto")
    for path in sorted(few.glob("*.tar"))[2:]:
        path.unlink()
    assert len(ddf.head(7)) == 7
    assert len(ddf[["txt"]].head(8)) == 8
    with pytest.raises(dii.ShardNotFoundError):
        ddf.head(9)


def test_labels_are_unique_and_tell_the_sample_of_the_shard(read):
    one_by_one = read()["__key__"].compute()
    assert one_by_one.index.is_unique
    assert one_by_one.index.dtype == np.int64
    assert one_by_one.index.min() >= 0
    ddf = read(4)
    labels = ddf["__key__"].compute()
    assert labels.equals(one_by_one)
    # Whatever rows are kept, and wherever.
    kept = ddf[ddf.cls > 2].compute()
    assert labels.loc[labels.isin(kept["__key__"])].index.tolist() == kept.index.tolist()


def test_frames_of_one_read_are_put_side_by_side_by_their_rows(read):
    ddf = read(4)
    whole = read().compute().set_index("__key__")
    some = ddf[ddf.cls > 2]
    found = ddf.assign(of_some=some.width)[["__key__", "of_some"]].compute()
    for key, width in zip(found["__key__"], found["of_some"], strict=True):
        sample = whole.loc[key]
        assert pd.isna(width) if sample.cls <= 2 else width == sample.width
    assert len(ddf[read(4, size=8).width > 100]) == (whole.width > 100).sum()


def test_no_partition_decodes_to_more_than_was_asked_for(read, photos):
    pixels = 16 * 16 * 3 * 4  # of a shard
    sizes = read("auto", partition_size=2 * pixels).map_partitions(len).compute()
    # Shards are judged by their bytes, against those of the first one.
    assert 3 <= len(sizes) <= SHARDS
    assert sizes.sum() == len(photos)
    split = read(100, partition_size=pixels // 2)
    assert split.npartitions > SHARDS
    assert split["__key__"].compute().tolist() == [photo.key for photo in photos]


@pytest.mark.more
def test_auto_has_ten_thousand_samples_together(tmp_path):
    file = BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    first = tmp_path / "0.tar"
    with tarfile.open(first, "w") as tar:
        for number in range(2500):
            member = tarfile.TarInfo(f"{number:04d}.jpg")
            member.size = len(file.getvalue())
            tar.addfile(member, BytesIO(file.getvalue()))
    for number in range(1, 9):
        (tmp_path / f"{number}.tar").hardlink_to(first)
    ddf = dii.read_webdataset_images(tmp_path, backend="pandas", shards_per_partition="auto")
    assert ddf.map_partitions(len).compute().tolist() == [10_000, 10_000, 2500]


@pytest.mark.parametrize("indexed", [False, True])
def test_a_shard_that_cannot_be_read_costs_its_own_rows(folder, tmp_path, indexed):
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    if indexed:
        dii.write_index(damaged)
    paths = sorted(damaged.glob("*.tar"))
    ddf = dii.read_webdataset_images(
        damaged, backend="pandas", size=8, shards_per_partition=3, shard_errors="drop"
    )
    paths[1].unlink()
    with pytest.warns(UserWarning, match=r"skipped: .*" + paths[1].name):
        frame = ddf.compute()
    assert sorted(set(frame["__url__"])) == [str(path) for path in paths if path != paths[1]]
    with pytest.raises(dii.ArgumentError, match="shards_per_partition=1"):
        dii.checkpoint(ddf, tmp_path / "out")


def test_indexes_and_sidecars_are_those_of_each_shard(folder, tmp_path):
    copy = tmp_path / "copy"
    dii.to_webdataset(
        dii.read_webdataset_images(folder, backend="pandas"),
        f"{copy}/{{shard:05d}}.tar",
        samples_per_shard=4,
    )

    def read(**options):
        return dii.read_webdataset_images(
            copy, backend="pandas", sidecar="parquet", size=8, **options
        ).compute()

    want = unlabelled(answer(read(index=False)))
    assert unlabelled(answer(read(index=False, shards_per_partition="auto"))) == want
    dii.write_index(copy)
    assert unlabelled(answer(read(index=True, shards_per_partition=4))) == want


def test_an_export_writes_the_same_shards(read, tmp_path):
    rows = {}
    for together in (1, 4):
        ddf, out = read(together, size=None), tmp_path / str(together)
        dii.to_webdataset(ddf[ddf.cls > 1], f"{out}/{{shard:03d}}.tar", samples_per_shard=5)
        tables = [pd.read_parquet(path) for path in sorted(out.glob("*.parquet"))]
        rows[together] = answer(pd.concat(tables).drop(columns="__url__"))
    one, other = (
        {n: d for n, d in contents(tmp_path / f).items() if n[-3:] == "tar"} for f in "14"
    )
    assert one == other
    assert rows[1] == rows[4]


def test_a_checkpoint_keeps_its_partitions_and_computes_what_has_changed(folder, tmp_path):
    shards = shutil.copytree(folder, tmp_path / "in")
    calls = tmp_path / "calls"

    def mean(images):
        with calls.open("a") as file:
            file.write("called\n")
        return np.array([image.mean() for image in images], "float32")

    def job():
        calls.write_text("")
        ddf = dii.read_webdataset_images(shards, backend="pandas", size=8, shards_per_partition=2)
        return ddf.images.map_batches(mean, {"mean": "float32"}, batch_size=100)

    def called():
        return len(calls.read_text().splitlines())

    one = dii.checkpoint(job().partitions[:1], tmp_path / "out")
    assert (one.npartitions, called()) == (1, 1)
    stored = dii.checkpoint(job(), tmp_path / "out")
    assert (stored.npartitions, called()) == (3, 2)
    assert answer(stored.compute()) == answer(job().compute())
    assert answer(stored.partitions[[2, 0]].compute()) == answer(job().partitions[[2, 0]].compute())
    some = dii.checkpoint(job().partitions[[1]], tmp_path / "out")
    assert called() == 0
    assert answer(some.compute()) == answer(job().partitions[[1]].compute())
    paths = sorted(shards.glob("*.tar"))
    shutil.copy(paths[0], paths[3])
    stored = dii.checkpoint(job(), tmp_path / "out")
    assert called() == 1
    assert answer(stored.compute()) == answer(job().compute())
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 3


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "many", None])
def test_other_values_are_refused(read, value):
    with pytest.raises(dii.ArgumentError, match=r"shards_per_partition=.*'auto'"):
        read(value)
