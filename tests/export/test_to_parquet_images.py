"""Parquet files of encoded images: the very bytes of the shards, and images to Hugging Face."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import subprocess
import sys

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
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
    images = {"image": "jpg", "mask": dii.ImageColumn("seg.png", mode="RGB")}
    return dii.read_webdataset_images(paths, image=images, decode=False, backend="pandas")


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


def test_frames_of_pixels_and_in_memory_are_written_by_their_locations(paths, members, tmp_path):
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


def load(files, tmp_path):
    return datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache")
    )


def test_datasets_opens_them_with_image_features(references, members, tmp_path):
    dii.to_parquet_images(references[["__key__", "image", "mask"]], tmp_path / "out")
    files = str(tmp_path / "out" / "*.parquet")
    loaded = load(files, tmp_path)
    assert isinstance(loaded.features["image"], datasets.Image)
    assert isinstance(loaded.features["mask"], datasets.Image)
    for row in loaded:
        want = Image.open(io.BytesIO(members[f"{row['__key__']}.jpg"]))
        assert np.array_equal(np.asarray(row["image"]), np.asarray(want))
        assert (row["mask"] is None) == (f"{row['__key__']}.seg.png" not in members)


def test_pandas_reads_them_where_this_package_is_not_imported(references, members, tmp_path):
    frame = references.assign(box=references.height.map(lambda n: [n], meta=(None, "list<int64>")))
    dii.to_parquet_images(frame[["__key__", "box", "image"]], tmp_path / "out")
    script = f"""
import hashlib, json, pandas
rows = pandas.read_parquet({str(tmp_path / "out")!r})
files = (hashlib.md5(image["bytes"]).hexdigest() for image in rows.image)
print(json.dumps(dict(zip(rows["__key__"], files))))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    want = {n[:3]: hashlib.md5(file).hexdigest() for n, file in members.items() if ".jpg" in n}
    assert json.loads(done.stdout) == want


def test_read_parquet_images_gives_the_same_pixels(references, paths, tmp_path):
    dii.to_parquet_images(references[["__key__", "image"]], tmp_path / "out")
    again = dii.read_parquet_images(str(tmp_path / "out"), backend="pandas").compute()
    want = dii.read_webdataset_images(paths, image="jpg", backend="pandas").compute()
    order = again.set_index("__key__").loc[want["__key__"], "image"].reset_index(drop=True)
    assert all(
        np.array_equal(one, other)
        for one, other in zip(order.to_frame().images.arrays(), want.images.arrays(), strict=True)
    )


@pytest.mark.parametrize("members", [("", "photo"), ("photo", ""), ("", "")])
def test_an_empty_file_stays_one(members, tmp_path):
    files = [{"": b"", "photo": encode(photograph(30, 40, 1))}[member] for member in members]
    shard = write_shard(tmp_path / "0.tar", {f"{n}.jpg": file for n, file in enumerate(files)})
    frame = dii.read_webdataset_images(shard, backend="pandas")
    dii.to_parquet_images(frame[["__key__", "image"]], tmp_path / "out")
    images = pq.read_table(tmp_path / "out")["image"].to_pylist()
    assert [image["bytes"] for image in images] == files
    again = dii.read_parquet_images(str(tmp_path / "out"), backend="pandas").compute()
    assert again["error"].tolist() == frame.compute()["error"].tolist()


