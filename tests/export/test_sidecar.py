"""What lies beside a shard: its columns as a table, and an index for DALI."""

from __future__ import annotations

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import wds2idx
from witnesses import shards_in

import dask_image_ingest as dii

# dask's read_parquet resets an index in a way that the newest pandas gives up.
pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword")


@pytest.fixture
def read(shards):
    return dii.read_webdataset_images(
        shards, backend="pandas", json_fields={"similarity": "float32"}
    )


def brightness(images):
    return {
        "bright": images.mean(axis=(1, 2, 3)),
        "vector": images.reshape(len(images), -1)[:, :4].astype(np.float32),
    }


def test_computed_columns_come_back_with_their_types(shards, tmp_path):
    read = dii.read_webdataset_images(shards, backend="pandas", size=16)
    outputs = {"bright": "float32", "vector": "list<float32>"}
    frame = read.images.map_batches(brightness, outputs)
    frame = frame.assign(even=frame["cls"] > 1)
    expected = frame.compute()
    dii.to_webdataset(frame, tmp_path / "{shard:03d}.tar", samples_per_shard=7)
    found = pd.concat(map(pd.read_parquet, sorted(tmp_path.glob("*.parquet"))), ignore_index=True)
    assert found.dtypes[["bright", "vector", "even"]].astype(str).tolist() == [
        "float[pyarrow]",
        "list<float32>",
        "bool[pyarrow]",
    ]
    expected = expected.drop(columns=["error", "__url__", "offset", "nbytes"])
    pd.testing.assert_frame_equal(
        found[expected.columns], expected.reset_index(drop=True), check_dtype=False
    )
    schema = pq.read_schema(tmp_path / "000.parquet")
    assert schema.field("bright").type == pa.float32()
    assert schema.field("height").type == pa.int32()


def test_locations_lead_to_the_images_in_the_new_shards(read, photos, tmp_path):
    frame = read[read.width > 120]
    dii.to_webdataset(frame, tmp_path / "{shard:03d}.tar", samples_per_shard=5, shuffle=1)
    original = {photo.key: photo.encoded for photo in photos}
    rows = dd.read_parquet(str(tmp_path / "*.parquet"))
    for row in rows.compute().to_dict("records"):
        assert row["__url__"].startswith(str(tmp_path))
        with open(row["__url__"], "rb") as file:
            file.seek(row["offset"])
            assert file.read(row["nbytes"]) == original[row["__key__"]]


def test_sidecars_are_a_frame_whose_images_can_be_decoded(read, photos, tmp_path):
    dii.to_webdataset(read, tmp_path / "{shard:03d}.tar", samples_per_shard=5)
    table = dd.read_parquet(str(tmp_path / "*.parquet"))
    wide = dii.decode_images(table[table["json.similarity"] > 0.5]).compute()
    pixels = {photo.key: photo.pixels for photo in photos if photo.similarity > 0.5}
    assert set(wide["__key__"]) == set(pixels)
    for key, array in zip(wide["__key__"], wide.images.arrays(), strict=True):
        assert array.shape == pixels[key].shape
        assert np.abs(array.astype(int) - pixels[key]).mean() < 3


def test_an_export_of_an_export_gives_the_same_shards(read, tmp_path):
    dii.to_webdataset(read, tmp_path / "a" / "{shard:03d}.tar", samples_per_shard=5)
    table = dd.read_parquet(str(tmp_path / "a" / "*.parquet"))
    dii.to_webdataset(table, tmp_path / "b" / "{shard:03d}.tar", samples_per_shard=5)
    for path in shards_in(tmp_path / "a"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_rows_without_an_image_point_nowhere(read, tmp_path):
    frame = read.drop(columns=["image", "error"])
    members = ["txt", {"webp": "txt"}]
    dii.to_webdataset(frame, tmp_path / "{shard:03d}.tar", members=members)
    found = pd.read_parquet(tmp_path / "000.parquet")
    # The photographs in webp have got another member of this name; all others have none.
    webp = found["format"] == "webp"
    assert (
        found.loc[webp, "nbytes"].tolist()
        == found.loc[webp, "txt"].str.encode("utf-8").str.len().tolist()
    )
    assert found.loc[~webp, ["offset", "nbytes"]].isna().all().all()


def test_a_named_index_is_a_column(read, tmp_path):
    frame = read.drop(columns=["image", "error"]).set_index("cls")
    dii.to_webdataset(frame, tmp_path / "{shard:03d}.tar")
    found = pd.read_parquet(tmp_path / "000.parquet")
    assert found["cls"].tolist() == sorted(found["cls"])


def test_without_sidecars_no_column_is_computed(read, tmp_path):
    def fail(series):
        raise AssertionError("computed")

    frame = read.assign(score=read["cls"].map_partitions(fail, meta=("score", "int64")))
    told = dii.to_webdataset(frame, tmp_path / "{shard:03d}.tar", sidecar=None)
    assert told["samples"].sum() == 24
    assert not list(tmp_path.glob("*.parquet"))


def test_the_index_is_that_of_wds2idx(read, tmp_path):
    dii.to_webdataset(read, tmp_path / "{shard:03d}.tar", samples_per_shard=5, index=True)
    for path in shards_in(tmp_path):
        theirs = tmp_path / "theirs.idx"
        creator = wds2idx.IndexCreator(str(path), str(theirs), verbose=False)
        creator.create_index()
        creator.close()
        assert path.with_suffix(".idx").read_text() == theirs.read_text()
