"""How a JPEG is coded, told by its headers; simplejpeg and Pillow are the witnesses."""

from __future__ import annotations

import io

import numpy as np
import pytest
import simplejpeg
from corpus import images, picture, save
from handmade import insert_after_soi, jpeg_segment, rare_jpeg
from PIL import Image

from dask_image_ingest.decode.formats.jpeg import read_jpeg_frame

JPEGS = {name: data for name, data in images().items() if name.startswith("jpeg")}
READ_BY_SIMPLEJPEG = [name for name in JPEGS if "lossless" not in name and "ycck" not in name]
GIVEN_NAMES = {"Gray": "grey"}


@pytest.mark.parametrize("name", READ_BY_SIMPLEJPEG)
def test_subsampling_is_what_libjpeg_turbo_reads(name):
    *_, subsampling = simplejpeg.decode_jpeg_header(JPEGS[name])
    frame = read_jpeg_frame(JPEGS[name])
    expected = GIVEN_NAMES.get(subsampling, ":".join(subsampling))
    assert frame.subsampling == expected


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("name", JPEGS)
def test_components_and_progression_are_what_pillow_reads(name):
    image = Image.open(io.BytesIO(JPEGS[name]))
    frame = read_jpeg_frame(JPEGS[name])
    assert len(frame.sampling) == len(image.getbands())
    progressive = frame.coding == "progressive" or name == "jpeg-arithmetic-progressive"
    assert progressive == bool(image.info.get("progressive"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("jpeg-444", None),
        ("jpeg-422", None),
        ("jpeg-420", None),
        ("jpeg-440", None),
        ("jpeg-grey", None),
        ("jpeg-restart", None),
        ("jpeg-comment-120k", None),
        ("jpeg-411", "subsampling 4:1:1"),
        ("jpeg-cmyk", "4 components"),
        ("jpeg-progressive", "progressive"),
        ("jpeg-progressive-grey", "progressive"),
        ("jpeg-arithmetic", "arithmetic"),
        ("jpeg-lossless", "lossless"),
    ],
)
def test_what_a_hardware_decoder_takes(name, why):
    assert read_jpeg_frame(JPEGS[name]).not_in_hardware == why


def test_a_scan_of_some_components_is_not_the_only_one():
    jpeg = JPEGS["jpeg-444"]
    start = jpeg.index(b"\xff\xda")
    first = jpeg_segment(0xDA, b"\x01\x01\x00\x00\x3f\x00")
    frame = read_jpeg_frame(jpeg[:start] + first + jpeg[start:])
    assert not frame.is_baseline
    assert frame.not_in_hardware == "several scans"


def test_twelve_bits_are_told():
    assert read_jpeg_frame(rare_jpeg("jpeg-12bit")).not_in_hardware == "12-bit"


def test_what_leads_to_no_pixels_is_no_frame():
    jpeg = save(picture(), "JPEG")
    start = jpeg.index(b"\xff\xda")
    assert read_jpeg_frame(jpeg) is not None
    for end in range(start + 1):
        assert read_jpeg_frame(jpeg[:end]) is None
    assert read_jpeg_frame(b"\xff\xd8" + jpeg[start:]) is None
    no_components = jpeg_segment(0xC0, b"\x08\0\x01\0\x01\0")
    assert read_jpeg_frame(insert_after_soi(jpeg, no_components)) is None


def test_no_bytes_at_all_raise():
    rng = np.random.default_rng(5)
    jpeg = np.frombuffer(save(picture(), "JPEG"), np.uint8)
    for _ in range(2000):
        damaged = jpeg[:700].copy()
        damaged[rng.integers(2, len(damaged), 4)] = rng.integers(0, 256, 4)
        read_jpeg_frame(damaged.tobytes())
