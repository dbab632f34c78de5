"""Rows are moved without their pixels, which are decoded afterwards as the read would have."""

from __future__ import annotations

import itertools
import os
import time

import dask
import numpy as np
import pandas as pd
import pytest
from counted import work  # noqa: F401
from dask.dataframe.dask_expr import new_collection
from faulty_server import faulty_server
from nvidia.dali import fn
from odd_shards import PHOTOS, in_this_process, read, write_odd_shards  # noqa: F401
from photo_shards import make_photos, write_photo_shards

import dask_image_ingest as dii
from dask_image_ingest.dataset.references import Decode
from dask_image_ingest.dataset.references.fetch import decode_partition
from dask_image_ingest.errors import (
    ImageDecodeError,
    PartitionTooLargeError,
    ShardError,
    ShardNotFoundError,
)
from dask_image_ingest.frames.pandas_backend import PandasBackend


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_odd_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture
def ddf(shards):
    return read(shards)


def scores(ddf):
    return ddf[["__key__", "nbytes"]].rename(columns={"nbytes": "score"})


def longer(group):
    return group.assign(rows=len(group))


def by_class(ddf):
    meta = ddf._meta.drop(columns="cls").assign(rows=pd.Series([], dtype="int64"))
    return ddf.groupby("cls").apply(longer, meta=meta)


MOVES = {
    "shuffle": lambda ddf: ddf.shuffle("cls"),
    "shuffle by the index": lambda ddf: ddf.shuffle(on_index=True),
    "sort": lambda ddf: ddf.sort_values("width"),
    "sort by two": lambda ddf: ddf.sort_values(["cls", "offset"], ascending=False),
    "set_index": lambda ddf: ddf.set_index("__key__"),
    "merge": lambda ddf: ddf.merge(scores(ddf), on="__key__"),
    "merge of two reads": lambda ddf: ddf.merge(ddf, on="__key__", suffixes=("", "_too")),
    "merge that finds nothing": lambda ddf: ddf.merge(
        scores(ddf[ddf.cls > 1]), on="__key__", how="outer"
    ),
    "merge with many rows of an image": lambda ddf: ddf.merge(ddf[["cls", "nbytes"]], on="cls"),
    "drop_duplicates": lambda ddf: ddf.drop_duplicates(subset=["cls"]),
    "sample": lambda ddf: ddf.sample(frac=0.5, random_state=1),
    "random_split": lambda ddf: ddf.random_split([0.5, 0.5], random_state=1)[1],
    "more partitions": lambda ddf: ddf.repartition(npartitions=9),
    "nlargest": lambda ddf: ddf.nlargest(5, "offset"),
    "nsmallest": lambda ddf: ddf.nsmallest(5, "offset"),
    "loc": lambda ddf: ddf.set_index("offset").loc[1000:20_000],
    "groups": by_class,
    "renamed": lambda ddf: ddf.rename(columns={"image": "pixels", "error": "why"}).shuffle("cls"),
    "a new column": lambda ddf: ddf.assign(area=ddf.width * ddf.height).sort_values("area"),
    "few columns": lambda ddf: ddf[["image", "cls"]].shuffle("cls"),
    "filtered": lambda ddf: (lambda moved: moved[moved.width > 200])(ddf.shuffle("cls")),
    "queried": lambda ddf: ddf.sort_values("width").query("cls > 1"),
    "chain": lambda ddf: (
        ddf.shuffle("cls").merge(scores(ddf), on="__key__").drop_duplicates(subset=["score"])
    ).set_index("__key__"),
}


# Another operation of the list moves rows by the same node.
ONLY_NIGHTLY = {"shuffle by the index", "sort by two", "random_split", "nsmallest"}
ONLY_NIGHTLY |= {"renamed", "few columns", "queried", "merge with many rows of an image"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] if name in ONLY_NIGHTLY else [])
        for name in MOVES
    ],
)
def test_moved_rows_are_those_that_are_moved_with_their_pixels(ddf, name):
    moved = MOVES[name](ddf)
    assert decodes(moved) == 1
    with dask.config.set({"image-ingest.decode-late": False}):
        assert decodes(moved) == 0
        want = moved.compute()
        divisions = moved.optimize().divisions
    got = moved.compute()
    pd.testing.assert_frame_equal(got, want)
    assert got.dtypes.equals(want.dtypes)
    assert moved.optimize().divisions == divisions


@pytest.fixture
def rows_in_any_order(monkeypatch):
    """Shards are read on threads in another order each time, and shuffled as they come."""
    from dask_image_ingest.dataset.plan import scan_node

    read_partition, delays = scan_node.read_partition, itertools.cycle([3, 0, 4, 1, 2])

    def late(*args):
        time.sleep(next(delays) * 0.03)
        return read_partition(*args)

    monkeypatch.setattr(scan_node, "read_partition", late)
    options = {"scheduler": "threads", "num_workers": 4, "dataframe.shuffle.method": "disk"}
    with dask.config.set(options):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("columns", [["__key__", "image", "cls"], ["__key__", "cls"]])
