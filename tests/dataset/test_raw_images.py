"""Depth, floats and colours of ``mode="raw"`` keep each value through all that moves rows."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from synthetic import write_shard

import dask_image_ingest as dii
from dask_image_ingest import ArgumentError

IMAGES = {
    "image": "jpg",
    "depth": dii.ImageColumn("depth.png", mode="raw"),
    "flow": dii.ImageColumn("flow.tiff", mode="raw"),
}


def encode(array, format):
    file = io.BytesIO()
    Image.fromarray(array).save(file, format)
    return file.getvalue()


def write_collection(folder, random, shards=3, per_shard=6):
    """Photographs with a depth map of 16 bits and a flow in floats; some lack one of them."""
    wanted, paths = {}, []
    for shard in range(shards):
        members = {}
        for number in range(shard * per_shard, (shard + 1) * per_shard):
            height, width = random.integers(1, 24, 2)
            photo = random.integers(0, 256, (height, width, 3), np.uint8)
            depth = random.integers(0, 1 << 16, (height, width)).astype(np.uint16)
            flow = random.standard_normal((height, width)).astype(np.float32)
            members[f"{number:04d}.jpg"] = encode(photo, "jpeg")
            if number % 5 != 4:
                members[f"{number:04d}.depth.png"] = encode(depth, "png")
            if number % 7 != 6:
                members[f"{number:04d}.flow.tiff"] = encode(flow, "tiff")
            wanted[f"{number:04d}"] = (
                None if number % 5 == 4 else depth[..., None],
                None if number % 7 == 6 else flow[..., None],
            )
        paths.append(str(write_shard(folder / f"{shard}.tar", members)))
    return paths, wanted


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    return write_collection(tmp_path_factory.mktemp("raw"), np.random.default_rng(0))


@pytest.fixture
def ddf(collection):
    return dii.read_webdataset_images(collection[0], image=IMAGES, backend="pandas")


def check(frame, wanted):
    assert sorted(frame["__key__"]) == sorted(wanted)
    columns = (frame.images[name].arrays() for name in ("depth", "flow"))
    for key, *found in zip(frame["__key__"], *columns, strict=True):
        for array, want in zip(found, wanted[key], strict=True):
            assert (array is None) == (want is None)
            if want is not None:
                assert (array.dtype, array.shape) == (want.dtype, want.shape)
                assert array.tobytes() == want.tobytes()


def test_a_read_gives_every_value_as_stored(ddf, collection):
    check(ddf.compute(), collection[1])


@pytest.mark.rounds(3, nightly=200)
def test_moved_and_stored_values_are_those_of_the_collection(seed, tmp_path):
    paths, wanted = write_collection(tmp_path, np.random.default_rng(seed))
    ddf = dii.read_webdataset_images(paths, image=IMAGES, backend="pandas")
    moves = [
        lambda frame: frame.shuffle("__key__", npartitions=4),
        lambda frame: frame.sort_values("nbytes"),
        lambda frame: frame.repartition(npartitions=2),
        lambda frame: frame.merge(pd.DataFrame({"__key__": list(wanted), "fold": 1}), on="__key__"),
        lambda frame: frame.persist(),
    ]
    random = np.random.default_rng(seed)
    if random.random() < 0.5:
        ddf = dii.checkpoint(ddf, str(tmp_path / "kept"))
    for place in random.permutation(len(moves))[:3]:
        ddf = moves[place](ddf)
    frame = ddf.compute()
    check(frame, wanted)
    frame.to_parquet(tmp_path / "frame.parquet")
    check(pd.read_parquet(tmp_path / "frame.parquet"), wanted)


def test_an_export_writes_the_stored_files_again(ddf, collection, tmp_path):
    dii.to_webdataset(ddf, tmp_path / "out" / "{shard:03d}.tar")
    again = dii.read_webdataset_images(
        str(tmp_path / "out" / "*.tar"), image=IMAGES, backend="pandas"
    )
    check(again.compute(), collection[1])


def test_batches_and_stacks_are_of_the_stored_type(collection, ddf):
    deep = dii.read_webdataset_images(
        collection[0], image="depth.png", mode="raw", backend="pandas"
    )
    one = deep[deep["__key__"] == "0000"]
    want = collection[1]["0000"][0]
    (batch,) = one.images.iter_batches(4, columns=[])
    assert batch["image"].dtype == np.uint16
    assert np.array_equal(batch["image"][0], want)
    stacked = one.images.stack(dtype="uint16")
    assert stacked.dtype == stacked.compute().dtype == np.uint16
    with pytest.raises(ArgumentError, match="an image is of uint16, and not uint8: pass dtype="):
        one.images.stack().compute()


def test_a_function_gets_and_gives_values_of_every_type(collection):
    deep = dii.read_webdataset_images(
        collection[0], image="depth.png", mode="raw", errors="drop", backend="pandas"
    )

    def in_metres(images):
        return [image.astype(np.float32) / 1000 for image in images]

    made = deep.images.map_batches(in_metres, {"metres": "image"}).compute()
    for key, metres in zip(made["__key__"], made.images["metres"].arrays(), strict=True):
        want = collection[1][key][0].astype(np.float32) / 1000
        assert metres.dtype == np.float32
        assert np.array_equal(metres, want)


def test_depth_of_one_channel_is_encoded_as_a_png_of_16_bits(collection):
    deep = dii.read_webdataset_images(
        collection[0], image="depth.png", mode="raw", errors="drop", backend="pandas"
    ).compute()
    for key, data in zip(deep["__key__"], deep.images.encode("png"), strict=True):
        assert np.array_equal(
            np.asarray(Image.open(io.BytesIO(data))), collection[1][key][0][..., 0]
        )


def test_what_is_for_eight_bits_refuses_other_values(collection):
    deep = dii.read_webdataset_images(
        collection[0], image="depth.png", mode="raw", errors="drop", backend="pandas"
    )
    frame = deep.head(1)
    with pytest.raises(ArgumentError, match="channel_stats counts values of uint8"):
        frame.images.channel_stats()
    with pytest.raises(ArgumentError, match="jpeg takes uint8"):
        frame.images.encode("jpeg")
    with pytest.raises(ArgumentError, match="normalize= is for values from 0 to 255"):
        list(frame.images.iter_batches(1, normalize=(0.5, 0.5), columns=[]))
    with pytest.raises(dii.FunctionError, match="curate takes images of 1 or 3 channels of uint8"):
        dii.curate.measure_quality(frame)
    with pytest.raises(ArgumentError, match="takes neither size= nor transform="):
        dii.read_webdataset_images(collection[0], image="depth.png", mode="raw", size=8)


def test_depth_is_shown_from_its_least_to_its_largest_value(tmp_path):
    ramp = np.linspace(1000, 1255, 64).astype(np.uint16)[None].repeat(64, axis=0)
    path = write_shard(tmp_path / "a.tar", {"0.depth.png": encode(ramp, "png")})
    ddf = dii.read_webdataset_images(str(path), image="depth.png", mode="raw", backend="pandas")
    (image,) = ddf.images.thumbnails(64).compute().images.arrays()
    assert np.array_equal(image[..., 0], ramp - 1000)
    picture = Image.open(io.BytesIO(ddf.head(1)["image"].iloc[0]._repr_png_()))
    assert picture.getextrema() == (0, 255)