def test_a_folder_with_files_is_refused_unless_overwritten(references, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    some = references[["__key__", "image"]]
    with pytest.raises(dii.ArgumentError, match="there are files already"):
        dii.to_parquet_images(some, tmp_path / "out")
    dii.to_parquet_images(some, tmp_path / "out", overwrite=True)
    assert len(pq.read_table(tmp_path / "out")) == 12


@pytest.mark.parametrize("column", ["image", "mask"])
def test_no_image_column_is_lost_after_a_filter_that_needs_its_decode(column, paths, tmp_path):
    images = {"image": "jpg", "mask": dii.ImageColumn("seg.png", mode="RGB")}
    frame = dii.read_webdataset_images(paths, image=images, backend="pandas")
    frame = frame[frame[column].notnull()][["__key__", "image", "mask"]]
    with pytest.raises(
        dii.ArgumentError, match=r"stored images of '(image|mask)' cannot be written"
    ):
        dii.to_parquet_images(frame, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_frame_without_references_is_refused(tmp_path):
    with pytest.raises(dii.ArgumentError, match="neither references nor the columns"):
        dii.to_parquet_images(pd.DataFrame({"a": [1]}), tmp_path / "out")


def test_all_images_of_a_read_that_decodes_are_written_as_they_are_stored(
    paths,
    members,
    tmp_path,
    work,  # noqa: F811
):
    images = {"image": "jpg", "mask": dii.ImageColumn("seg.png", mode="labels")}
    ddf = dii.read_webdataset_images(paths, image=images, backend="pandas", size=8)
    dii.to_parquet_images(ddf[ddf.width == 40], tmp_path / "out")
    check(tmp_path / "out", members, [f"{number:03d}" for number in range(12)])
    assert work["decoded"] == 0


@pytest.fixture
def hugging_face(members, tmp_path):
    """A parquet file as ``datasets`` writes it: photographs, classes and captions."""
    keys = [f"{number:03d}" for number in range(12)]
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "text": datasets.Value("string"),
        }
    )
    rows = {
        "image": [{"bytes": members[f"{key}.jpg"], "path": f"{key}.jpg"} for key in keys],
        "label": [number % 2 for number in range(12)],
        "text": [members[f"{key}.txt"].decode() for key in keys],
    }
    path = tmp_path / "hf.parquet"
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    return path, rows


def test_a_file_that_datasets_wrote_is_read_with_its_pixels_and_labels(hugging_face, tmp_path):
    path, rows = hugging_face
    frame = dii.read_parquet_images(path, backend="pandas").compute()
    assert frame.label.tolist() == rows["label"]
    assert frame.text.tolist() == rows["text"]
    loaded = load(str(path), tmp_path)
    for array, row in zip(frame.images.arrays(), loaded, strict=True):
        assert np.array_equal(array, np.asarray(row["image"]))


@pytest.mark.parametrize("decode", [True, False])
def test_classes_and_files_of_datasets_come_back_to_it(decode, hugging_face, tmp_path):
    path, rows = hugging_face
    ddf = dii.read_parquet_images(path, backend="pandas", decode=decode)
    dii.to_parquet_images(ddf[ddf.label == 1], tmp_path / "out")
    loaded = load(str(tmp_path / "out" / "*.parquet"), tmp_path)
    assert loaded.features["label"] == datasets.ClassLabel(names=["cat", "dog"])
    assert loaded["text"][:] == rows["text"][1::2]
    files = loaded.cast_column("image", datasets.Image(decode=False))["image"][:]
    assert [file["bytes"] for file in files] == [each["bytes"] for each in rows["image"][1::2]]


def test_folders_become_classes(members, tmp_path):
    for number in range(4):
        path = tmp_path / "pets" / ("cat", "dog")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(members[f"{number:03d}.jpg"])
    pets = dii.read_images(tmp_path / "pets", label="folder", backend="pandas")
    dii.to_parquet_images(pets[["image", "label"]].rename(columns={"label": "pet"}), tmp_path / "o")
    loaded = load(str(tmp_path / "o" / "*.parquet"), tmp_path)
    assert loaded.features["pet"] == datasets.ClassLabel(names=["cat", "dog"])
    assert loaded["pet"][:] == [0, 0, 1, 1]


