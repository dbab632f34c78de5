"""Random resized crops: torchvision's rule, and the pixels that Pillow makes of the same region."""

from __future__ import annotations

import io
import pickle
from collections import Counter

import corpus
import numpy as np
import pytest
from corpus import save
from photo_shards import write_tar
from PIL import Image
from synthetic import damaged_file, encode, photograph
from witnesses import resized_by_dali, resized_by_pillow

import dask_image_ingest as dii
from dask_image_ingest.dask_internals import new_collection
from dask_image_ingest.dataset.references import last_decode
from dask_image_ingest.decode import DecodeSpec, EncodedImages, Origin
from dask_image_ingest.decode.crash_guard import decode_guarded
from dask_image_ingest.decode.formats.header import read_header
from dask_image_ingest.decode.random_crop import draw_region
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames.pandas_backend import HostPixels

pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")

SIZE = (24, 31)
CROP = dii.RandomResizedCrop()


def by_torchvision(random, height, width, scale, ratio):
    """Height and width of a crop, as ``RandomResizedCrop.get_params`` of torchvision draws them."""
    for _ in range(10):
        area = height * width * random.uniform(*scale)
        aspect = np.exp(random.uniform(*np.log(ratio)))
        columns, rows = round(np.sqrt(area * aspect)), round(np.sqrt(area / aspect))
        if 0 < columns <= width and 0 < rows <= height:
            return rows, columns
    if width / height < min(ratio):
        return round(width / min(ratio)), width
    if width / height > max(ratio):
        return height, round(height * max(ratio))
    return height, width


def farthest(a, b):
    """The largest difference of two samples' distribution functions (Kolmogorov and Smirnov)."""
    values = np.sort(np.concatenate([a, b]))
    shares = (np.searchsorted(np.sort(each), values, side="right") / len(each) for each in (a, b))
    return np.abs(np.subtract(*shares)).max()


@pytest.mark.parametrize("shape", [(375, 500), (500, 100), (60, 61), (1000, 30)])
@pytest.mark.parametrize("crop", [CROP, dii.RandomResizedCrop((0.3, 0.9), (0.5, 3.0), 0.2)])
def test_areas_ratios_places_and_flips_are_distributed_as_those_of_torchvision(shape, crop, seed):
    random, count = np.random.default_rng(seed), 2000
    theirs = np.array(
        [by_torchvision(random, *shape, crop.scale, crop.ratio) for _ in range(count)]
    )
    drawn = [draw_region(crop, *shape, Origin("a.tar", n, "", seed)) for n in range(count)]
    assert all(0 <= r.top <= shape[0] - r.height and r.height > 0 for r in drawn)
    assert all(0 <= r.left <= shape[1] - r.width and r.width > 0 for r in drawn)
    ours = np.array([(region.height, region.width) for region in drawn])
    # 1.95 sqrt(2 / n), more by chance once in a thousand times; and torchvision's rounding.
    for of in (np.prod, lambda size, axis: size[:, 1] / size[:, 0]):
        assert farthest(of(ours, axis=1), of(theirs, axis=1)) < 0.0617 + 0.01
    for axis, places in ((0, [r.top for r in drawn]), (1, [r.left for r in drawn])):
        room = shape[axis] - ours[:, axis]
        inside = room >= 20
        if inside.sum() > 500:
            assert abs(np.mean(np.array(places)[inside] / room[inside]) - 0.5) < 0.05
    assert abs(np.mean([region.mirrored for region in drawn]) - crop.flip) < 0.04


def test_a_region_is_that_of_the_sample_and_its_draw():
    def drawn(*origin):
        return draw_region(CROP, 4000, 6000, Origin(*origin))

    origins = [(url, n, "", d) for url in "ab" for n in range(50) for d in (0, 1, 2**64 - 1)]
    assert len({drawn(*origin) for origin in origins}) == len(origins)
    assert drawn("a", 3, "one name", 7) == drawn("a", 3, "another", 7)
    # A link that was signed anew is the same shard.
    signed = [f"https://host/a.tar?X-Amz-Signature={n}&X-Amz-Date={n}" for n in range(2)]
    assert drawn(signed[0], 1, "", 0) == drawn(signed[1], 1, "", 0)


