"""Masks keep their classes and pictures their alpha, beside Pillow's own reading of them."""

from __future__ import annotations

import io
from functools import partial

import numpy as np
import pytest
from handmade import png
from loop_over import loop_over
from nvidia.dali import fn, types
from photo_shards import write_tar
from PIL import Image
from small_frames import small_frame

import dask_image_ingest as dii
from dask_image_ingest.decode.formats import BadImage
from dask_image_ingest.decode.pillow import decode_with_pillow

CLASSES = np.kron(np.array([[0, 1, 2], [9, 200, 255]]), np.ones((7, 9), int)).astype(np.uint8)


def decode(data, mode="labels"):
    return decode_with_pillow(data, mode, 10**6)


def saved(image, format="PNG", **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def palette(values):
    image = Image.fromarray(values, "L").convert("P")
    image.putdata(values.reshape(-1).tolist())
    image.putpalette(np.random.default_rng(0).integers(0, 256, 768).tolist())
    return image


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (Image.new("RGB", (4, 4)), "labels in the mode RGB: these are colours"),
        (Image.fromarray(np.full((4, 4), 300, np.uint16)), "labels from 300 to 300"),
    ],
)
def test_what_is_no_label_is_an_error_of_its_row(image, said):
    with pytest.raises(BadImage, match=said):
        decode(saved(image))


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """Photographs with masks of two formats, of which one is in colours."""
    members = {}
    for number, image in enumerate((Image.fromarray(CLASSES), palette(CLASSES))):
        members[f"{number}.jpg"] = saved(Image.fromarray(CLASSES), "JPEG")
        members[f"{number}.seg.png"] = saved(image)
    members["2.jpg"] = saved(Image.fromarray(CLASSES), "JPEG")
    members["2.seg.png"] = saved(Image.new("RGB", (9, 7)))
    return write_tar(tmp_path_factory.mktemp("masks") / "masks.tar", members)


def masks(shard, **options):
    return dii.read_webdataset_images(
        shard, image="seg.png", mode="labels", backend="pandas", **options
    )


def test_a_resize_takes_the_nearest_pixel_as_pillow_does(shard):
    table = masks(shard, size=(30, 50)).compute()
    wanted = np.asarray(Image.fromarray(CLASSES).resize((50, 30), Image.Resampling.NEAREST))
    arrays = table.images.arrays()
    for array in arrays[:2]:
        np.testing.assert_array_equal(array[..., 0], wanted)
    assert arrays[2] is None
    assert "these are colours" in table["error"].iloc[2]


def test_labels_are_resized_by_the_nearest_pixel(shard):
    (mask, *_) = masks(shard, size=(30, 50)).compute().images.arrays()
    wanted = np.asarray(Image.fromarray(CLASSES).resize((50, 30), Image.Resampling.NEAREST))
    np.testing.assert_array_equal(mask[..., 0], wanted)
    with pytest.raises(dii.ArgumentError, match="resize='nearest'; choose"):
        dii.read_webdataset_images(shard, image="jpg", size=8, resize="nearest")


@loop_over("resize", ["stretch", "crop", "pad", "shorter", "longer"])
@loop_over("size", [5, 11, 64])
def test_no_resize_makes_a_class_and_masks_fit_their_photographs(shard, resize, size):
    table = masks(shard, size=size, resize=resize).compute()
    photos = dii.read_webdataset_images(
        shard, image="jpg", size=size, resize=resize, backend="pandas"
    ).compute()
    pairs = zip(table.images.arrays()[:2], photos.images.arrays()[:2], strict=True)
    for mask, photo in pairs:
        assert mask.shape == (*photo.shape[:2], 1)
        assert {*np.unique(mask)} <= {*np.unique(CLASSES), 0}


def test_masks_of_a_dataframe_are_joined_and_written_and_read_again(shard, tmp_path):
    good = masks(shard, errors="drop")
    dii.to_webdataset(good, tmp_path / "{shard}.tar", members={"seg.png": "image"})
    again = masks(tmp_path / "0.tar").compute()
    for array in again.images.arrays():
        np.testing.assert_array_equal(array[..., 0], CLASSES)
    photos = dii.read_webdataset_images(shard, image="jpg", backend="pandas")
    both = photos[["__key__", "image"]].merge(
        good[["__key__", "image"]].rename(columns={"image": "mask"}), on="__key__"
    )
    table = both.compute()
    assert len(table) == 2
    shapes = {array.shape for array in table[["mask"]].images.arrays()}
    assert shapes == {(*CLASSES.shape, 1)}


def test_the_transparent_colour_of_a_palette_is_transparent():
    data = saved(palette(CLASSES), transparency=9)
    alpha = decode(data, "RGBA")[..., 3]
    np.testing.assert_array_equal(alpha == 0, CLASSES == 9)


