"""``stack`` and ``vectors`` of partitions without rows, and the shape that a query tells."""

from __future__ import annotations

from typing import ClassVar

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from counted import work  # noqa: F401  a fixture
from photo_shards import encode, write_tar
from PIL import Image
from small_frames import lazy_frame, small_frame

import dask_image_ingest as dii

KEYS = [f"{shard}-{row}" for shard in range(4) for row in range(3)]


@pytest.fixture(scope="module")
def same_size(tmp_path_factory):
    """Four shards of three pictures, all 6 pixels high and 8 wide."""
    folder = tmp_path_factory.mktemp("same")
    for shard in range(4):
        members = {}
        for row in range(3):
            value = shard * 3 + row
            picture = Image.fromarray(np.full((6, 8, 3), value, np.uint8))
            members[f"{shard}-{row}.png"] = encode(picture, "png")
            members[f"{shard}-{row}.txt"] = f"number {value}".encode()
        write_tar(folder / f"{shard}.tar", members)
    return folder


def some(frame, which):
    """Rows of some partitions only, told by keys, so that the others are empty."""
    return frame[frame["__key__"].isin([key for key in KEYS if int(key[0]) in which])]


SOURCES = {
    "the size is asked for": lambda path: read(path, size=(6, 8)),
    "the images have one size": lambda path: read(path),
    "late decode": lambda path: dii.decode_images(read(path).drop(columns=["image", "error"])),
    "persisted": lambda path: read(path).persist(),
    "mapped": lambda path: read(path).map_partitions(lambda part: part),
    "another filter": lambda path: read(path)[read(path).txt.str.contains("number")],
    "shuffled": lambda path: read(path).shuffle("__key__"),
    "no errors": lambda path: read(path)[read(path).error.isna()],
}


def read(path, **options):
    return dii.read_webdataset_images(path, backend="pandas", **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "which"),
    [
        *((source, {1, 2}) for source in SOURCES),
        *(("another filter", which) for which in ({0}, {3}, {0, 3})),
        *((source, set()) for source in ("the images have one size", "late decode", "shuffled")),
    ],
    ids=str,
)
def test_partitions_without_rows_are_stacked_with_the_others(same_size, source, which):
    stacked = some(SOURCES[source](same_size), which).images.stack()
    want = [KEYS.index(key) for key in KEYS if int(key[0]) in which]
    got = stacked.compute()
    assert len(got) == len(want)
    if which:
        assert got.shape[1:] == (6, 8, 3)
        assert sorted(got[:, 0, 0, 0]) == want
        np.testing.assert_allclose(stacked.mean(axis=(0, 1, 2)).compute(), [np.mean(want)] * 3)
        assert stacked.sum(axis=0).compute().shape == (6, 8, 3)


def test_no_image_is_decoded_twice_where_the_shape_is_told(same_size, work):  # noqa: F811
    for frame, options in ((read(same_size, size=8), {}), (read(same_size), {"shape": (6, 8, 3)})):
        work.clear()
        some(frame, {0, 2}).images.stack(**options).sum().compute()
        assert work["decoded"] == 6


def test_one_image_is_decoded_twice_where_it_is_not(same_size, work):  # noqa: F811
    frame = read(same_size)
    # Where only the decode tells which rows there are, the first of each partition is decoded.
    for good, firsts in ((frame, 1), (frame[frame.error.isna()], 2)):
        work.clear()
        some(good, {0, 2}).images.stack().sum().compute()
        assert work["decoded"] == 6 + firsts
    for late, decoded in ((True, 12 + 1), (False, 12)):
        work.clear()
        with dask.config.set({"image-ingest.decode-late": late}):
            frame[frame.txt.str.contains("number")].images.stack().sum().compute()
        assert work["decoded"] == decoded


def test_a_shape_that_is_told_is_checked(same_size):
    frame = read(same_size)
    stacked = frame.images.stack(shape=(6, 8, 3))
    assert stacked.shape[1:] == (6, 8, 3)
    assert stacked.compute().shape == (12, 6, 8, 3)
    for wrong in (frame.images.stack(shape=(8, 6, 3)),):
        with pytest.raises(dii.ArgumentError, match=r"the shape \(6, 8, 3\), and not \(8, 6, 3\)"):
            wrong.compute()
    with pytest.raises(dii.ArgumentError, match="and not"):
        frame.compute().images.stack(shape=(6, 8, 1))
    for shape in (6, (6, 8), (6, 8, 0), (6, 8, 3.0), "hwc"):
        with pytest.raises(dii.ArgumentError, match="shape="):
            frame.images.stack(shape=shape)


