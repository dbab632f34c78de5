"""``images.encode``: what a format can hold is a file of it, and what it can't is said."""

import io

import numpy as np
import pytest
from PIL import Image
from small_frames import small_frame

import dask_image_ingest as dii

FITS = {"jpeg": (1, 3), "png": (1, 2, 3, 4), "webp": (1, 2, 3, 4)}


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("format", FITS)
def test_an_image_of_any_channels_is_a_file_or_an_error_that_says_what_to_do(format, channels):
    frame = small_frame([7, 8], (6, 5, channels))
    if channels in FITS[format]:
        with Image.open(io.BytesIO(frame.images.encode(format).iloc[0])) as image:
            assert image.format == format.upper()
            pixels = np.asarray(image.convert("RGBA"))
        assert abs(pixels[:, :, 0].astype(int) - 7).max() <= 2
        return
    with pytest.raises(dii.ArgumentError, match=f"an image has {channels} channels"):
        frame.images.encode(format)
    if channels > 3:
        first = frame.images.map_batches(
            lambda images: [image[..., :3] for image in images], {"image": "image"}
        )
        assert first.images.encode(format).notna().all()


def test_an_image_larger_than_its_format_allows_is_told():
    with pytest.raises(dii.ArgumentError, match="an image of 70000 × 1 pixels can't be a jpeg"):
        small_frame([7], (70_000, 1, 3)).images.encode()


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_images_of_any_channels_are_shown(channels):
    shown = small_frame([7], (6, 5, channels)).images.show(1, columns=[])
    (card,) = shown.cards
    with Image.open(io.BytesIO(card.jpeg)) as image:
        pixels = np.asarray(image)
    assert pixels.shape[2:] == ((3,) if channels >= 3 else ())
    assert abs(pixels.astype(int) - 7).max() <= 2
