"""Pixels turned by EXIF orientation, with Pillow as the witness."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from dask_image_ingest.decode.formats import SWAPPED
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
