"""Parquet files of encoded images: the very bytes of the shards, and images to Hugging Face."""

from __future__ import annotations

import io
import json

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from counted import work  # noqa: F401  a fixture
from PIL import Image
from synthetic import encode, photograph, write_shard

import dask_image_ingest as dii

pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword:Warning")  # of Dask


@pytest.fixture(scope="module")
def members():
    """What lies in two shards: photographs, masks of most of them, captions."""
    found = {}
    for number in range(12):
        key = f"{number:03d}"
        found[f"{key}.jpg"] = encode(photograph(30 + number, 40, number))
        if number % 3:
            mask = Image.fromarray(np.full((30 + number, 40), number, np.uint8))
            found[f"{key}.seg.png"] = encode(mask, "png")
        found[f"{key}.txt"] = f"picture {number}".encode()
    return found


@pytest.fixture(scope="module")
def paths(members, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    names = list(members)
    halves = [n for n in names if n < "006"], [n for n in names if n >= "006"]
    return [
        str(write_shard(folder / f"{shard}.tar", {name: members[name] for name in half}))
        for shard, half in enumerate(halves)
    ]


@pytest.fixture(scope="module")
def references(paths):
    images = {"image": "jpg", "mask": "seg.png"}
    return dii.read_webdataset_images(paths, images=images, decode=False, backend="pandas")


def check(folder, members, keys):
    table = pq.read_table(folder)
    assert sorted(table["__key__"].to_pylist()) == sorted(keys)
    for row in table.to_pylist():
        key = row["__key__"]
        assert row["image"] == {"bytes": members[f"{key}.jpg"], "path": key}
        mask = members.get(f"{key}.seg.png")
        assert row["mask"] == (mask and {"bytes": mask, "path": key})
        assert row["txt"].encode() == members[f"{key}.txt"]
    return table


def test_files_hold_the_bytes_of_the_members_and_nothing_is_decoded(
    references,
    members,
    tmp_path,
    work,  # noqa: F811
):
    some = references[references["height"] > 33].shuffle("height")
    dii.to_parquet_images(some[["__key__", "txt", "image", "mask"]], tmp_path / "out")
    check(tmp_path / "out", members, [f"{number:03d}" for number in range(4, 12)])
    assert work["decoded"] == 0


def test_frames_of_pixels_and_in_memory_are_written_by_their_pointers(paths, members, tmp_path):
    ddf = dii.read_webdataset_images(paths, image="jpg", size=8, backend="pandas")
    for number, frame in enumerate((ddf, ddf.compute())):
        dii.to_parquet_images(frame, tmp_path / str(number))
        table = pq.read_table(tmp_path / str(number))
        assert "error" not in table.column_names
        told = {row["__key__"]: row["image"]["bytes"] for row in table.to_pylist()}
        assert told == {f"{n:03d}": members[f"{n:03d}.jpg"] for n in range(12)}


def test_the_schema_names_images_as_hugging_face_does(references, members, tmp_path):
    dii.to_parquet_images(references[["__key__", "txt", "image", "mask"]], tmp_path / "out")
    table = check(tmp_path / "out", members, [f"{number:03d}" for number in range(12)])
    told = json.loads(table.schema.metadata[b"huggingface"])
    assert told["info"]["features"] == {"image": {"_type": "Image"}, "mask": {"_type": "Image"}}
    assert str(table.schema.field("image").type) == "struct<bytes: binary, path: string>"


def test_datasets_opens_them_with_image_features(references, members, tmp_path):
    datasets = pytest.importorskip("datasets")
    dii.to_parquet_images(references[["__key__", "image", "mask"]], tmp_path / "out")
    files = str(tmp_path / "out" / "*.parquet")
    loaded = datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache")
    )
    assert isinstance(loaded.features["image"], datasets.Image)
    assert isinstance(loaded.features["mask"], datasets.Image)
    for row in loaded:
        want = Image.open(io.BytesIO(members[f"{row['__key__']}.jpg"]))
        assert np.array_equal(np.asarray(row["image"]), np.asarray(want))
        assert (row["mask"] is None) == (f"{row['__key__']}.seg.png" not in members)


def test_read_parquet_images_gives_the_same_pixels(references, paths, tmp_path):
    dii.to_parquet_images(references[["__key__", "image"]], tmp_path / "out")
    again = dii.read_parquet_images(str(tmp_path / "out"), backend="pandas").compute()
    want = dii.read_webdataset_images(paths, image="jpg", backend="pandas").compute()
    order = again.set_index("__key__").loc[want["__key__"], "image"].reset_index(drop=True)
    assert all(
        np.array_equal(one, other)
        for one, other in zip(order.to_frame().images.arrays(), want.images.arrays(), strict=True)
    )


def test_a_folder_with_files_is_refused_unless_overwritten(references, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    some = references[["__key__", "image"]]
    with pytest.raises(dii.ArgumentError, match="there are files already"):
        dii.to_parquet_images(some, tmp_path / "out")
    dii.to_parquet_images(some, tmp_path / "out", overwrite=True)
    assert len(pq.read_table(tmp_path / "out")) == 12


def test_a_frame_without_references_is_refused(tmp_path):
    with pytest.raises(dii.ArgumentError, match="neither references nor the columns"):
        dii.to_parquet_images(pd.DataFrame({"a": [1]}), tmp_path / "out")