@pytest.fixture(scope="module")
def members():
    """Every kind of image that has pixels, and photographs that are much larger than `SIZE`."""
    good = {name: data for name, data in corpus.images().items() if "jp2" not in name}
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[274] = turn
        for kind, format in (("jpg", "JPEG"), ("png", "PNG")):
            file = io.BytesIO()
            photograph(150, 220, turn).save(file, format, exif=exif)
            good[f"turned-{kind}-{turn}"] = file.getvalue()
    good["progressive"] = save(photograph(200, 150), "JPEG", progressive=True)
    good["damaged"] = damaged_file()
    return {f"{name}.img": data for name, data in good.items()}


def read(path, **options):
    options = {"size": SIZE, "backend": "pandas", **options}
    return dii.read_webdataset_images(path, image="img", **options)


def by_pillow(whole, number, url, crop=CROP, draw=0):
    """The region of a decoded image, cropped, resized and mirrored by Pillow."""
    region = draw_region(crop, *whole.shape[:2], Origin(url, number, "", draw))
    made = resized_by_pillow(np.ascontiguousarray(region.of(whole)), SIZE)
    return made[:, ::-1] if region.mirrored else made


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pixels_are_those_of_pillow_for_every_kind_of_image(members, mode, tmp_path):
    path = write_tar(tmp_path / "a.tar", members)
    made = read(path, mode=mode, augment="random_resized_crop").compute()
    whole = read(path, mode=mode, size=None).compute()
    assert made.error.isna().tolist() == whole.error.isna().tolist()
    assert made.error.isna().mean() > 0.9
    means = []
    arrays = zip(made.images.arrays(), whole.images.arrays(), strict=True)
    for number, (ours, decoded) in enumerate(arrays):
        if ours is not None:
            theirs = by_pillow(decoded, number, str(path))
            difference = np.abs(ours.astype(int) - theirs)
            assert difference.max() <= 2, made["__key__"][number]
            means.append(difference.mean())
    assert np.mean(means) < 0.05
    shape = read(path, mode=mode, augment="random_resized_crop").images.stack().shape
    assert shape[1:] == (*SIZE, 3 if mode == "RGB" else 1)


@pytest.mark.parametrize("mode", ["RGB", "labels", "raw"])
def test_no_neighbour_batch_or_order_changes_a_pixel(members, mode, tmp_path, seed):
    names = sorted(members)[:: 2 if mode == "RGB" else 3]
    path = write_tar(tmp_path / "a.tar", [(name, members[name]) for name in names])
    ddf = read(path, mode=mode, augment=CROP)
    together = ddf.compute().images.arrays()
    decode = last_decode(ddf.expr)
    rows = new_collection(decode.rows).compute()
    random = np.random.default_rng(seed)
    for count in (1, 9, 60):
        some = random.integers(len(rows), size=count)
        frame = decode.function(rows.iloc[some], np.zeros(count, np.uint64))
        for row, array in zip(some, frame.images.arrays(), strict=True):
            assert (array is None) == (together[row] is None)
            if array is not None:
                np.testing.assert_array_equal(array, together[row])


