"""``mode="raw"`` gives the values that were stored, of every type, and refuses those it can't."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from dask_image_ingest.decode import make_decoding, read_header
from dask_image_ingest.decode.formats import BadImage
from dask_image_ingest.decode.pillow import decode_with_pillow

LARGEST = 10**6
SHAPE = 13, 7


def saved(image, format, **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def random_of(seed):
    rng = np.random.default_rng(seed)
    grey, deep = (rng.integers(0, 1 << bits, SHAPE) for bits in (8, 16))
    floats = rng.standard_normal(SHAPE).astype(np.float32)
    floats[0, :3] = np.nan, np.inf, -0.0
    colours = rng.integers(0, 256, (*SHAPE, 4), np.uint8)
    palette = Image.fromarray((grey % 16).astype(np.uint8))
    palette.putpalette(rng.integers(0, 256, 48, np.uint8).tobytes())
    return grey.astype(np.uint8), deep.astype(np.uint16), floats, colours, palette


def stored_of(seed):
    """Encoded images by name, and the array that each was made of; None where it is refused."""
    grey, deep, floats, colours, palette = random_of(seed)
    rgb, pairs = colours[..., :3], colours[..., :2]
    few, wide = grey % 16, Image.fromarray(deep.astype(np.int32))
    bits = Image.fromarray(grey > 100)
    images = {
        "grey png": (Image.fromarray(grey), "png", {}, grey),
        "bits png": (bits, "png", {}, few * 0 + (grey > 100)),
        "bits tiff": (bits, "tiff", {}, few * 0 + (grey > 100)),
        "bits pbm": (bits, "ppm", {}, few * 0 + (grey > 100)),
        "palette png": (palette, "png", {}, few),
        "palette of 4 bits png": (palette, "png", {"bits": 4}, few),
        "palette gif": (palette, "gif", {}, few),
        "16 bits png": (Image.fromarray(deep), "png", {}, deep),
        "16 bits tiff": (Image.fromarray(deep), "tiff", {}, deep),
        "16 bits tiff, packed": (Image.fromarray(deep), "tiff", {"compression": "tiff_lzw"}, deep),
        "16 bits pgm": (wide, "ppm", {}, deep),
        "8 bits pgm": (Image.fromarray(grey), "ppm", {}, grey),
        "floats tiff": (Image.fromarray(floats), "tiff", {}, floats),
        "grey and alpha png": (Image.fromarray(pairs, "LA"), "png", {}, pairs),
        "colours png": (Image.fromarray(colours[..., :3]), "png", {}, colours[..., :3]),
        "colours ppm": (Image.fromarray(colours[..., :3]), "ppm", {}, colours[..., :3]),
        "colours bmp": (Image.fromarray(colours[..., :3]), "bmp", {}, colours[..., :3]),
        "colours and alpha png": (Image.fromarray(colours), "png", {}, colours),
        "colours and alpha webp": (
            Image.fromarray(colours),
            "webp",
            {"lossless": True, "exact": True},
            colours,
        ),
        "CMYK": (Image.fromarray(colours, "CMYK"), "tiff", {}, None),
        "32 bits": (wide, "tiff", {}, None),
        "JPEG 2000": (Image.fromarray(rgb), "jpeg2000", {}, None),
    }
    return {
        name: (saved(image, format, **options), array)
        for name, (image, format, options, array) in images.items()
    }


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", list(stored_of(0)))
def test_raw_values_are_those_that_were_stored(name, seed):
    data, array = stored_of(seed)[name]
    if array is None:
        with pytest.raises(BadImage, match="unsupported-format: raw values"):
            decode_with_pillow(data, "raw", LARGEST)
        return
    decoded = decode_with_pillow(data, "raw", LARGEST)
    array = array if array.ndim == 3 else array[..., None]
    assert (decoded.dtype, decoded.shape) == (array.dtype, array.shape)
    assert decoded.tobytes() == array.tobytes()


def test_colours_of_a_jpeg_are_those_that_pillow_decodes():
    photo = Image.linear_gradient("L").resize((40, 30)).convert("RGB")
    data = saved(photo, "jpeg")
    assert np.array_equal(decode_with_pillow(data, "raw", LARGEST), Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("maximum", [15, 300, 4095])
def test_grey_maps_that_pillow_would_scale_are_refused(maximum):
    head = b"P5\n# a comment\n2 1\n%d\n" % maximum
    data = head + (b"\1\2" if maximum < 256 else b"\0\1\0\2")
    with pytest.raises(BadImage, match="may have scaled"):
        decode_with_pillow(data, "raw", LARGEST)


def test_colours_of_16_bits_are_refused():
    pixel = np.arange(6, dtype=">u2").tobytes()
    with pytest.raises(BadImage, match="raw values"):
        decode_with_pillow(b"P6 2 1 65535\n" + pixel, "raw", LARGEST)


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated:DeprecationWarning")
def test_no_image_takes_more_memory_than_its_header_foretells():
    decoding = make_decoding(
        device="cpu", size=None, resize="stretch", mode="raw", transform=None, max_pixels=None
    )
    for name, (data, array) in stored_of(0).items():
        if array is not None:
            told = decoding.nbytes(read_header(data, LARGEST))
            assert array.nbytes <= told <= 4 * array.nbytes, name
