"""Pixels turned by EXIF orientation, with Pillow as the witness."""

import io

import numpy as np
import pytest
from handmade import exif as exif_block
from handmade import png_chunk
from PIL import Image, ImageOps

from dask_image_ingest.decode.formats import SWAPPED
from dask_image_ingest.decode.formats.header import read_header
from dask_image_ingest.decode.pillow import upright

PICTURE = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_each_orientation_is_applied_as_pillow_applies_it(orientation):
    exif = Image.Exif()
    exif[274] = orientation
    file = io.BytesIO()
    Image.fromarray(PICTURE).save(file, "PNG", exif=exif)
    with Image.open(file) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    turned = upright(PICTURE, orientation)
    np.testing.assert_array_equal(turned, expected)
    assert np.shares_memory(turned, PICTURE)
    assert (orientation in SWAPPED) == (turned.shape[0] == 3)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_an_orientation_that_is_cut_off_is_none():
    file = io.BytesIO()
    Image.fromarray(PICTURE).save(file, "PNG")
    data, block = file.getvalue(), exif_block(6)
    for length in range(8, len(block) + 1):
        cut = data[:33] + png_chunk(b"eXIf", block[:length]) + data[33:]
        with Image.open(io.BytesIO(cut)) as image:
            width, height = ImageOps.exif_transpose(image).size
        assert read_header(cut, 100)[1:3] == (height, width), length
