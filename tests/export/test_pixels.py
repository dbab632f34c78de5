"""What a frame shows is what leaves, or its user says otherwise."""

from __future__ import annotations

import io

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from PIL import Image
from synthetic import encode, photograph
from tars import tar
from witnesses import by_webdataset, shards_in

import dask_image_ingest as dii
from dask_image_ingest.errors import ArgumentError


@pytest.fixture
def ddf(shards):
    return dii.read_webdataset_images(shards, backend="pandas")


def black(images):
    return {"image": [np.zeros_like(image) for image in images]}


def blackened(ddf):
    return ddf.images.map_batches(black, {"image": "image"})


def export(frame, tmp_path, **options):
    options = {"row_errors": "drop"} | options
    return dii.to_webdataset(frame, tmp_path / "out" / "{shard}.tar", **options)


def written(tmp_path):
    return dict(by_webdataset(shards_in(tmp_path / "out")))


LABEL = pd.DataFrame({"cls": pd.array([1], "int64[pyarrow]"), "n": [1]})

LOCATION_COLUMNS = ["__key__", "__url__", "offset", "nbytes"]

OTHERS = {
    "function": (lambda shards: blackened(read(shards)), r"map_batches\(.*black"),
    "size": (lambda shards: read(shards, size=32), "read_webdataset_images with size="),
    "crop": (
        lambda shards: read(shards, size=32, augment="random_resized_crop"),
        "read_webdataset_images with size=, augment=",
    ),
    "mode": (lambda shards: read(shards, mode="L"), "read_webdataset_images with mode="),
    "late": (
        lambda shards: dii.decode_images(read(shards).drop(columns="image"), size=32),
        "decode_images with size=",
    ),
    "partitions": (lambda shards: read(shards).map_partitions(as_it_is), "as_it_is"),
    "computed": (lambda shards: read(shards).compute(), "a computed frame"),
    "optimized": (
        lambda shards: read(shards, size=32).optimize(),
        "read_webdataset_images with size=",
    ),
    "filled": (lambda shards: blackened(read(shards)).fillna({"txt": ""}), "black"),
    "sorted": (lambda shards: blackened(read(shards)).sort_values("width"), "black"),
    "joined": (
        lambda shards: read(shards)[["__key__", "__url__", "offset"]].merge(
            blackened(read(shards))[["__key__", "image"]], on="__key__"
        ),
        "black",
    ),
    "renamed": (
        lambda shards: blackened(read(shards)).rename(columns={"image": "picture"}),
        "the pixels of 'picture' come from map_batches",
    ),
    "assigned": (
        lambda shards: assigned(read(shards), blackened(read(shards))),
        "black",
    ),
}


def read(shards, **options):
    return dii.read_webdataset_images(shards, backend="pandas", **options)


def as_it_is(frame):
    return frame


def assigned(ddf, other):
    return ddf.assign(image=other["image"])


@pytest.mark.parametrize("name", OTHERS)
def test_pixels_that_are_not_the_stored_ones_are_refused(name, shards, tmp_path):
    make, maker = OTHERS[name]
    frame = make(shards)
    with pytest.raises(ArgumentError, match=maker) as error:
        export(frame, tmp_path)
    assert "members={'jpg': '" in str(error.value)
    assert "drop(columns='" in str(error.value)
    assert not (tmp_path / "out").exists()


