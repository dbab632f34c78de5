"""Parts of pictures that are encoded as members of new samples."""

import io
import json

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image
from witnesses import by_webdataset, shards_in

import dask_image_ingest as dii
from dask_image_ingest import Encode


@pytest.fixture
def refs(shards):
    return dii.read_webdataset_images(shards, decode=False, backend="pandas")


def samples(folder):
    found = by_webdataset(shards_in(folder))
    assert len(dict(found)) == len(found)
    return dict(found)


def pictures(photos):
    return {photo.key: photo for photo in photos}


@pytest.mark.parametrize("lazy", [True, False])
def test_tiles_become_samples_that_say_what_they_are(refs, photos, tmp_path, lazy):
    tiles = dii.decode_images(refs.images.tiles(100, overlap=10))
    tiles = tiles if lazy else tiles.compute()
    members = {"png": Encode("image"), "jpg": None, "webp": None}
    dii.to_webdataset(tiles, tmp_path / "{shard:03d}.tar", members=members, samples_per_shard=50)
    found, by_key = samples(tmp_path), pictures(photos)
    rows = tiles[["__key__", "__url__", "part.top", "part.left", "height", "width"]]
    rows = rows.compute() if lazy else rows
    assert len(found) == len(rows)
    places = {}
    for key, sample in found.items():
        part = json.loads(sample["json"])["part"]
        photo = by_key[part["key"]]
        assert key.rpartition("_")[0] == part["key"]
        top, left, height, width = (part[name] for name in ("top", "left", "height", "width"))
        places.setdefault(part["key"], []).append((int(key.rpartition("_")[2]), top, left))
        crop = photo.pixels[top : top + height, left : left + width]
        assert (np.asarray(Image.open(io.BytesIO(sample["png"]))) == crop).all()
        assert sample["txt"] == photo.caption.encode()
        assert json.loads(sample["json"])["similarity"] == photo.similarity
        assert part["page"] == 0
    for key, of_picture in places.items():
        assert sorted(of_picture) == [
            (n, *place) for n, (_, *place) in enumerate(sorted(of_picture, key=lambda p: p[1:]))
        ], key
    shards = {json.loads(sample["json"])["part"]["shard"] for sample in found.values()}
    assert shards == {*rows["__url__"]}


def test_exported_parts_read_as_whole_images(refs, tmp_path):
    tiles = dii.decode_images(refs.images.tiles(120))
    dii.to_webdataset(
        tiles,
        tmp_path / "{shard:03d}.tar",
        members={"png": Encode("image"), "jpg": None, "webp": None},
    )
    again = dii.read_webdataset_images(
        tmp_path,
        backend="pandas",
        json_fields={"part": "struct<key: string, top: int64, left: int64>"},
    ).compute()
    first = tiles.compute()
    assert "part.top" not in again.columns
    assert not again["__key__"].duplicated().any()
    place = again["json.part"].struct
    place = pd.DataFrame(
        {name: place.field(name).astype(object) for name in ("key", "top", "left")}
    )
    expected = {
        (key, top, left): image
        for key, top, left, image in zip(
            first["__key__"],
            first["part.top"],
            first["part.left"],
            first.images.arrays(),
            strict=True,
        )
    }
    for at, image in zip(
        place.itertuples(index=False, name=None), again.images.arrays(), strict=True
    ):
        assert (image == expected[at]).all()
    assert again[["height", "width"]].to_numpy(int).tolist() == [
        [*i.shape[:2]] for i in again.images.arrays()
    ]


def test_the_order_of_rows_does_not_change_exported_parts(refs, tmp_path):
    tiles = dii.decode_images(refs.images.tiles(100)).compute()
    members = {"png": Encode("image"), "jpg": None, "webp": None}
    written = [
        dii.to_webdataset(rows, tmp_path / name / "{shard:03d}.tar", members=members, shuffle=3)
        for name, rows in (("one", tiles), ("other", tiles.sample(frac=1, random_state=1)))
    ]
    assert written[0]["sha256"].tolist() == written[1]["sha256"].tolist()
    order = [*samples(tmp_path / "one")]
    assert order != sorted(order)


