"""Both decoders side by side: nobody can tell from the pixels which one made them.

If a new version of DALI makes a test here fail, `needs_pillow` in
decode/formats/header.py is to be changed, or
a rule in decode/pillow.py.
"""

import corpus
import numpy as np
import pytest
from corpus import picture, save
from dali_alone import RAISED, ask_dali
from loop_over import loop_over
from photo_shards import write_tar

import dask_image_ingest as dii
from dask_image_ingest.decode.formats.header import read_header
from dask_image_ingest.decode.formats.png_webp import without_png_metadata
from dask_image_ingest.decode.pillow import decode_with_pillow

MAX_PIXELS = 10**7
IMAGES = corpus.images()
TRUSTED = [name for name, data in IMAGES.items() if not read_header(data, MAX_PIXELS).needs_pillow]

# Careful images that DALI 2.4 decodes as Pillow does: only here, or not proven solid.
SAME = {
    "jpeg-exif-cut",
    "jpeg-arithmetic",
    "jpeg-arithmetic-progressive",
    "jpeg-lossless",
    "jpeg-cmyk",
    "jpeg-ycck",
    "webp-animated",
    "webp-animated-alpha",
    *(name for name in IMAGES if name.startswith(("bmp-", "tiff-", "pnm-"))),
} - {"bmp-16bit", "tiff-1", "tiff-la", "tiff-i", "pnm-pfm"}
DIFFERENT = {"tiff-la", "jpeg-cmyk-no-adobe", "jpeg-exif-6-prefixed", "png-exif-6-prefixed"}
DIFFERENT |= {"webp-exif-6-prefixed"}
# DALI must not even be asked: these end the process, or leave its heap broken.
DEADLY = {"jpeg-exif-twice", "png-exif-twice", "jp2-rgb", "j2k-rgb"}


@pytest.fixture(scope="module")
def dali(tmp_path_factory):
    asked = {
        name: without_png_metadata(data, exif=True) if name.startswith("png") else data
        for name, data in IMAGES.items()
        if name not in DEADLY
    }
    return {mode: ask_dali(asked, mode, tmp_path_factory.mktemp(mode)) for mode in ("RGB", "L")}


def difference(pixels, others) -> float:
    if isinstance(others, str) or pixels.shape != others.shape:
        return float("inf")
    return float(np.abs(pixels.astype(int) - others).mean())


@pytest.mark.slow
@loop_over("mode", ["RGB", "L"])
@loop_over("name", TRUSTED)
def test_dali_and_pillow_give_the_same_pixels(name, mode, dali):
    pixels = decode_with_pillow(IMAGES[name], mode, MAX_PIXELS)
    assert difference(pixels, dali[mode][name]) <= 1.0


@pytest.mark.slow
def test_photos_are_the_same_to_the_last_bit(photos, tmp_path):
    images = {str(number): photo.encoded for number, photo in enumerate(photos)}
    dali = ask_dali(images, "RGB", tmp_path)
    for name, data in images.items():
        np.testing.assert_array_equal(decode_with_pillow(data, "RGB", MAX_PIXELS), dali[name])


def test_the_kinds_that_fill_datasets_go_to_dali():
    ordinary = {"jpeg-420", "jpeg-progressive", "jpeg-exif-6", "png-rgb-8", "png-gamma"}
    ordinary |= {"png-grey-16", "png-palette-8-trns", "webp-lossy", "webp-lossless-alpha"}
    assert ordinary <= set(TRUSTED)


def test_what_kills_dali_is_never_given_to_it():
    assert not DEADLY & set(TRUSTED)


@pytest.mark.slow
def test_why_the_careful_images_are_careful(dali):
    needs_pillow = set(IMAGES) - set(TRUSTED) - DEADLY
    found = {
        name: difference(decode_with_pillow(IMAGES[name], "RGB", MAX_PIXELS), dali["RGB"][name])
        for name in needs_pillow
    }
    assert {name for name, by in found.items() if by <= 1.0} == SAME
    assert {name for name, by in found.items() if by > 1.0} - DIFFERENT == {
        name for name in needs_pillow if isinstance(dali["RGB"][name], str)
    }
    assert {dali["RGB"][name] for name in needs_pillow - SAME - DIFFERENT} == {RAISED}


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("kind", ["png", "webp", "jpeg"])
def test_pixels_do_not_depend_on_the_other_rows(kind, mode, tmp_path):
    file = {"png": "PNG", "webp": "WEBP", "jpeg": "JPEG"}[kind]
    own = {f"{n}.{kind}": save(picture().rotate(n), file) for n in range(6)}
    others = {f"other-{n}.jpg": save(picture(), "JPEG") for n in range(30)}
    others |= {f"another-{n}.png": save(picture(), "PNG") for n in range(30)}
    found = []
    for name, files in (("alone", own), ("among", own | others)):
        path = write_tar(tmp_path / f"{name}.tar", files)
        frame = dii.read_webdataset_images(path, backend="pandas", mode=mode).compute()
        found.append(dict(zip(frame["__key__"], frame.images.arrays(), strict=True)))
    for key, pixels in found[0].items():
        np.testing.assert_array_equal(pixels, found[1][key])