PLAIN = {
    "read": lambda ddf: ddf,
    "filtered": lambda ddf: ddf[ddf.width > 100].sort_values("width"),
    "filtered by errors": lambda ddf: dii.read_webdataset_images(
        ddf["__url__"].unique().compute().tolist(),
        filters=[("error", "in", [None])],
        backend="pandas",
    ),
    "scored": lambda ddf: ddf.images.map_batches(lambda x: [i.mean() for i in x], {"m": "float"}),
    "joined": lambda ddf: ddf.merge(LABEL, on="cls"),
    "late": lambda ddf: dii.decode_images(ddf.drop(columns="image")),
    "split": lambda ddf: ddf.random_split([0.5, 0.5], random_state=0)[0],
    "loc of a mask": lambda ddf: ddf.loc[ddf.cls == 1],
    "loc of labels": lambda ddf: ddf.loc[slice(*ddf.index.compute()[[2, 5]])],
    "largest": lambda ddf: ddf.nlargest(5, "height"),
    "first": lambda ddf: ddf.sort_values("height").head(5, compute=False),
    "without nulls": lambda ddf: ddf.fillna({"txt": ""}).dropna(subset=["cls"]),
    "other types": lambda ddf: ddf.astype({"cls": "int32", "height": "float64"}),
    "other values": lambda ddf: ddf.replace({"cls": {1: 7}}).round({"json.similarity": 1}),
    "copied": lambda ddf: ddf.copy().reset_index(drop=True).partitions[:2],
    "distinct": lambda ddf: ddf.drop_duplicates(subset=["cls"]).to_backend("pandas"),
    "optimized": lambda ddf: ddf[ddf.width > 100].assign(n=1).optimize(),
    "optimized and scored": lambda ddf: ddf.images.map_batches(
        lambda x: [i.mean() for i in x], {"m": "float"}
    ).optimize(),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_frame_of_the_stored_pixels_is_copied_as_before(name, ddf, photos, tmp_path):
    export(PLAIN[name](ddf), tmp_path)
    stored = {photo.key: photo.members for photo in photos}
    found = written(tmp_path)
    assert found
    assert all(members == stored[key] for key, members in found.items())


@pytest.mark.parametrize("name", ["function", "size", "mode"])
def test_dropping_the_column_says_that_the_stored_images_are_meant(name, shards, photos, tmp_path):
    export(OTHERS[name][0](shards).drop(columns="image"), tmp_path)
    assert written(tmp_path) == {photo.key: photo.members for photo in photos}


def test_members_without_an_image_are_copied_whatever_the_pixels_are(ddf, tmp_path):
    export(blackened(ddf), tmp_path, members="txt;json")
    assert {name for members in written(tmp_path).values() for name in members} == {"txt", "json"}


@pytest.mark.parametrize("extension", ["jpg", "jpeg", "png", "webp"])
@pytest.mark.parametrize("computed", [False, True])
def test_pixels_take_the_place_of_the_stored_image(extension, computed, ddf, photos, tmp_path):
    frame = blackened(ddf)
    frame = frame.compute() if computed else frame
    export(frame, tmp_path, members={extension: "image"})
    found = written(tmp_path)
    stored = {photo.key: photo for photo in photos if photo.pixels is not None}
    assert set(found) == set(stored)  # a bad image is a row that is left out
    for key, members in found.items():
        image = Image.open(io.BytesIO(members.pop(extension)))
        assert image.format == {"jpg": "JPEG"}.get(extension, extension.upper())
        assert np.asarray(image).max() == 0
        assert image.size == stored[key].pixels.shape[1::-1]
        others = set(stored[key].members) - {stored[key].extension, extension}
        assert set(members) == others  # and the stored one is not beside it


def test_png_keeps_every_pixel_and_the_sidecar_tells_of_it(ddf, tmp_path):
    rng = np.random.default_rng(4)
    sizes = {}

    def noise(images):
        made = [rng.integers(0, 256, (i.shape[0] // 2, 7, 1), "uint8") for i in images]
        return {"image": made}

    frame = ddf[ddf.error.isna()].images.map_batches(noise, {"image": "image"}).compute()
    for key, array in zip(frame["__key__"], frame.images.arrays(), strict=True):
        sizes[key] = array.copy()
    export(frame, tmp_path, members={"png": "image"})
    found = written(tmp_path)
    for key, array in sizes.items():
        image = Image.open(io.BytesIO(found[key]["png"]))
        assert (np.asarray(image) == array[:, :, 0]).all()
    side = pd.concat([pd.read_parquet(path) for path in (tmp_path / "out").glob("[0-9]*.parquet")])
    for _, row in side.iterrows():
        assert (row["height"], row["width"], row["channels"]) == sizes[row["__key__"]].shape
        assert row["format"] == "png"
        with open(row["__url__"], "rb") as shard:
            shard.seek(row["offset"])
            assert shard.read(row["nbytes"]) == found[row["__key__"]]["png"]
    again = dii.read_webdataset_images(tmp_path / "out", backend="pandas").compute()
    assert (
        again["nbytes"].tolist()
        == side.set_index("__key__").loc[again["__key__"], "nbytes"].tolist()
    )


def test_a_mask_beside_its_image(ddf, photos, tmp_path):
    def mask(images):
        return {"mask": [image[..., :1] // 128 * 255 for image in images]}

    masked = ddf.images.map_batches(mask, {"mask": "image"})[[*LOCATION_COLUMNS, "mask"]]
    with pytest.raises(ArgumentError, match="the pixels of 'mask' come from map_batches"):
        export(masked, tmp_path)
    export(masked, tmp_path, members={"mask.png": "mask"})
    stored = {photo.key: photo for photo in photos}
    for key, members in written(tmp_path).items():
        made = members.pop("mask.png", None)
        assert members == stored[key].members  # the image too
        assert (made is None) == (stored[key].pixels is None)
        if made is not None:
            assert set(np.unique(np.asarray(Image.open(io.BytesIO(made))))) <= {0, 255}


@pytest.mark.parametrize("members", [{"txt": "image"}, {"json": ["image"]}, {"tif": "image"}])
def test_pixels_are_no_text(members, ddf, tmp_path):
    with pytest.raises(ArgumentError, match="image"):
        export(ddf, tmp_path, members=members)


def test_an_edited_function_does_not_go_on_with_the_old_pixels(tmp_path, ddf):
    first, second = (
        blackened(ddf),
        ddf.images.map_batches(
            lambda images: {"image": [np.full_like(i, 9) for i in images]}, {"image": "image"}
        ),
    )
    export(first, tmp_path, members={"png": "image"})
    with pytest.raises(dii.errors.ExportError, match="the frame is another one"):
        export(second, tmp_path, members={"png": "image"}, resume=True)


def test_a_sample_without_an_image_stays_without(tmp_path):
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    (tmp_path / "in.tar").write_bytes(tar({"a.png": picture.getvalue(), "b.txt": b"b"}))
    ddf = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    export(blackened(ddf), tmp_path, members={"jpg": "image"})
    assert {key: list(members) for key, members in written(tmp_path).items()} == {
        "a": ["jpg"],
        "b": ["txt"],
    }


CLASSES = (0, 1, 9, 200)


@pytest.fixture
def masked(tmp_path):
    """Four photographs, each with a mask of one class."""
    members = {}
    for number, value in enumerate(CLASSES):
        members[f"{number}.jpg"] = encode(photograph(30, 40, number))
        mask = Image.fromarray(np.full((30, 40), value, np.uint8))
        members[f"{number}.seg.png"] = encode(mask, "png")
    (tmp_path / "masked.tar").write_bytes(tar(members))
    return members


def read_masked(tmp_path, size=None):
    mask = dii.ImageColumn("seg.png", mode="labels", size=size)
    images = {"image": "jpg", "mask": mask}
    return dii.read_webdataset_images(tmp_path / "masked.tar", image=images, backend="pandas")


ELSEWHERE = {
    "renamed": lambda ddf: ddf.rename(columns={"mask": "m"}),
    "remapped": lambda ddf: ddf.images["mask"].map_batches(
        lambda masks: [mask + 1 for mask in masks], {"mask": "image"}, keep_image=True
    )[[*LOCATION_COLUMNS, "image", "mask"]],
    "computed": lambda ddf: ddf.drop(columns="image").compute(),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_an_error_advises_for_masks_replaces_no_photograph(name, masked, tmp_path):
    frame = ELSEWHERE[name](read_masked(tmp_path, 8))
    with pytest.raises(ArgumentError, match=r"members={'.*png': '.*'}") as error:
        export(frame, tmp_path, row_errors="raise")
    extension, column = str(error.value).partition("members={'")[2].partition("'}")[0].split("': '")
    export(frame, tmp_path, row_errors="raise", members={extension: column})
    for key, members in written(tmp_path).items():
        assert members["jpg"] == masked[f"{key}.jpg"]
        value = CLASSES[int(key)] + (name == "remapped")
        assert set(np.asarray(Image.open(io.BytesIO(members[extension]))).flat) == {value}


@pytest.mark.parametrize("extension", ["seg.jpg", "seg.webp", "jpg"])
@pytest.mark.parametrize("name", ["renamed", "remapped"])
def test_labels_are_written_as_png_alone(extension, name, masked, tmp_path):
    frame = ELSEWHERE[name](read_masked(tmp_path))
    with pytest.raises(ArgumentError, match=r"would change its labels: pass members={'seg.png'"):
        export(frame, tmp_path, members={extension: frame.columns[-1]})


def test_a_mask_does_not_take_the_place_of_the_photograph(masked, tmp_path):
    with pytest.raises(ArgumentError, match="take the place of the sample's own image"):
        export(read_masked(tmp_path), tmp_path, members={"png": "mask"})
    # The other way round it is a photograph beside a mask.
    images = {"image": "seg.png", "photo": dii.ImageColumn("jpg", size=8)}
    ddf = dii.read_webdataset_images(tmp_path / "masked.tar", image=images, backend="pandas")
    export(ddf, tmp_path, members={"jpg": "photo"}, row_errors="raise")
    for key, members in written(tmp_path).items():
        assert members["seg.png"] == masked[f"{key}.seg.png"]
        assert Image.open(io.BytesIO(members["jpg"])).size == (8, 8)


@pytest.mark.parametrize("channels", [1, 4])
def test_webp_of_grey_images_and_of_alpha_keeps_every_value(channels, ddf, tmp_path):
    rng = np.random.default_rng(channels)
    noise = rng.integers(0, 256, (24, 30, channels), "uint8")
    made = ddf.head(3).images.map_batches(
        lambda images: {"image": [noise for _ in images]}, {"image": "image"}
    )
    export(made, tmp_path, members={"webp": "image"})
    for members in written(tmp_path).values():
        image = Image.open(io.BytesIO(members["webp"]))
        kept = np.asarray(image.convert("RGBA"))[..., :channels]
        assert (kept == noise).all()


def test_an_image_with_alpha_is_copied_whether_its_alpha_is_shown_or_not(tmp_path):
    picture = io.BytesIO()
    Image.fromarray(np.arange(256, dtype="uint8").reshape(8, 8, 4)).save(picture, "PNG")
    (tmp_path / "in.tar").write_bytes(tar({"a.png": picture.getvalue()}))
    for mode in ("RGB", "RGBA"):
        ddf = read(tmp_path / "in.tar", mode=mode)
        export(ddf, tmp_path / mode)
        assert written(tmp_path / mode) == {"a": {"png": picture.getvalue()}}
    flipped = read(tmp_path / "in.tar", mode="RGBA").images.map_batches(
        lambda images: [image[::-1] for image in images], {"image": "image"}
    )
    with pytest.raises(ArgumentError, match=r"members={'png': 'image'}"):
        export(flipped, tmp_path / "flipped")


def test_pixels_of_parquet_files_are_told_in_plain_words(ddf, tmp_path):
    ddf.to_parquet(tmp_path / "pixels", write_index=False)
    again = dd.read_parquet(tmp_path / "pixels")
    with pytest.raises(ArgumentError, match=r"pixels of 'image' come from dd.read_parquet, and"):
        export(again, tmp_path)
