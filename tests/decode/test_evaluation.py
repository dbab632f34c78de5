"""Evaluation as in torchvision and timm: shapes, crops and filters are those of its PIL path."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from corpus import images as corpus_images
from photo_shards import write_tar
from PIL import Image
from synthetic import encode, photograph

import dask_image_ingest as dii
from dask_image_ingest.decode.decode_spec import DecodeSpec
from dask_image_ingest.decode.resize import resize_geometry

FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

# Options of a read, and the arguments of torchvision's Resize and CenterCrop.
WAYS = {
    "crop": ({"size": 64, "resize": "crop"}, 64, (64, 64)),
    "shorter": ({"size": 64, "resize": "shorter"}, 64, None),
    "two steps": ({"size": 56, "resize": "crop", "crop_from": 64}, 64, (56, 56)),
    "not square": ({"size": (40, 64), "resize": "crop", "crop_from": 80}, 80, (40, 64)),
}


def resized_shape(height, width, size):
    """``_compute_resized_output_size`` of torchvision."""
    if not isinstance(size, int):
        return size
    short, long = (width, height) if width <= height else (height, width)
    new_short, new_long = size, int(size * long / short)
    return (new_long, new_short) if width <= height else (new_short, new_long)


def by_torchvision(image, size, crop, filter):
    """``Resize(size)`` of a PIL image, and ``CenterCrop(crop)`` as its ``center_crop`` has it."""
    height, width = resized_shape(*image.shape[:2], size)
    pixels = Image.fromarray(image).resize((width, height), FILTERS[filter])
    if crop is not None:
        top, left = round((height - crop[0]) / 2.0), round((width - crop[1]) / 2.0)
        pixels = pixels.crop((left, top, left + crop[1], top + crop[0]))
    return np.asarray(pixels)


def test_shapes_and_places_are_those_of_torchvision():
    edges = [1, 2, 3, 5, 8, 63, 64, 65, 127, 223, 224, 225, 333, 375, 500, 2047, 32767]
    for height, width in itertools.product(edges, repeat=2):
        for size in (1, 7, 63, 224, 256):
            whole = resized_shape(height, width, size)
            assert resize_geometry(height, width, (size,), "shorter").whole == whole
            for crop in (size, max(1, size - 31)):
                geometry = resize_geometry(height, width, (crop, crop), "crop", size)
                assert geometry.whole == whole
                assert geometry.start == tuple(round((edge - crop) / 2.0) for edge in whole)
            covering = resize_geometry(height, width, (size, size), "crop")
            assert covering == resize_geometry(height, width, (size, size), "crop", size)
            # Resize(None, max_size=size), which has no edge of 0.
            short, long = sorted((height, width))
            longer = resize_geometry(height, width, (size,), "longer").whole
            assert sorted(longer) == [max(1, int(size * short / long)), size]


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """Photographs that shrink, grow and are long, and every other kind of image."""
    shapes = [(90, 120), (150, 100), (50, 40), (64, 64), (80, 64), (60, 900), (700, 33)]
    shapes += [(s * 5 // 4, s * 3 // 2) for s in (64, 80)] + [(250, 333), (375, 500)]
    members = {f"photo-{n}": encode(photograph(*s, n)) for n, s in enumerate(shapes)}
    members |= dict(list(corpus_images().items())[::3])
    path = tmp_path_factory.mktemp("evaluation") / "a.tar"
    return str(write_tar(path, {f"{name}.img": data for name, data in members.items()}))


@pytest.fixture(scope="module")
def full(shard):
    """The images at their own size: what a PIL image of torchvision's path is made of."""
    ddf = dii.read_webdataset_images(shard, image="img", backend="pandas")
    return ddf.compute(scheduler="sync")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("filter", FILTERS)
def test_no_pixel_is_further_than_1_from_those_of_torchvision(shard, full, way, filter):
    options, *steps = WAYS[way]
    read = {"image": "img", "backend": "pandas"}
    made = dii.read_webdataset_images(shard, interpolation=filter, **options, **read)
    made = made.compute(scheduler="sync")
    differences = differences_from_torchvision(full, made, *steps, filter)
    assert max(one.max() for one in differences) <= 1
    assert len(differences) > 40


@pytest.mark.parametrize("filter", FILTERS)
def test_stretched_pixels_that_are_further_than_1_from_those_of_torchvision_are_rare(
    shard, full, filter
):
    made = dii.read_webdataset_images(
        shard, size=(48, 64), interpolation=filter, image="img", backend="pandas"
    ).compute(scheduler="sync")
    differences = np.concatenate(differences_from_torchvision(full, made, (48, 64), None, filter))
    assert differences.max() <= 2
    assert np.mean(differences > 1) < 1e-4


