"""A shuffle of files: only the rows of the next steps are decoded, whatever the query."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
from counted import work  # noqa: F401  a fixture
from photo_shards import write_tar
from synthetic import write_shards

import dask_image_ingest as dii
from dask_image_ingest.loader.source import LazySource, once


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """8 shards of 24 photographs that decode to 43 MB each."""
    folder = tmp_path_factory.mktemp("large")
    return write_shards(folder, 8, 24, size=(700, 850), distinct=2)


@pytest.fixture(scope="module")
def shards(photos, tmp_path_factory):
    """20 shards of 0 to 9 members, of which some are no images; keys tell the shard."""
    folder = tmp_path_factory.mktemp("small")
    for shard in range(20):
        members = {"note.txt": b""}
        for number in range((shard * 7 + 3) % 10):
            photo = photos[(shard + number) % len(photos)]
            bad = (shard + number) % 5 == 1
            members[f"{shard:02d}-{number}.jpg"] = b"none" if bad else photo.encoded
            members[f"{shard:02d}-{number}.cls"] = str(shard).encode()
        write_tar(folder / f"{shard:02d}.tar", members)
    return folder


@pytest.fixture
def ddf(shards):
    return dii.read_webdataset_images(shards, size=16, backend="pandas")


def keys(batches):
    return [key for batch in batches for key in batch["__key__"]]


def good(ddf):
    frame = ddf.compute()
    return sorted(frame.loc[frame["image"].notna(), "__key__"])


def test_the_first_batch_comes_from_all_shards_and_decodes_little_more(large, work):  # noqa: F811
    ddf = dii.read_webdataset_images(large, backend="pandas")
    batches = ddf.images.iter_batches(48, shuffle=1, columns=["__url__"])
    first = next(batches)
    batches.close()
    assert len(set(first["__url__"])) >= 6
    assert work["decoded"] <= 2 * 48 == 8 * 24 / 2  # the step, and the one that is read ahead


def test_rows_are_counted_without_a_decode(ddf, work):  # noqa: F811
    rows = len(ddf[["__key__"]].compute())
    assert len(ddf.images.iter_batches(10, shuffle=1, columns=[])) == -(-rows // 10)
    assert not work["decoded"]


def test_a_shuffle_of_images_of_unknown_sizes_reads_the_references_once(shards, monkeypatch):
    begun = []
    read = LazySource.read

    def counted(self, number):
        begun.append(number)
        return read(self, number)

    monkeypatch.setattr(LazySource, "read", counted)
    paths = [shards / f"{number:02d}.tar" for number in (2, 3, 5)]
    ddf = dii.read_webdataset_images(paths, backend="pandas")
    batches = ddf.images.iter_batches(4, shuffle=1)
    assert sorted(key for batch in batches for key in batch["__key__"]) == good(ddf)
    assert sorted(begun) == [0, 1, 2]


def test_a_loader_keeps_its_own_facts_however_many():
    facts = {}
    for number in range(100):
        once(facts, ("rows", number), lambda: number + 1)  # noqa: B023
    assert [once(facts, ("rows", number), list) for number in range(100)] == list(range(1, 101))


def test_the_order_is_that_of_rows_in_memory(ddf):
    references = list(ddf.images.iter_batches(10, shuffle=1))
    persisted = list(ddf.persist().images.iter_batches(10, shuffle=1))
    for one, other in zip(references, persisted, strict=True):
        assert one["__key__"].tolist() == other["__key__"].tolist()
        np.testing.assert_array_equal(one["image"], other["image"])


def test_images_and_labels_stay_with_their_keys(ddf):
    frame = ddf.compute()
    images = dict(zip(frame["__key__"], frame.images.arrays(), strict=True))
    for batch in ddf.images.iter_batches(5, shuffle=3, columns=["__key__", "cls"]):
        for key, image, label in zip(batch["__key__"], batch["image"], batch["cls"], strict=True):
            np.testing.assert_array_equal(image, images[key])
            assert int(key[:2]) == label


@pytest.mark.parametrize(
    "query",
    [
        lambda ddf: ddf[ddf.error.isna()],
        lambda ddf: ddf[ddf.cls > 5],
        lambda ddf: ddf.assign(double=ddf.cls * 2).rename(columns={"image": "picture"}),
        lambda ddf: ddf[ddf.width > 10],
        lambda ddf: ddf.partitions[3:9],
        lambda ddf: ddf.head(10, npartitions=-1, compute=False),
        lambda ddf: ddf.images.map_batches(
            lambda images: images.mean((1, 2, 3)), {"mean": "float32"}, keep_image=True
        ),
        lambda ddf: ddf.shuffle("cls"),
        lambda ddf: ddf[~ddf["__key__"].str.slice(-1).isin(["0", "5"])],
    ],
    ids=["error", "filter", "assign", "header", "partitions", "head", "function", "moved", "isin"],
)
def test_any_query_gives_its_rows(ddf, query, work):  # noqa: F811
    wanted = query(ddf)
    frame = wanted.compute()
    image = wanted.images.column
    with_image = sorted(frame.loc[frame[image].notna(), "__key__"])
    got = keys(wanted.images.iter_batches(4, shuffle=2, columns=["__key__"]))
    assert sorted(got) == with_image


def test_reads_that_drop_bad_images(shards):
    ddf = dii.read_webdataset_images(shards, size=16, backend="pandas", errors="drop")
    assert sorted(keys(ddf.images.iter_batches(4, shuffle=2))) == good(ddf)


def test_several_image_columns(photos, tmp_path):
    for shard in range(4):
        write_tar(
            tmp_path / f"{shard}.tar",
            {
                f"{shard}-{number}.{kind}": photos[(number + add) % len(photos)].encoded
                for number in range(5)
                for add, kind in enumerate(["jpg", "two.jpg"])
            },
        )
    images = {"image": "jpg", "two": "two.jpg"}
    ddf = dii.read_webdataset_images(tmp_path, image=images, size=16, backend="pandas")
    frame = ddf.compute()
    for batch in ddf.images.iter_batches(3, shuffle=1, columns=["__key__", "two"]):
        for row, key in enumerate(batch["__key__"]):
            (found,) = np.flatnonzero(frame["__key__"] == key)
            for name in images:
                witness = frame.images[name].arrays()[found]
                np.testing.assert_array_equal(batch[name][row], witness)


def test_files_of_a_folder(photos, tmp_path):
    for number, photo in enumerate(photos):
        (tmp_path / f"{number:03d}.{photo.extension}").write_bytes(photo.encoded)
    ddf = dii.read_images(tmp_path, size=16, backend="pandas", partition_size="3 kB")
    assert ddf.npartitions > 6
    got = keys(ddf.images.iter_batches(4, shuffle=2))
    assert sorted(got) == sorted(f"{number:03d}" for number in range(len(photos)))
    assert got != sorted(got)


def test_shards_without_random_access_are_decoded_whole(photos, tmp_path, work):  # noqa: F811
    for shard in range(3):
        write_tar(tmp_path / "a.tar", {f"{shard}-{n}.jpg": photos[n].encoded for n in range(4)})
        (tmp_path / f"{shard}.tar.gz").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    ddf = dii.read_webdataset_images(tmp_path.glob("*.gz"), size=16, backend="pandas")
    before = work["walks"]
    assert len(set(keys(ddf.images.iter_batches(4, shuffle=2)))) == 12
    assert work["walks"] - before <= 6  # once to count


def test_rows_that_were_moved_are_not_moved_again_for_their_random_crops(shards, work):  # noqa: F811
    read = {"size": 16, "backend": "pandas"}
    walks = []
    for options in ({}, {"augment": "random_resized_crop"}):
        moved = dii.read_webdataset_images(shards, **read, **options).shuffle("cls")
        before = work["walks"]
        list(moved.images.iter_batches(4, columns=["__key__"], shuffle=2, epoch=1))
        walks.append(work["walks"] - before)
    plain, augmented = walks
    assert plain
    assert augmented == plain


def test_a_rule_of_isin_moves_no_rows(ddf, work):  # noqa: F811
    last = ddf["__key__"].str.slice(-1)
    ruled = ddf[~last.isin(["0", "5"])]
    work.clear()
    batches = ruled.images.iter_batches(4, columns=["__key__"])
    assert not work
    witness = ddf[~((last == "0") | (last == "5"))]
    assert keys(batches) == keys(witness.images.iter_batches(4, columns=["__key__"]))


@pytest.mark.parametrize("options", [{}, {"balance": "cls"}, {"buckets": [(16, 24), (24, 16)]}])
def test_rows_that_are_dropped_by_their_errors_are_counted_without_a_decode(
    shards,
    options,
    work,  # noqa: F811
):
    ddf = dii.read_webdataset_images(shards, size=16, backend="pandas", errors="drop")
    before = work["decoded"]
    batches = ddf.images.iter_batches(4, columns=["__key__"], shuffle=2, **options)
    assert len(batches) >= 6
    assert work["decoded"] == before
    got = keys(batches)
    assert set(got) <= set(good(ddf))
    if "balance" not in options:
        assert sorted(got) == good(ddf)
    assert work["decoded"] > before
