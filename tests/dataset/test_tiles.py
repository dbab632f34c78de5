"""Tiles go through all that rows go through, and are decoded afterwards: their pixels are right."""

import io

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from photo_shards import write_tar
from PIL import Image

import dask_image_ingest as dii
from dask_image_ingest import curate

PLACE = ["__key__", "part.top", "part.left"]


@pytest.fixture(scope="module")
def expected(photos):
    """The pixels of each tile of 100 × 100, by its key and place."""
    return {
        (photo.key, top, left): photo.pixels[top : top + 100, left : left + 100]
        for photo in photos
        for top in range(0, photo.pixels.shape[0], 100)
        for left in range(0, photo.pixels.shape[1], 100)
    }


@pytest.fixture
def tiles(shards):
    refs = dii.read_webdataset_images(shards, decode=False, backend="pandas")
    return refs.images.tiles(100)


def check(frame, expected):
    """Every row has the pixels of its tile; returns the tiles."""
    found = [*frame[PLACE].itertuples(index=False, name=None)]
    for place, image in zip(found, frame.images.arrays(), strict=True):
        assert image.shape == expected[place].shape
        assert (image == expected[place]).all()
    return found


LABELS = pd.DataFrame({"part.top": pd.array([0, 100], "int32[pyarrow]"), "name": ["a", "b"]})


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # dask's own call of pandas 3.1
@pytest.mark.parametrize(
    ("operation", "kept"),
    [
        (lambda t: t, lambda place: True),
        (lambda t: t[t["part.top"] == 100], lambda place: place[1] == 100),
        (lambda t: t.shuffle("__key__", shuffle_method="tasks"), lambda place: True),
        (lambda t: t.shuffle("part.left", shuffle_method="disk"), lambda place: True),
        (lambda t: t.sort_values("part.left"), lambda place: True),
        (lambda t: t.merge(LABELS, on="part.top"), lambda place: place[1] < 200),
        (lambda t: t.repartition(npartitions=7), lambda place: True),
        (lambda t: t.drop_duplicates("__key__"), None),
        (lambda t: t.sample(frac=0.3, random_state=1), None),
        (lambda t: t.nlargest(5, "part.top"), None),
        (lambda t: dii.checkpoint(t, "stored"), lambda place: True),
        (
            lambda t: (t.to_parquet("parquet", write_index=False), dd.read_parquet("parquet"))[1],
            lambda place: True,
        ),
    ],
)
def test_moved_tiles_are_decoded_to_their_pixels(
    tiles, expected, operation, kept, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rows = operation(tiles)
    found = check(dii.decode_images(rows).compute(), expected)
    assert sorted(found) == sorted(rows[PLACE].compute().itertuples(index=False, name=None))
    if kept is not None:
        assert sorted(found) == sorted(filter(kept, expected))
    assert len(found)


@pytest.mark.parametrize(
    "move",
    [
        lambda d: d[d["part.top"] == 100],
        lambda d: d.shuffle("__key__"),
        lambda d: d.merge(LABELS, on="part.top"),
        lambda d: d.sample(frac=0.5, random_state=3),
    ],
)
def test_operations_after_the_decode_run_before_it(tiles, expected, move):
    decoded = move(dii.decode_images(tiles))
    plan = decoded.optimize(fuse=False).expr
    assert type(plan).__name__ != "Filter"
    check(decoded.compute(), expected)


def test_the_columns_locate_a_tile_without_its_reference(tiles, expected):
    columns = [*PLACE, "part.page", "height", "width", "__url__", "offset", "nbytes"]
    for rows in (tiles[columns], tiles[columns].compute()):
        frame = dii.decode_images(rows)
        frame = frame.compute() if rows is not frame and hasattr(frame, "compute") else frame
        assert len(check(frame, expected)) == len(expected)


@pytest.mark.parametrize("shuffle", [None, 5])
def test_batches_have_each_tile_once(tiles, expected, shuffle):
    decoded = dii.decode_images(tiles)
    batches = decoded.images.iter_batches(7, columns=[*PLACE, "image"], shuffle=shuffle)
    found = []
    for batch in batches:
        places = zip(*(batch[name] for name in PLACE), strict=True)
        for (key, top, left), image in zip(places, batch["image"], strict=True):
            found.append((key, int(top), int(left)))
            assert (image == expected[found[-1]]).all()
    assert sorted(found) == sorted(expected)
    assert (found == sorted(expected)) is (shuffle is None)


def test_functions_and_fingerprints_are_about_tiles(tiles, expected):
    decoded = dii.decode_images(tiles)
    means = decoded.images.map_batches(
        lambda images: [image.mean() for image in images], {"mean": "float64"}
    ).compute()
    for place, mean in zip(
        means[PLACE].itertuples(index=False, name=None), means["mean"], strict=True
    ):
        assert mean == pytest.approx(expected[place].mean())
    hashed = curate.compute_fingerprints(tiles, ["bytes"]).compute()
    assert hashed["fingerprint.bytes"].is_unique


@pytest.mark.parametrize("lazy", [True, False])
def test_duplicate_boxes_are_found_apart(tmp_path, photos, lazy):
    some = photos[:6]
    copies = {f"{p.key}{n}.{p.extension}": p.encoded for p in some for n in "ab"}
    write_tar(tmp_path / "twice.tar", copies)
    refs = dii.read_webdataset_images(tmp_path, decode=False, backend="pandas").compute()
    boxes = [
        [[5, 5, 45, 45], [30, 20, 70, 76], [w - 40, h - 40, w, h]]
        for h, w in zip(refs.height, refs.width, strict=True)
    ]
    type_ = pd.ArrowDtype(pa.list_(pa.list_(pa.float32())))
    refs["box"] = pd.Series(boxes, refs.index, type_)
    rows = refs.explode("box")
    rows = dd.from_pandas(rows, npartitions=3, sort=False) if lazy else rows
    found = curate.find_duplicates(dii.decode_images(rows, box="box"), by="pixels")
    found = found.compute() if lazy else found
    kept = found["duplicate.keep"].to_numpy(bool).reshape(len(some), 2, 3)
    assert (kept.sum(axis=1) == 1).all()


def test_a_box_of_a_tile_is_relative_to_it(shards, photos):
    refs = dii.read_webdataset_images(shards, decode=False, backend="pandas").compute()
    tiles = refs.images.tiles(60, edge="drop")
    boxes = pd.Series(
        [[10, 20, 40, 33]] * len(tiles), tiles.index, pd.ArrowDtype(pa.list_(pa.int32()))
    )
    crops = dii.decode_images(tiles.assign(box=boxes.array), box="box")
    assert crops["part.top"].tolist() == (tiles["part.top"] + 20).tolist()
    assert crops["part.left"].tolist() == (tiles["part.left"] + 10).tolist()
    assert crops[["height", "width"]].drop_duplicates().to_numpy(int).tolist() == [[13, 30]]
    whole = {photo.key: photo.pixels for photo in photos}
    for key, top, left, image in zip(
        *(crops[name] for name in PLACE), crops.images.arrays(), strict=True
    ):
        assert (image == whole[key][top : top + 13, left : left + 30]).all()


def test_thumbnails_show_the_tiles(tiles, expected):
    shown = dii.decode_images(tiles).images.show(4, columns=PLACE, size=100)
    html = shown._repr_html_()
    assert html.count("<img") == 4
    metadata = tiles.drop(columns="image")
    assert metadata.images.show(4, size=100)._repr_html_().count("100")


def test_a_damaged_picture_costs_each_of_its_tiles_with_a_reason(tmp_path, photos):
    photo = photos[0]
    damaged = photo.encoded[: len(photo.encoded) // 2]
    write_tar(tmp_path / "a.tar", {"a.jpg": damaged, "b.jpg": photo.encoded, "c.jpg": b"none"})
    refs = dii.read_webdataset_images(tmp_path / "a.tar", decode=False, backend="pandas")
    frame = dii.decode_images(refs.images.tiles(60)).compute()
    good = frame[frame["__key__"] == "b"]
    assert good.error.isna().all()
    bad = frame[frame["__key__"] == "a"]
    assert len(bad) == len(good)
    assert bad.error.notna().all()
    assert len(frame[frame["__key__"] == "c"]) == 1


def test_image_and_mask_have_the_same_tiles(tmp_path):
    random = np.random.default_rng(0)
    members, arrays = {}, {}
    for key, shape in (("a", (50, 70)), ("b", (33, 20))):
        image = random.integers(0, 255, (*shape, 3), np.uint8)
        mask = random.integers(0, 5, shape, np.uint8)
        for extension, array in (("png", image), ("seg.png", mask)):
            file = io.BytesIO()
            Image.fromarray(array).save(file, "PNG")
            members[f"{key}.{extension}"] = file.getvalue()
        arrays[key] = image, mask
    write_tar(tmp_path / "a.tar", members)
    refs = dii.read_webdataset_images(
        tmp_path / "a.tar",
        image={"image": "png", "mask": "seg.png"},
        decode=False,
        backend="pandas",
    )
    tiles = refs.images.tiles(32, image=["image", "mask"])
    rows = dii.decode_images(
        dii.decode_images(tiles, image="image"), image="mask", mode="labels"
    ).compute()
    assert len(rows) == 6 + 2
    assert rows["mask.part.top"].tolist() == rows["part.top"].tolist()
    for key, top, left, image, mask in zip(
        rows["__key__"],
        rows["part.top"],
        rows["part.left"],
        rows.images["image"].arrays(),
        rows.images["mask"].arrays(),
        strict=True,
    ):
        whole, labels = arrays[key]
        assert (image == whole[top : top + 32, left : left + 32]).all()
        assert (mask[:, :, 0] == labels[top : top + 32, left : left + 32]).all()
    assert len(refs.images.tiles(32)) == 8