def test_a_shuffle_has_the_order_of_shards_and_samples(shards, columns, rows_in_any_order):
    ddf = read(shards[::-1])
    shuffled = ddf.shuffle("cls", npartitions=3)
    shuffled = shuffled.assign(twice=shuffled.cls * 2)
    kept = shuffled[shuffled.offset > 600][[*columns, "twice"]]
    order = ddf.compute(scheduler="sync").sort_values("__url__", kind="stable")
    order = order[order.offset > 600]
    for part in dask.compute(*kept.to_delayed()):
        want = order[order.cls.isin(part.cls)]
        assert (part.twice == 2 * part.cls).all()
        if "image" in columns:
            assert part["__key__"].tolist() == want["__key__"].tolist()
            pd.testing.assert_series_equal(part.image, want.image)
        else:
            assert sorted(part["__key__"]) == sorted(want["__key__"])


@pytest.mark.slow
def test_batches_go_on_where_they_stopped_after_a_shuffle(shards, rows_in_any_order):
    def batches(**options):
        shuffled = read(shards).shuffle("cls", npartitions=4).persist()
        return shuffled.images.iter_batches(4, columns=["__key__"], **options)

    for _ in range(4):
        begun = batches()
        seen = [key for _ in range(3) for key in next(begun)["__key__"]]
        seen += [key for batch in batches(start=begun.position) for key in batch["__key__"]]
        assert len(set(seen)) == len(seen) == PHOTOS


def decodes(ddf):
    return len(list(ddf.optimize(fuse=False).expr.find_operations(Decode)))


LOOKS = {
    "by the error": lambda ddf: ddf.shuffle("error"),
    "by a function": lambda ddf: ddf.sort_values("width", sort_function=sort_as_pandas),
    "by all columns": lambda ddf: ddf.drop(columns="image").drop_duplicates(),
    "by bytes": lambda ddf: ddf.repartition(partition_size="1 MB"),
    "of what is decoded": lambda ddf: ddf[ddf.error.isna()].sort_values("width"),
    "to fewer partitions": lambda ddf: ddf.repartition(npartitions=1),
}


def sort_as_pandas(frame, **options):
    return frame.sort_values(**options)


@pytest.mark.parametrize("name", LOOKS)
def test_what_looks_at_pixels_or_gains_nothing_is_left_alone(ddf, name):
    assert decodes(LOOKS[name](ddf)) == 0


@pytest.mark.slow
def test_only_what_is_left_is_decoded_and_once(ddf, work):  # noqa: F811
    moved = ddf.shuffle("cls").sort_values("width").drop_duplicates(subset=["cls"])
    rows = moved[moved.cls > 0].compute()
    assert work["decoded"] == len(rows)


