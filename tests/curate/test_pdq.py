"""PDQ beside the reference: the library of ThreatExchange, as the package ``pdqhash`` has it.

It gets pictures of 512 × 512, as ThreatExchange's program makes them of larger files. Its hashes of
some photographs stand here. The package itself has no wheels, and is compared with
where it is installed (``pip install pdqhash`` needs a C++ compiler).
"""

import io
import itertools
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest
from device_arrays import DeviceArray, device_library
from PIL import Image

from dask_image_ingest.curate.fingerprints import VARIANTS, pdq

# By pdqhash 0.2.8, of scikit-image's files that Pillow has brought to 512 × 512 (BILINEAR); all of
# quality 100.
REFERENCE = {
    "astronaut": "2d6b1af3a956c529e79ca3d2526fa834d4196c81cedd04de0a26b855fc99b724",
    "camera": "dc9c9d3b746978f888f40ce6e5c3f70f7266623e8d989cb99f21f2010841e1c7",
    "chelsea": "5fab5331f01da156898e2b7629a5d3438412cdbd23f48942464526317db33ffd",
    "coffee": "88629e779a663698f9a3b8668026727c21a679f61eb6e1f8c79b27e27c0299e0",
    "coins": "1ea5d2196de84aa512b515e6e515e0311aef1aaea4a5d935dd4a675a1a56ad55",
    "motorcycle_left": "e0c9cfdb78d318968a18ec54e94ba55937565b67508a0b87ad64fceb5631c470",
}

FOLDER = Path(str(distribution("scikit-image").locate_file("skimage/data")))

# What Pillow calls each variant.
TURNS = {
    "mirrored": "FLIP_LEFT_RIGHT",
    "flipped": "FLIP_TOP_BOTTOM",
    "rotated180": "ROTATE_180",
    "transposed": "TRANSPOSE",
    "rotated90": "ROTATE_90",
    "rotated270": "ROTATE_270",
    "transversed": "TRANSVERSE",
}


def apart(one, other):
    return int(np.bitwise_count(np.asarray(one) ^ np.asarray(other)).sum())


def ours(pixels, variants=()):
    hashes, quality = pdq([pixels[None]], np, variants)
    return [each[0] for each in hashes], int(quality[0])


@pytest.mark.parametrize("name", REFERENCE)
def test_photographs_have_the_reference_hash(name):
    pixels = np.asarray(Image.open(FOLDER / f"{name}.png").convert("RGB"))
    (found,), quality = ours(pixels)
    # Sums in another order: a frequency that is next to the median may fall to either side.
    assert apart(found, np.frombuffer(bytes.fromhex(REFERENCE[name]), np.uint8)) <= 2
    assert quality == 100


def test_pictures_of_all_sizes_have_the_reference_hash_and_quality(photos):
    pdqhash = pytest.importorskip("pdqhash", reason="compares with the package pdqhash")
    for photo in photos:
        for side in (40, 64, 65, 129, 512, 700):
            image = Image.fromarray(photo.pixels).resize((side, side + 3))
            (found,), quality = ours(np.asarray(image))
            square = image.resize((512, 512), Image.Resampling.BILINEAR)
            bits, expected_quality = pdqhash.compute(np.asarray(square))
            assert apart(found, np.packbits(bits.astype(np.uint8))) <= 2
            assert abs(quality - expected_quality) <= 1


@pytest.mark.parametrize(
    "scale",
    [0.25, 2, *(pytest.param(each, marks=pytest.mark.nightly) for each in (0.5, 0.75, 1.5))],
)
def test_a_picture_that_was_resized_is_near(scale):
    for name in REFERENCE:
        image = Image.open(FOLDER / f"{name}.png").convert("RGB")
        size = [round(side * scale) for side in image.size]
        resized = image.resize(size, Image.Resampling.LANCZOS)
        bits = apart(ours(np.asarray(image))[0][0], ours(np.asarray(resized))[0][0])
        assert bits <= 10, f"{name}: {bits} bits"


def test_variants_are_the_hashes_of_the_picture_that_pillow_turned(photos):
    assert list(TURNS) == list(VARIANTS)
    for photo in photos[:6]:
        (_, *found), _ = ours(photo.pixels, tuple(TURNS))
        for (name, turn), hash_ in zip(TURNS.items(), found, strict=True):
            turned = np.asarray(Image.fromarray(photo.pixels).transpose(Image.Transpose[turn]))
            assert apart(hash_, ours(turned)[0][0]) <= 2, name


def test_a_picture_encoded_again_is_near_and_another_is_far(photos):
    detailed = [photo for photo in photos if ours(photo.pixels)[1] >= 50]
    assert len(detailed) > 8
    for photo, other in itertools.pairwise(detailed):
        image = Image.fromarray(photo.pixels)
        file = io.BytesIO()
        image.save(file, "JPEG", quality=40)
        (own,), _ = ours(photo.pixels)
        assert apart(own, ours(np.asarray(Image.open(file)))[0][0]) <= 24
        assert apart(own, ours(other.pixels)[0][0]) > 60


def test_gray_pictures_of_one_channel_hash_as_those_of_three(photos):
    gray = np.asarray(Image.fromarray(photos[0].pixels).convert("L"))
    (one,), _ = ours(gray[..., None])
    (three,), _ = ours(np.repeat(gray[..., None], 3, axis=2))
    assert apart(one, three) <= 2


def test_half_of_the_bits_are_set_and_pictures_without_detail_say_so(random):
    noise = random.integers(0, 256, (200, 300, 3), np.uint8)
    (hash_,), _ = ours(noise)
    assert np.bitwise_count(hash_).sum() == 128
    assert ours(np.full((300, 200, 3), 77, np.uint8))[1] == 0


def test_the_code_is_the_same_on_a_device_and_meets_no_array_of_the_host(photos):
    groups = [photo.pixels[None] for photo in photos[:5]]
    groups.append(np.stack([photo.pixels[:70, :90] for photo in photos]))
    on_device = [DeviceArray(group) for group in groups]
    (own, mirrored), quality = pdq(groups, np, ("mirrored",))
    (own_there, mirrored_there), quality_there = pdq(on_device, device_library, ("mirrored",))
    assert (own_there.get() == own).all()
    assert (mirrored_there.get() == mirrored).all()
    assert (quality_there.get() == quality).all()


def test_a_batch_of_one_shape_gives_what_each_image_gives_alone(photos):
    crops = np.stack([photo.pixels[:80, :80] for photo in photos])
    (together,), _ = pdq([crops], np)
    for crop, hash_ in zip(crops, together, strict=True):
        assert apart(hash_, ours(crop)[0][0]) <= 2
