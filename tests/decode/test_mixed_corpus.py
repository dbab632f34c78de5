"""Pillow as the witness: what it opens has pixels here, what it refuses has an error or pixels."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
from corpus import bad_images, images, picture, save
from photo_shards import write_tar
from PIL import Image, ImageOps

import dask_image_ingest as dii

MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I", "F")
CONTAINERS = ("PNG", "TIFF", "JPEG", "WEBP", "GIF", "BMP", "PPM", "JPEG2000", "AVIF")
# Refused by rules of the guide although Pillow opens them: cut files, and what has no plain RGB.
REFUSED_BY_RULE = ("truncated", "unsupported-format", "too-large")
# Their values are scaled, dropped or inverted by rules of the guide, which are not Pillow's.
OWN_RULES = (
    "16",
    "-i",
    "-f",
    "pfm",
    "alpha",
    "rgba",
    "cmyk",
    "trns",
    "ycck",
    "-la",
    "ico",
    "animat",
)

# Orientation that is cut off or comes twice, on which no two readers agree, or is in XMP alone.
ODD_TURNS = ("exif-cut", "exif-twice", "xmp-orientation", "exif-6-prefixed")


@pytest.fixture(scope="module")
def corpus() -> dict[str, bytes]:
    """Every image, good and bad, and each mode in each container that takes it."""
    found = images() | {name: data for name, (data, _) in bad_images().items()}
    for mode in MODES:
        image = picture("LA").convert("RGBA").quantize(64) if mode == "PA" else picture(mode)
        for container in CONTAINERS:
            try:
                found[f"mode-{mode}-{container}"] = save(image.convert(mode), container)
            except (OSError, KeyError, ValueError, TypeError):  # it doesn't take the mode
                continue
    return found


@pytest.fixture(scope="module")
def frame(corpus, tmp_path_factory):
    files = {f"{name.replace(';', '_')}.img": data for name, data in corpus.items()}
    path = write_tar(tmp_path_factory.mktemp("mixed") / "mixed.tar", files)
    return dii.read_webdataset_images(path, backend="pandas").compute(scheduler="synchronous")


def upright(data: bytes) -> Image.Image | None:
    """What Pillow makes of it; None if it refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data)) as image:
                image.load()
                return ImageOps.exif_transpose(image)
        except Exception:
            return None


def test_every_image_is_accounted_for(corpus, frame):
    assert frame["__key__"].tolist() == [name.replace(";", "_") for name in corpus]
    assert (frame["image"].isna() == frame["error"].notna()).all()


def test_every_mode_is_in_the_corpus(corpus):
    assert {name.split("-")[1] for name in corpus if name.startswith("mode-")} == set(MODES)


def test_what_pillow_opens_has_pixels_of_its_size(corpus, frame):
    for (name, data), error, array in zip(
        corpus.items(), frame["error"], frame.images.arrays(), strict=True
    ):
        expected = upright(data)
        if expected is None:
            continue
        if array is None:
            assert error.startswith(REFUSED_BY_RULE), error
        elif not name.endswith(ODD_TURNS):
            assert array.shape == (expected.height, expected.width, 3), name


def test_pixels_are_those_of_pillow(corpus, frame):
    compared = 0
    for (name, data), array in zip(corpus.items(), frame.images.arrays(), strict=True):
        expected = upright(data)
        if expected is None or array is None or any(rule in name.lower() for rule in OWN_RULES):
            continue
        if name.startswith("mode-") and name.split("-")[1] in (
            "LA",
            "PA",
            "RGBA",
            "I;16",
            "I",
            "F",
        ):
            continue
        if name.endswith(ODD_TURNS):
            continue
        difference = np.abs(array.astype(int) - np.asarray(expected.convert("RGB"), int))
        assert difference.mean() <= 1.5, name
        compared += 1
    assert compared > 100


@pytest.mark.parametrize("container", ["jpeg", "png", "webp", "tiff"])
def test_all_eight_orientations_come_out_upright(container, corpus, frame):
    arrays = dict(zip(frame["__key__"], frame.images.arrays(), strict=True))
    for orientation in range(1, 9):
        name = f"{container}-exif-{orientation}"
        expected = np.asarray(upright(corpus[name]).convert("RGB"), int)
        assert np.abs(arrays[name] - expected).mean() <= 1.5, name