def mean(images):
    return images.mean(axis=(1, 2)).astype("float32")


CALLS: list[int] = []


def counted(images):
    CALLS.append(len(images))
    return mean(images)


@pytest.mark.slow
@pytest.mark.parametrize("which", [{0}, {3}, {1, 2}, set()], ids=str)
def test_partitions_without_rows_have_vectors_too(same_size, which):
    CALLS.clear()
    embedded = read(same_size).images.map_batches(counted, {"v": "list<float32>"}, keep_image=True)
    lazy = some(embedded, which)
    got = lazy.images.vectors("v").compute()
    assert sum(CALLS) == len(got) == 3 * len(which)
    if which:
        assert got.shape[1:] == (3,)
        np.testing.assert_allclose(got, lazy.compute().images.vectors("v"))
        total = lazy.images.vectors("v").sum(axis=0).compute()
        np.testing.assert_allclose(total, got.sum(axis=0))
    batches = list(lazy.images.iter_batches(2, columns=["v"]))
    assert sum(len(batch["v"]) for batch in batches) == len(got)
    shuffled = list(lazy.images.iter_batches(2, columns=["v"], shuffle=1))
    assert sum(len(batch["v"]) for batch in shuffled) == len(got)


def test_a_null_before_the_first_vector_is_no_vector(same_size):
    embedded = read(same_size).images.map_batches(mean, {"v": "list<float32>"})
    parts = [part.compute() for part in embedded.partitions]
    parts[0].loc[:, "v"] = None
    lazy = dd.from_map(lambda part: part, parts, meta=parts[0].iloc[:0])
    assert lazy[lazy.v.notnull()].images.vectors("v").compute().shape == (9, 3)


