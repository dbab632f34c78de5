"""The images of a sample are transformed by the same random numbers, wherever each is stored."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd
import pytest
from corpus import save
from photo_shards import write_tar
from PIL import Image

import dask_image_ingest as dii
from dask_image_ingest.dask_internals import new_collection
from dask_image_ingest.dataset.references import last_decode

pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")

COUNT = 24
LABELS = np.array([0, 1, 9, 200], np.uint8)


def geometry(images):
    """Crops, flips and turns that leave every value as it is."""
    from nvidia.dali import fn, types

    angle = fn.random.uniform(range=(-40.0, 40.0))
    images = fn.rotate(
        images, angle=angle, interp_type=types.INTERP_NN, keep_size=True, fill_value=0
    )
    images = fn.flip(images, horizontal=fn.random.coin_flip())
    x, y = fn.random.uniform(range=(0.0, 1.0)), fn.random.uniform(range=(0.0, 1.0))
    return fn.crop(images, crop=(12, 12), crop_pos_x=x, crop_pos_y=y)


@pytest.fixture(scope="module")
def pairs():
    """Pictures whose channels are the labels of their masks, as PNG."""
    random = np.random.default_rng(3)
    labels = [LABELS[random.integers(4, size=(30, 40))] for _ in range(COUNT)]
    pictures = [np.repeat(each[:, :, None], 3, axis=2) for each in labels]
    return [
        tuple(save(Image.fromarray(array), "PNG") for array in pair)
        for pair in zip(pictures, labels, strict=True)
    ]


def check(frame, image="image", mask="mask"):
    """Every picture shows its mask; the masks were not all drawn alike."""
    pictures, masks = (frame.images[name].arrays() for name in (image, mask))
    assert len(pictures) == COUNT
    alike = [np.array_equal(p[:, :, :1], m) for p, m in zip(pictures, masks, strict=True)]
    assert sum(alike) == COUNT
    assert len({array.tobytes() for array in masks}) == COUNT


def test_a_folder_of_photographs_and_one_of_masks(pairs, tmp_path):
    for number, files in enumerate(pairs):
        for kind, data in zip(("photos", "masks"), files, strict=True):
            path = tmp_path / kind / f"{number % 3}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    read = partial(dii.read_images, backend="pandas", transform=geometry)
    photos, masks = read(tmp_path / "photos"), read(tmp_path / "masks", mode="labels")
    masks = masks[["__key__", "image"]].rename(columns={"image": "mask"})
    for each in (photos, photos[photos["nbytes"] > 0].sort_values("nbytes")):
        check(each.merge(masks, on="__key__").compute())


def test_columns_of_bytes_of_a_frame_with_keys(pairs):
    frame = pd.DataFrame(pairs, columns=["image", "mask"]).assign(__key__=[*map(str, range(COUNT))])
    frame = dii.decode_images(frame, image="image", transform=geometry)
    check(dii.decode_images(frame, image="mask", mode="labels", transform=geometry))


def test_a_seed_of_its_own_keeps_an_operator_from_shifting_the_others(pairs):
    def shaded(images, **seed):
        from nvidia.dali import fn

        shade = fn.random.uniform(range=(0.99, 1.01), **seed)
        return geometry(fn.cast_like(images * fn.cast_like(shade > 0, images), images))

    frame = pd.DataFrame(pairs, columns=["image", "mask"]).assign(__key__=[*map(str, range(COUNT))])
    frame = dii.decode_images(frame, image="image", transform=partial(shaded, seed=7))
    check(dii.decode_images(frame, image="mask", mode="labels", transform=geometry))


@pytest.fixture(scope="module")
def shards(pairs, tmp_path_factory):
    """Three shards with the pairs."""
    folder = tmp_path_factory.mktemp("drawn")
    for shard in range(3):
        files = {
            f"{number}.{kind}": data
            for number in range(shard, COUNT, 3)
            for kind, data in zip(("png", "seg.png"), pairs[number], strict=True)
        }
        write_tar(folder / f"{shard}.tar", files)
    return folder


def test_the_rows_of_a_loader_get_the_numbers_of_their_draw(shards, seed):
    """Whatever rows they are decoded with, and in which order; the mask of each gets the same."""
    mask = dii.ImageColumn("seg.png", mode="labels", transform=geometry)
    ddf = dii.read_webdataset_images(
        shards, image={"image": "png", "mask": mask}, transform=geometry, backend="pandas"
    )
    decode = last_decode(ddf.expr)
    assert decode.is_random
    rows = new_collection(decode.rows).compute().reset_index(drop=True)

    def pictures(positions, draws):
        frame = decode.function(rows.iloc[positions], draws)
        arrays = [frame.images[name].arrays() for name in ("image", "mask")]
        assert all(np.array_equal(p[:, :, :1], m) for p, m in zip(*arrays, strict=True))
        return [array.tobytes() for array in arrays[1]]

    plain = pictures(np.arange(COUNT), None)
    assert plain == pictures(np.arange(COUNT), np.zeros(COUNT, np.uint64))
    draws = np.array([0, 1, 2**63 + 5], np.uint64)
    alone = {
        (row, draw): picture
        for draw in draws.tolist()
        for row, picture in enumerate(pictures(np.arange(COUNT), np.full(COUNT, draw, np.uint64)))
    }
    assert len({*alone.values()}) == len(alone)
    random = np.random.default_rng(seed)
    for count in (1, 7, 64):
        some, drawn = random.integers(COUNT, size=count), random.choice(draws, count)
        got = pictures(some, drawn)
        assert got == [alone[pair] for pair in zip(some.tolist(), drawn.tolist(), strict=True)]