@pytest.mark.parametrize(
    "mode", ["RGB", *(pytest.param(mode, marks=pytest.mark.more) for mode in ("L", "RGBA"))]
)
def test_views_that_are_cut_from_one_decode_are_those_of_a_decode_each(members, mode, tmp_path):
    path = write_tar(tmp_path / "a.tar", members)
    crop = dii.RandomResizedCrop(scale=(0.05, 0.4))
    image = {
        "image": "img",
        "second": dii.ImageColumn("img", size=40, augment=crop),
        "third": dii.ImageColumn("img", augment=[crop, "random_horizontal_flip"]),
        "fourth": dii.ImageColumn("img", transform=_inverted if mode == "RGB" else None),
        "whole": dii.ImageColumn("img", augment=None, resize="crop"),
    }
    options = {"size": SIZE, "augment": CROP, "mode": mode, "backend": "pandas"}
    ddf = dii.read_webdataset_images(path, image=image, **options)
    together = ddf.compute()
    late = ddf.shuffle("__key__", npartitions=2).compute().sort_values("__key__")
    assert late["__key__"].tolist() == sorted(together["__key__"])
    places = np.argsort(together["__key__"].to_numpy(), kind="stable")
    for name in image:
        alone = ddf[["__key__", name]].compute().images[name].arrays()
        error = "error" if name == "image" else f"{name}.error"
        moved = late.images[name].arrays()
        for row, array in enumerate(together.images[name].arrays()):
            np.testing.assert_array_equal(array, alone[row])
        for place, row in enumerate(places):
            np.testing.assert_array_equal(moved[place], alone[row])
        assert together[error].isna().tolist() == [array is not None for array in alone]


def _inverted(images):
    from nvidia.dali import fn, types

    return fn.cast_like(255 - fn.cast(images, dtype=types.INT32), images)


@pytest.mark.more
@pytest.mark.slow
def test_the_process_that_is_asked_after_a_crash_decodes_the_same(members, tmp_path):
    names = [*members][:8]
    path = write_tar(tmp_path / "a.tar", [(name, members[name]) for name in names])
    images = EncodedImages(
        [read_header(members[name], 10**9) for name in names],
        lambda row: members[names[row]],
        lambda row: Origin(str(path), row, names[row]),
    )
    pixels = decode_guarded(images, DecodeSpec(size=SIZE, augment=CROP), HostPixels(0))
    arrays = read(path, augment=CROP).compute().images.arrays()
    assert b"".join(array.tobytes() for array in arrays) == pixels.flat.tobytes()


def test_masks_and_stored_values_show_the_region_of_their_photograph(tmp_path):
    """Each pixel holds its own place, in all three, of which the depth is half as large."""
    down, across = np.mgrid[0:200, 0:240].astype(np.uint16)
    members = {}
    for number in range(40):
        place = np.stack([down, across, down], axis=2).astype(np.uint8)
        members[f"{number}.png"] = save(Image.fromarray(place), "PNG")
        members[f"{number}.seg.png"] = save(Image.fromarray(place[..., 0]), "PNG")
        members[f"{number}.depth.png"] = save(Image.fromarray(200 * across[::2, ::2]), "PNG")
    path = write_tar(tmp_path / "a.tar", members)
    images = {
        "image": "png",
        "mask": dii.ImageColumn("seg.png", mode="labels"),
        "depth": dii.ImageColumn("depth.png", mode="raw"),
    }
    frame = dii.read_webdataset_images(
        path, image=images, size=(50, 60), augment="random_resized_crop", backend="pandas"
    ).compute()
    assert frame[["error", "mask.error", "depth.error"]].isna().all().all()
    columns = [frame.images[name].arrays() for name in images]
    for number, (image, mask, depth) in enumerate(zip(*columns, strict=True)):
        assert (mask.dtype, mask.shape) == (np.uint8, (50, 60, 1))
        assert (depth.dtype, depth.shape) == (np.uint16, (50, 60, 1))
        # A step of the nearest pixel, and half a pixel of rounding at both edges.
        assert np.abs(image[..., 0].astype(int) - mask[..., 0])[2:-2].max() <= 4
        assert np.abs(image[..., 1] - depth[..., 0] / 200.0)[:, 2:-2].max() <= 6
        region = draw_region(CROP, 200, 240, Origin(str(path), number, ""))
        assert {*np.unique(mask)} <= {*range(region.top, region.top + region.height)}
        assert np.isin(depth, 200 * across).all(), "no depth is a mean of two"
    alone = dii.read_webdataset_images(
        path, image=images, size=(50, 60), augment="random_resized_crop", backend="pandas"
    )[["mask"]].compute()
    assert all(map(np.array_equal, alone.images["mask"].arrays(), columns[1]))