@loop_over("interlaced", [False, True])
@loop_over(
    "bits, colour",
    [
        *((bits, 0) for bits in (1, 2, 4, 8, 16)),
        *((bits, 3) for bits in (1, 2, 4, 8)),
        (8, 2),
        (16, 2),
    ],
)
def test_the_transparent_colour_of_a_png_is_transparent_at_any_depth(bits, colour, interlaced, rng):
    channels = 3 if colour == 2 else 1
    draw = np.random.default_rng(rng.randrange(1 << 30))
    few = draw.integers(0, 1 << bits, (4, channels))  # of 16 bits, some with equal upper bytes
    few = np.concatenate([few, few ^ 1])
    values = few[draw.integers(0, len(few), (9, 13))].astype(np.uint16)
    if colour == 3:
        alphas = draw.integers(0, 256, draw.integers(1, 1 + (1 << bits))).astype(np.uint8)
        table = np.full(1 << bits, 255)
        table[: len(alphas)] = alphas
        wanted, key = table[values[..., 0]], alphas.tobytes()
    else:
        wanted = np.where((values == few[0]).all(2), 0, 255)
        # Only the lower bits count.
        key = (few[0] | (0 if bits == 16 else 1 << bits)).astype(">u2").tobytes()
    chunks = ((b"PLTE", draw.bytes(3 << bits)),) if colour == 3 else ()
    kept, plain = (
        png(values, bits, colour, chunks=(*chunks, *more), interlaced=interlaced)
        for more in [((b"tRNS", key),), ()]
    )
    pixels = decode(kept, "RGBA")
    np.testing.assert_array_equal(pixels[..., 3], wanted)
    np.testing.assert_array_equal(pixels[..., :3], decode(plain, "RGBA")[..., :3])
    # Damaged, it is skipped.
    at = kept.index(b"tRNS") + 4 + len(key)
    assert (decode(kept[:at] + bytes(4) + kept[at + 4 :], "RGBA")[..., 3] == 255).all()


def test_a_frame_of_rgba_has_four_channels(shard):
    table = dii.read_webdataset_images(
        shard, image="jpg", mode="RGBA", size=16, backend="pandas"
    ).compute()
    assert {array.shape for array in table.images.arrays()} == {(16, 16, 4)}
    assert all((array[..., 3] == 255).all() for array in table.images.arrays())


@pytest.mark.parametrize("mode", ["RGBA", "labels"])
def test_a_decode_at_reduced_scale_is_refused(shard, mode):
    with pytest.raises(dii.ArgumentError, match=f"mode='{mode}': scaled_decode="):
        dii.read_webdataset_images(shard, mode=mode, scaled_decode=True, size=8)


def test_a_transform_is_given_all_channels(shard):
    def mirrored(images):
        return fn.flip(images, horizontal=1)

    plain, flipped = (
        dii.read_webdataset_images(
            shard, image="jpg", mode="RGBA", transform=transform, backend="pandas"
        ).compute()
        for transform in (None, mirrored)
    )
    for one, other in zip(plain.images.arrays(), flipped.images.arrays(), strict=True):
        np.testing.assert_array_equal(one[:, ::-1], other)


def rotated(images, **options):
    return fn.rotate(images, angle=30.0, keep_size=True, **options)


def cropped(images):
    return fn.random_resized_crop(images, size=(20, 20))


@pytest.mark.parametrize("transform", [partial(rotated, fill_value=0), cropped])
def test_a_transform_that_mixes_labels_is_an_error_that_says_what_to_do(shard, transform):
    with pytest.raises(dii.FunctionError, match=r"gave sample .* the label \d+.*INTERP_NN") as told:
        masks(shard, transform=transform).compute()
    assert "masks.tar" in str(told.value)


@pytest.mark.parametrize("fill", [0, 255])
def test_a_transform_by_the_nearest_pixel_keeps_the_labels(shard, fill):
    nearest = partial(rotated, fill_value=fill, interp_type=types.INTERP_NN)
    table = masks(shard, transform=nearest).compute()
    for array in table.images.arrays()[:2]:
        assert {*np.unique(array)} <= {*np.unique(CLASSES), 0, 255}


def test_a_transform_of_a_photograph_may_mix_its_values(shard):
    table = dii.read_webdataset_images(shard, image="jpg", mode="L", transform=rotated).compute()
    assert table["error"].isna().all()


@pytest.mark.parametrize("size", [5, 11, 64])
def test_thumbnails_of_labels_keep_the_labels(shard, size):
    table = masks(shard, errors="drop").compute()
    for small in (table, masks(shard, errors="drop")):
        arrays = small.images.thumbnails(size)
        arrays = arrays.compute() if small is not table else arrays
        for array in arrays.images.arrays():
            assert {*np.unique(array)} <= {*np.unique(CLASSES)}


def test_thumbnails_of_photographs_are_means(shard):
    table = dii.read_webdataset_images(shard, image="jpg", backend="pandas").compute()
    wanted = Image.fromarray(table.images.arrays()[0]).resize((9, 5), Image.Resampling.BILINEAR)
    small = table.images.thumbnails((5, 9), resize="stretch").images.arrays()[0]
    assert np.abs(small.astype(int) - np.asarray(wanted)).max() <= 2


@pytest.mark.parametrize("format", ["png", "webp"])
def test_encoded_labels_and_alpha_keep_every_value(shard, format):
    labels = masks(shard, errors="drop")
    for data in labels.images.encode(format).compute():
        values = np.asarray(Image.open(io.BytesIO(data)).convert("L"))
        np.testing.assert_array_equal(values, CLASSES)
    alpha = np.dstack([np.roll(CLASSES, shift, axis=1) for shift in range(4)])
    frame = small_frame([0], alpha.shape)
    frame["image"] = frame.images.map_batches(
        lambda images: [alpha for _ in images], {"image": "image"}
    )["image"]
    (data,) = frame.images.encode(format)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), alpha)


def test_labels_are_not_encoded_as_jpeg(shard):
    labels = masks(shard, errors="drop")
    renamed = labels.rename(columns={"image": "mask"})[["__key__", "mask"]]
    for frame in (labels, renamed):
        with pytest.raises(dii.ArgumentError, match="encode: JPEG changes the labels of"):
            frame.images.encode()
    assert labels.images.encode("png").compute().notna().all()