@pytest.mark.parametrize(("least", "files"), [(35, 1), (99, 1)])
def test_a_partition_without_rows_is_no_file(least, files, references, members, tmp_path):
    some = references[references["height"] > least][["__key__", "image"]]
    dii.to_parquet_images(some, tmp_path / "out")
    paths = sorted((tmp_path / "out").glob("*.parquet"))
    assert [path.name for path in paths] == [f"part.{number}.parquet" for number in range(files)]
    assert len(pq.read_table(tmp_path / "out")) == len(some) == max(0, 41 - least)
    footers = [pq.read_metadata(path) for path in paths]
    assert all(f.row_group(n).num_rows for f in footers for n in range(f.num_row_groups))
    assert len(dii.read_parquet_images(tmp_path / "out")) == len(some)
    if len(some):
        assert len(load(str(tmp_path / "out" / "*.parquet"), tmp_path)) == len(some)


def test_a_second_writer_is_refused(references, tmp_path):
    out = tmp_path / "out"

    def second(frame):
        with pytest.raises(dii.ExportError, match=r"another run writes to .* \(process \d+ on"):
            dii.to_parquet_images(references[["image"]], out, overwrite=True)
        return frame

    first = references[["__key__", "image"]].partitions[[0]]
    dii.to_parquet_images(first.map_partitions(second, meta=first._meta), out)
    assert len(pq.read_table(out)) == 6


@pytest.mark.parametrize("had_one", [False, True])
def test_a_full_disk_is_told_and_leaves_what_was_there(had_one, references, tmp_path, monkeypatch):
    out, some = tmp_path / "out", references[["__key__", "image"]]
    if had_one:
        dii.to_parquet_images(some.partitions[[0]], out)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(dii.ExportError, match=f"{out}.* cannot be written: No space left"):
            dii.to_parquet_images(some, out, overwrite=True)
    assert not had_one or len(pq.read_table(out)) == 6
    assert not [path for path in out.glob("*") if "part" in path.name and not had_one]
    dii.to_parquet_images(some, out, overwrite=True)
    assert {path.name for path in out.iterdir()} == {
        "part.0.parquet", "part.1.parquet", "_manifest.json",
    }  # fmt: skip


def test_partitions_are_joined_without_a_decode(paths, members, tmp_path, work):  # noqa: F811
    images = {"image": "jpg", "mask": dii.ImageColumn("seg.png", mode="RGB")}
    frame = dii.read_webdataset_images(paths, image=images, backend="pandas", size=8)
    frame = frame[["__key__", "txt", "image", "mask"]].repartition(npartitions=1)
    dii.to_parquet_images(frame, tmp_path / "out")
    check(tmp_path / "out", members, [f"{number:03d}" for number in range(12)])
    assert [path.name for path in (tmp_path / "out").glob("*.parquet")] == ["part.0.parquet"]
    assert work["decoded"] == 0


def test_a_step_after_the_decode_is_named(paths, tmp_path):
    frame = dii.read_webdataset_images(paths, image="jpg", backend="pandas", size=8)
    frame = frame[frame["image"].notnull()][["image"]]
    with pytest.raises(dii.ArgumentError, match=r"'image' cannot be written: Filter comes after"):
        dii.to_parquet_images(frame, tmp_path / "out")


@pytest.mark.parametrize(
    "metadata",
    [
        b"\xff",
        b"{",
        b"[]",
        b"[" * 10_000,
        b'{"info": null}',
        b'{"info": {"features": {"label": 5}}}',
        b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": 5}}}}',
    ],
)
def test_features_that_are_none_are_left_out(metadata, members, tmp_path):
    table = pa.table({"image": [members["000.jpg"]], "label": [0]})
    pq.write_table(
        table.replace_schema_metadata({b"huggingface": metadata}), tmp_path / "a.parquet"
    )
    table = dii.read_parquet_images(tmp_path / "a.parquet", decode=False, backend="pandas")
    dii.to_parquet_images(table, tmp_path / "out")
    stored = pq.read_schema(tmp_path / "out" / "part.0.parquet").metadata[b"huggingface"]
    assert list(json.loads(stored)["info"]["features"]) == ["image"]