def test_images_that_nobody_wants_are_not_decoded(ddf, work):  # noqa: F811
    moved = ddf.shuffle("cls").sort_values("width")
    assert len(moved.drop(columns=["image", "error"]).compute()) == len(moved)
    assert decodes(moved[["txt", "cls"]]) == work["decoded"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("end", ["tail", "head"])
def test_the_ends_of_as_many_partitions_as_there_were_are_found(ddf, end, work):  # noqa: F811
    moved = ddf.set_index("offset")
    few = getattr(moved.repartition(npartitions=moved.npartitions), end)(2)
    assert work["decoded"] == 2
    pd.testing.assert_series_equal(
        few["__key__"], getattr(moved["__key__"].compute().sort_index(), end)(2)
    )


@pytest.mark.slow
@pytest.mark.parametrize("end", ["tail", "head"])
@pytest.mark.parametrize("more", [False, True], ids=["alone", "with-another-type"])
@pytest.mark.parametrize("sort", ["sort_values", "set_index"])
def test_the_ends_of_sorted_rows_are_those_of_all(ddf, end, more, sort, work):  # noqa: F811
    """Of as many rows as asked for, whatever partition they are in, as dask has it."""

    def asked():
        moved = getattr(ddf, sort)("offset")
        moved = moved.astype({"height": "double[pyarrow]"}) if more else moved
        return getattr(moved, end)(20)

    got = asked()
    assert work["decoded"] == 20
    with dask.config.set({"image-ingest.decode-late": False}):
        want = asked()
    assert len(got) == 20
    same = [name for name in want.columns if name != "image"]
    pd.testing.assert_frame_equal(got[same], want[same])
    assert list(map(as_bytes, got.images.arrays())) == list(map(as_bytes, want.images.arrays()))


def as_bytes(image):
    return None if image is None else image.tobytes()


@pytest.mark.parametrize("end", ["tail", "head"])
def test_the_ends_of_moved_rows_can_be_kept(ddf, end):
    moved = ddf.shuffle("cls")
    wanted = getattr(moved["__key__"].partitions[-1 if end == "tail" else 1].compute(), end)(2)
    few = getattr(moved.partitions[1:], end)(2, compute=False).persist()
    pd.testing.assert_series_equal(few.compute()["__key__"], wanted)


def test_what_is_persisted_is_not_decoded_again(ddf, work):  # noqa: F811
    kept = ddf.persist()
    decoded = work["decoded"]
    assert len(kept.shuffle("cls").compute()) == decoded == work["decoded"]


@pytest.mark.slow
def test_random_numbers_are_those_of_the_sample(shards):
    def flip(images):
        return fn.flip(images, horizontal=fn.random.coin_flip())

    ddf = read(shards, transform=flip)
    got = ddf.sort_values("width").set_index("__key__").compute()
    want = ddf.compute().set_index("__key__").loc[got.index]
    pd.testing.assert_series_equal(got.image, want.image)


def test_an_image_that_cannot_be_decoded_is_told_by_its_key(shards):
    with pytest.raises(ImageDecodeError, match=r"odd\.tar: the image of sample '(bad|none|twice)'"):
        read(shards, errors="raise").shuffle("cls").compute()


def test_pprint_tells_where_images_are_decoded(ddf, capsys):
    ddf.shuffle("cls").optimize(fuse=False).pprint()
    shown = capsys.readouterr().out
    assert "Decode: images=('image',)" in shown
    assert "ScanShards: " in shown


def test_a_partition_that_would_burst_is_refused_before_it_is_decoded(ddf, work, monkeypatch):  # noqa: F811
    monkeypatch.setattr(PandasBackend, "largest_partition", 10_000)
    with pytest.raises(PartitionTooLargeError, match="repartition"):
        ddf.shuffle("cls", npartitions=1).compute()
    assert work["decoded"] == 0


@pytest.mark.parametrize("how", ["shuffle", "sort", "merge", "set_index"])
def test_batches_of_moved_rows_need_no_persist(ddf, how):
    moved = MOVES[how](ddf)
    frame = moved.compute()
    want = [array for array in frame.images.arrays() if array is not None]
    got = np.concatenate([batch["image"] for batch in moved.images.iter_batches(5)])
    np.testing.assert_array_equal(got, np.stack(want))


def test_batches_move_rows_once(ddf, monkeypatch):
    from dask_image_ingest.dataset.scan import task

    read_shard, reads = task._read_shard, []

    def counted(split, *args):
        reads.append(split)
        return read_shard(split, *args)

    monkeypatch.setattr(task, "_read_shard", counted)
    assert sum(len(b["image"]) for b in ddf.shuffle("cls").images.iter_batches(5)) == PHOTOS
    assert len(reads) == ddf.npartitions


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("change", ["shorter", "as long", "gone"])
def test_a_shard_that_is_replaced_before_its_images_are_decoded_is_an_error(
    tmp_path, index, change
):
    paths = write_photo_shards(make_photos(8), tmp_path, 4)
    if index:
        dii.write_index(paths)
    ddf = read([*map(str, paths)], index=index).shuffle("cls")
    (decode,) = ddf.optimize(fuse=False).expr.find_operations(Decode)
    locations = new_collection(decode.frame).compute()
    assert len(decode_partition(locations, decode.images)) == 8
    changed = paths[1]
    content = changed.read_bytes()
    changed.unlink()
    if change == "as long":
        changed.write_bytes(content[:5000] + bytes(2000) + content[7000:])
        os.utime(changed, ns=(0, 10**18))
    elif change == "shorter":
        changed.write_bytes(content[:-512])
    error = ShardNotFoundError if change == "gone" else ShardError
    with pytest.raises(error, match=r"photos-001\.tar"):
        decode_partition(locations, decode.images)


@pytest.mark.slow
@pytest.mark.parametrize("photos", [2, 60])
def test_a_shard_behind_a_server_that_is_replaced_is_an_error(tmp_path, photos):
    (path,) = write_photo_shards(make_photos(photos), tmp_path, photos)
    content = path.read_bytes()
    with faulty_server(files={"/a.tar": content}) as server:
        ddf = read([f"{server.url}/a.tar"]).shuffle("cls")
        (decode,) = ddf.optimize(fuse=False).expr.find_operations(Decode)
        locations = new_collection(decode.frame).compute()
        want = read([str(path)]).compute().set_index("__key__").image
        got = decode_partition(locations, decode.images).set_index("__key__").image
        pd.testing.assert_series_equal(got.sort_index(), want.sort_index())
        server.files["/a.tar"] = content[:5000] + bytes(2000) + content[7000:]
        assert (len(content) > 64 << 10) == (photos == 60)  # or all of it comes at once
        with pytest.raises(ShardError, match="has changed since"):
            decode_partition(locations, decode.images)