def test_a_reduced_scale_shows_the_same_region(tmp_path):
    members = {f"{n}.img": encode(photograph(700, 900, n)) for n in range(6)}
    path = write_tar(tmp_path / "a.tar", members)
    full = read(path, augment=CROP).compute().images.arrays()
    reduced = read(path, augment=CROP, scaled_decode=True).compute().images.arrays()
    assert not all(map(np.array_equal, full, reduced))
    for ours, theirs in zip(reduced, full, strict=True):
        error = np.mean((ours.astype(float) - theirs) ** 2)
        assert 10 * np.log10(255**2 / max(error, 1e-9)) > 37


def test_the_operators_of_a_gpu_make_nearly_the_same(seed):
    """Here on the CPU; their bound is that of a resize without a crop."""
    from dask_image_ingest.decode import ResizedImage

    images = [np.asarray(photograph(90 + n, 140 - n, seed + n)) for n in range(12)]
    regions = [draw_region(CROP, *i.shape[:2], Origin("", n, "")) for n, i in enumerate(images)]
    assert len({region.mirrored for region in regions}) == 2
    made = resized_by_dali(images, regions, size=SIZE, augment=CROP)
    geometry = DecodeSpec(size=SIZE).geometry(*SIZE)
    for image, region, theirs in zip(images, regions, made, strict=True):
        ours = ResizedImage(region.of(image), geometry, mirrored=region.mirrored)
        difference = np.abs(np.asarray(ours).astype(int) - theirs)
        assert difference.max() <= 16
        assert difference.mean() <= 0.3


def test_a_transform_follows(tmp_path):
    from nvidia.dali import fn

    def darker(images):
        return fn.brightness(images, brightness=0.5)

    path = write_tar(tmp_path / "a.tar", {f"{n}.img": encode(photograph(90, 70)) for n in "ab"})
    plain = read(path, augment=CROP).compute().images.arrays()
    dark = read(path, augment=CROP, transform=darker).compute().images.arrays()
    for before, after in zip(plain, dark, strict=True):
        assert np.abs(before / 2 - after).max() <= 1


def test_equal_crops_are_one_query_and_others_are_not(tmp_path):
    path = write_tar(tmp_path / "a.tar", {"a.img": encode(photograph(90, 70))})

    def name(**options):
        return read(path, **options).expr._name

    assert name(augment="random_resized_crop") == name(augment=pickle.loads(pickle.dumps(CROP)))
    others = [None, CROP, dii.RandomResizedCrop(flip=0), dii.RandomResizedCrop(scale=(0.2, 1))]
    assert Counter(name(augment=each) for each in others).most_common(1)[0][1] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": "random_crop"}, "pass 'random_resized_crop'"),
        ({"augment": CROP, "size": None}, "pass size="),
        ({"augment": CROP, "resize": "crop"}, "leave resize= out"),
        ({"augment": CROP, "mode": "raw", "transform": len}, "mode='raw'"),
        ({"augment": CROP, "decode": False, "size": None}, "size="),
    ],
)
def test_what_can_not_be_cropped_says_what_to_do(options, message, tmp_path):
    path = write_tar(tmp_path / "a.tar", {"a.img": encode(photograph(90, 70))})
    with pytest.raises(ArgumentError, match=message):
        read(path, **options)


@pytest.mark.parametrize(
    "numbers",
    [
        {"scale": (0, 1)},
        {"scale": (0.5, 0.4)},
        {"scale": (0.5, 1.2)},
        {"ratio": (0, 2)},
        {"ratio": (1, float("inf"))},
        {"ratio": (1, float("nan"))},
        {"flip": 1.5},
    ],
)
def test_numbers_that_are_none_are_refused(numbers):
    with pytest.raises(ArgumentError, match=next(iter(numbers))):
        dii.RandomResizedCrop(**numbers)