class TestShape:
    """What ``stack().shape`` says before anything is computed."""

    @pytest.fixture(scope="class")
    @staticmethod
    def frames(same_size):
        """Reads of two sizes, of grey images, and the table that late decode begins with."""
        table = read(same_size).drop(columns=["image", "error"])
        return {
            "small": read(same_size, size=4),
            "large": read(same_size, size=16),
            "grey": read(same_size, size=4, mode="L"),
            "own": read(same_size),
            "table": table,
            "late": dii.decode_images(table, size=10),
        }

    CERTAIN: ClassVar = {
        "read": lambda f: f["small"],
        "columns": lambda f: f["small"][["__key__", "image"]],
        "rows": lambda f: f["small"][f["small"].txt.str.contains("7")],
        "partitions": lambda f: f["small"].partitions[1:3],
        "shuffle": lambda f: f["small"].shuffle("__key__"),
        "sort_values": lambda f: f["small"].sort_values("__key__"),
        "set_index": lambda f: f["small"].set_index("__key__"),
        "reset_index": lambda f: f["small"].reset_index(),
        "repartition": lambda f: f["small"].repartition(npartitions=2),
        "dropna": lambda f: f["small"].dropna(subset=["txt"]),
        "sample": lambda f: f["small"].sample(frac=0.9, random_state=1),
        "head": lambda f: f["small"].head(2, compute=False),
        "drop": lambda f: f["small"].drop(columns=["txt"]),
        "rename": lambda f: f["small"].rename(columns={"image": "picture", "txt": "image"}),
        "assign": lambda f: f["small"].assign(image2=1, width=2),
        "assigned": lambda f: f["small"].assign(picture=f["small"].image).drop(columns=["image"]),
        "assigned again": lambda f: f["small"].assign(image=f["small"].image),
        "merge": lambda f: f["small"][["__key__", "image"]].merge(f["table"], on="__key__"),
        "merge from the right": lambda f: f["table"].merge(
            f["small"][["__key__", "image"]], on="__key__"
        ),
        "merge with another read": lambda f: f["small"][["__key__", "image"]].merge(
            f["late"][["__key__", "error"]], on="__key__"
        ),
        "concat": lambda f: dd.concat([f["small"], f["small"].partitions[:1]]),
        "map_batches": lambda f: f["small"].images.map_batches(
            mean, {"v": "list<float32>"}, keep_image=True
        ),
    }

    @pytest.mark.slow
    def test_it_is_told_where_it_is_certain(self, frames):
        shapes = {}
        for name, make in self.CERTAIN.items():
            stacked = make(frames).images.stack()
            shapes[name] = stacked.shape[1:], stacked.compute().shape[1:]
        assert shapes == dict.fromkeys(self.CERTAIN, ((4, 4, 3), (4, 4, 3)))

    NOT_CERTAIN: ClassVar = {
        "persisted": (lambda f: f["small"].persist(), (4, 4, 3)),
        "own size": (lambda f: f["own"], (6, 8, 3)),
        "late decode of a read": (lambda f: f["late"], (10, 10, 3)),
        "concat of two sizes": (lambda f: dd.concat([f["small"], f["large"]]), None),
        "concat of persisted": (lambda f: dd.concat([f["large"].persist(), f["small"]]), None),
        "concat with grey": (lambda f: dd.concat([f["small"], f["grey"]]), None),
        "concat with another": (
            lambda f: dd.concat([f["small"], dd.from_pandas(f["large"].compute(), 1)]),
            None,
        ),
        "replaced by unknown": (
            lambda f: f["small"].assign(image=f["small"].map_partitions(other)),
            (2, 5, 3),
        ),
        "mapped": (lambda f: f["small"].map_partitions(smaller), (2, 2, 3)),
        "mapped with its meta": (
            lambda f: f["small"].map_partitions(smaller, meta=f["small"]._meta),
            (2, 2, 3),
        ),
        "mapped and persisted": (
            lambda f: f["small"].map_partitions(smaller, meta=f["small"]._meta).persist(),
            (2, 2, 3),
        ),
        "thumbnails": (lambda f: f["small"].images.thumbnails(2, resize="crop"), (2, 2, 3)),
        "merge of two": (
            lambda f: (
                f["small"][["__key__", "image"]]
                .merge(f["large"][["__key__", "image"]], on="__key__")
                .rename(columns={"image_y": "y"})[["y"]]
            ),
            (16, 16, 3),
        ),
        "persisted with more": (
            lambda f: f["small"][f["small"].txt.str.contains("7")].persist(),
            (4, 4, 3),
        ),
    }

    @pytest.mark.slow
    @pytest.mark.parametrize("name", NOT_CERTAIN)
    def test_it_is_never_another_than_the_one_that_comes(self, frames, name):
        frame, shape = self.NOT_CERTAIN[name]
        stacked = frame(frames).images.stack()
        declared = stacked.shape[1:]
        parts = stacked.to_delayed().ravel()
        for part in parts if shape else parts[:1]:
            for said, is_ in zip(declared, part.compute().shape[1:], strict=True):
                assert np.isnan(said) or said == is_
        if shape:
            assert stacked.compute().shape[1:] == shape
        else:
            with pytest.raises(dii.ArgumentError, match="images of partitions differ in shape"):
                stacked.compute()

    @pytest.mark.slow
    def test_persisted_on_a_cluster_it_is_found(self, frames, client):
        empty = client.persist(some(frames["own"], {1}))
        stacked = client.compute(empty.images.stack()).result()
        assert stacked.shape == (3, 6, 8, 3)


def smaller(part):
    return part.images.thumbnails(2, resize="crop")


def other(part):
    """A column of images that no query knows of."""
    return small_frame([1] * len(part), (2, 5, 3))["image"].set_axis(part.index)


def test_a_frame_of_frames_has_no_wrong_shape_either():
    lazy = lazy_frame([small_frame(range(2), (2, 3, 3)), small_frame(range(2), (4, 3, 3))])
    assert np.isnan(lazy.images.stack().shape[1])
    with pytest.raises(dii.ArgumentError, match="no image"):
        lazy_frame([small_frame(range(2), bad={1})]).images.stack().compute()
    assert isinstance(lazy.compute(), pd.DataFrame)


@pytest.mark.slow
@pytest.mark.parametrize("errors", ["null", "drop"])
@pytest.mark.parametrize("n", [1, 2, 5, 8, 12])
def test_a_head_of_good_rows_decodes_few_and_is_the_head(tmp_path, work, errors, n):  # noqa: F811
    good = encode(Image.new("RGB", (8, 6)), "png")
    members = {f"{row:02d}.png": b"none" if row in (0, 3, 4) else good for row in range(40)}
    write_tar(tmp_path / "a.tar", members)
    frame = read(tmp_path, errors=errors)
    frame = frame if errors == "drop" else frame[frame.error.isna()]
    head = frame.head(n)
    assert work["decoded"] <= 3 * n + 3
    pd.testing.assert_frame_equal(head[["__key__"]], frame.compute().head(n)[["__key__"]])
    assert [array.shape for array in head.images.arrays()] == [(6, 8, 3)] * n