def differences_from_torchvision(full, made, size, crop, filter):
    """Absolute differences of the values of each image that could be decoded."""
    differences = []
    for key, image, ours in zip(
        full["__key__"], full.images.arrays(), made.images.arrays(), strict=True
    ):
        assert (image is None) == (ours is None)
        if image is not None:
            theirs = by_torchvision(image, size, crop, filter)
            assert ours.shape == theirs.shape, key
            differences.append(np.abs(ours.astype(int) - theirs).ravel())
    return differences


@pytest.mark.more
@pytest.mark.parametrize("filter", FILTERS)
def test_torchvision_itself_gives_the_same(shard, full, filter):
    transforms = pytest.importorskip("torchvision.transforms", exc_type=ImportError)
    mode = getattr(transforms.InterpolationMode, filter.upper())
    theirs = transforms.Compose([transforms.Resize(64, mode), transforms.CenterCrop(56)])
    read = {"image": "img", "backend": "pandas"}
    made = dii.read_webdataset_images(
        shard, size=56, resize="crop", crop_from=64, interpolation=filter, **read
    ).compute(scheduler="sync")
    for image, ours in zip(full.images.arrays(), made.images.arrays(), strict=True):
        if image is not None:
            expected = np.asarray(theirs(Image.fromarray(image)))
            assert np.abs(ours.astype(int) - expected).max() <= 1


def test_every_way_to_an_image_takes_the_filter_and_the_crop(shard):
    options = {"size": 40, "resize": "crop", "crop_from": 48, "interpolation": "lanczos"}
    read = {"image": "img", "backend": "pandas"}
    ddf = dii.read_webdataset_images(shard, **read, **options)
    expected = ddf.compute(scheduler="sync")
    later = dii.decode_images(dii.read_webdataset_images(shard, **read, decode=False), **options)
    several = dii.read_webdataset_images(
        shard, image={"image": "img", "half": dii.ImageColumn("img", size=20)}, **options
    ).compute(scheduler="sync")
    batches = later.images.iter_batches(7, columns=["__key__"], shuffle=1)
    batched = {
        key: image
        for batch in batches
        for key, image in zip(batch["__key__"], batch["image"], strict=True)
    }
    arrays = zip(expected["__key__"], expected.images.arrays(), strict=True)
    ours = {key: image for key, image in arrays if image is not None}
    assert batched.keys() == ours.keys()
    assert all(np.array_equal(batched[key], image) for key, image in ours.items())
    columns = [several[name].images.arrays() for name in ("image", "half")]
    for image, half, alone in zip(*columns, expected.images.arrays(), strict=True):
        if alone is not None:
            np.testing.assert_array_equal(image, alone)
            np.testing.assert_array_equal(half, alone[10:30, 10:30])


def test_the_filter_is_that_of_random_crops_and_of_buckets_too(shard):
    read = {"image": "img", "backend": "pandas"}

    def crops(filter):
        ddf = dii.read_webdataset_images(
            shard, size=32, augment="random_resized_crop", interpolation=filter, **read
        )
        return [a for a in ddf.compute(scheduler="sync").images.arrays() if a is not None]

    def buckets(filter):
        ddf = dii.read_webdataset_images(shard, interpolation=filter, **read)
        batches = ddf.images.iter_batches(4, columns=[], buckets=[(32, 48), (48, 32)])
        return [image for batch in batches for image in batch["image"]]

    for made in crops, buckets:
        linear, lanczos = made("bilinear"), made("lanczos")
        assert [image.shape for image in linear] == [image.shape for image in lanczos]
        assert not all(map(np.array_equal, linear, lanczos))


def test_other_filters_and_crops_are_other_queries():
    def token(**options):
        return DecodeSpec(size=(224, 224), resize="crop", **options).token

    tokens = [{}, {"interpolation": "bicubic"}, {"crop_from": 256}, {"crop_from": 257}]
    assert len({token(**options) for options in tokens}) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 224, "interpolation": "cubic"}, "interpolation='cubic'; choose 'bilinear', "),
        ({"size": 224, "crop_from": 256}, "crop_from=256: it is the shorter edge .*crop'"),
        ({"resize": "stretch", "crop_from": 256}, "crop_from=256: .*size=224, resize='crop'"),
        ({"size": 224, "resize": "crop", "crop_from": 200}, "crop_from=200.*at least the edges"),
        ({"size": 224, "resize": "crop", "crop_from": 1.5}, "crop_from=1.5"),
        ({"decode": False, "interpolation": "bicubic"}, "decode=False.*interpolation="),
    ],
)
def test_options_that_mean_nothing_are_refused(shard, options, message):
    with pytest.raises(dii.ArgumentError, match=message):
        dii.read_webdataset_images(shard, image="img", backend="pandas", **options)