def test_boxes_become_samples(shards, photos, tmp_path):
    refs = dii.read_webdataset_images(shards, decode=False, backend="pandas").compute()
    type_ = pd.ArrowDtype(pa.list_(pa.list_(pa.float32())))
    refs["box"] = pd.Series([[[5, 7, 30, 20], [40, 10, 25, 35]]] * len(refs), refs.index, type_)
    crops = dii.decode_images(refs.explode("box"), box="box", box_format="xywh")
    assert crops["part.top"].tolist() == [7, 10] * len(refs)
    assert crops["height"].tolist() == [20, 35] * len(refs)
    members = [{"png": Encode("image"), "jpg": None, "webp": None}]
    dii.to_webdataset(crops, tmp_path / "{shard:03d}.tar", members=[*members, "all"], sidecar=None)
    found = samples(tmp_path)
    assert sorted(found) == sorted(f"{photo.key}_{n}" for photo in photos for n in (0, 1))
    for photo in photos:
        image = np.asarray(Image.open(io.BytesIO(found[f"{photo.key}_1"]["png"])))
        assert (image == photo.pixels[10:45, 40:65]).all()


def test_parts_are_not_written_as_the_whole_picture(refs, tmp_path):
    tiles = refs.images.tiles(100)
    for frame in (tiles, tiles.compute(), dii.decode_images(tiles)):
        with pytest.raises(dii.ArgumentError, match=r"images\.tiles|computed frame|are parts"):
            dii.to_webdataset(frame, tmp_path / "{shard:03d}.tar")
        with pytest.raises(dii.ArgumentError, match=r"part"):
            dii.to_parquet_images(frame, tmp_path / "tables")
    with pytest.raises(dii.ArgumentError, match="part"):
        dii.to_webdataset(tiles, tmp_path / "{shard:03d}.tar", members={"jpg": "image"})


def test_one_part_of_each_picture_is_not_written_as_the_whole_picture(refs, tmp_path):
    table = refs.compute()
    boxes = pd.Series([[1, 2, 30, 40]] * len(table), table.index, "list<float32>")
    boxed = dd.from_pandas(table.assign(box=boxes), 2)
    first = refs.images.tiles(10_000)
    first.to_parquet(tmp_path / "stored", write_index=False)
    stored = dd.read_parquet(tmp_path / "stored")
    crops = dii.decode_images(boxed, box="box")
    for frame in (first.persist(), stored, dii.decode_images(stored), crops):
        with pytest.raises(dii.ArgumentError, match=r"images\.tiles|box=.*stored images"):
            dii.to_webdataset(frame, tmp_path / "{shard:03d}.tar")
    dii.to_webdataset(crops.drop(columns=["image", "box"]), tmp_path / "{shard:03d}.tar")
    assert len(samples(tmp_path)) == len(table)


UNTOLD = {
    "references": lambda stored: stored,
    "persisted": lambda stored: stored.persist(),
    "pixels": dii.decode_images,
    "good pixels": lambda stored: (ddf := dii.decode_images(stored))[ddf.error.isna()],
    "shuffled": lambda stored: dii.decode_images(stored).shuffle("width"),
    "merged": lambda stored: stored.merge(stored[["__key__", "cls"]], on="__key__"),
    "computed": lambda stored: stored.compute(),
}


@pytest.mark.filterwarnings("ignore:The inplace keyword:Warning")  # of Dask
@pytest.mark.parametrize("kind", UNTOLD)
def test_parts_of_which_references_alone_tell_are_not_written_whole(kind, refs, photos, tmp_path):
    tiles = refs.images.tiles(60, edge="shift").compute()
    parts = tiles[~tiles["__key__"].duplicated()].drop(columns=["part.page", "part.top"])
    for name, rows in (("parts", parts), ("wholes", refs.compute())):
        dd.from_pandas(rows, 2).to_parquet(tmp_path / name, write_index=False)
    frame = UNTOLD[kind](dd.read_parquet(tmp_path / "parts"))
    with pytest.raises(dii.ArgumentError, match=r"parts of pictures.*Encode|images\.tiles"):
        dii.to_webdataset(frame, tmp_path / "out" / "{shard:03d}.tar")
    wholes = UNTOLD[kind](dd.read_parquet(tmp_path / "wholes"))
    dii.to_webdataset(wholes, tmp_path / "out" / "{shard:03d}.tar")
    found = samples(tmp_path / "out")
    assert {(key, f[p.extension]) for key, f in found.items() for p in photos if p.key == key} <= {
        (photo.key, photo.encoded) for photo in photos
    }
    assert found


def test_json_that_is_left_out_has_no_part(refs, tmp_path):
    tiles = dii.decode_images(refs.images.tiles(200))
    members = {"jpg": Encode("image"), "png": None, "webp": None, "json": None}
    dii.to_webdataset(tiles, tmp_path / "{shard:03d}.tar", members=members)
    assert all("json" not in sample and "jpg" in sample for sample in samples(tmp_path).values())
