"""Samples of TIFFs as tifffile writes them: raw values are these, whatever they are meant to be."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
import tifffile
from corpus import save
from PIL import Image

from dask_image_ingest.decode import read_header
from dask_image_ingest.decode.formats import BadImage
from dask_image_ingest.decode.pillow import decode_with_pillow

LARGEST = 10**6
SHAPE = 40, 31
LAYOUTS = [
    {},
    {"rowsperstrip": 7},
    {"tile": (16, 16)},
    {"bigtiff": True},
    {"byteorder": ">"},
    {"compression": "zlib"},
    {"compression": "zlib", "predictor": 2},
    {"compression": "zlib", "predictor": 2, "tile": (16, 16), "byteorder": ">"},
]
PLANES = [
    {"planarconfig": "separate"},
    {"planarconfig": "separate", "tile": (16, 16)},
    {"planarconfig": "separate", "compression": "zlib", "predictor": 2},
]


def tiff(array, photometric="minisblack", **options):
    """A TIFF of an array (height, width, samples)."""
    file = io.BytesIO()
    if array.shape[2] == 1:
        array = array[..., 0]
    elif options.get("planarconfig") == "separate":
        array = np.moveaxis(array, 2, 0)
    else:
        options["planarconfig"] = "contig"
    tifffile.imwrite(file, array, photometric=photometric, **options)
    return file.getvalue()


def decode(data, mode="raw"):
    return decode_with_pillow(data, mode, LARGEST)


@pytest.mark.parametrize(
    ("photometric", "samples"),
    [
        *itertools.product(["minisblack", "miniswhite"], [1, 2, 3, 4]),
        *itertools.product(["rgb"], [3, 4]),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_raw_values_are_the_samples_that_are_stored(dtype, photometric, samples, seed):
    random = np.random.default_rng(seed)
    array = random.integers(0, 1 << 16, (*SHAPE, samples)).astype(dtype)
    for layout in LAYOUTS + PLANES * (samples > 1):
        if dtype == np.float32 and "predictor" in layout:
            continue  # tifffile writes none
        data = tiff(array, photometric, **layout)
        header = read_header(data, LARGEST)
        assert (header.height, header.width, header.channels, header.error) == (*array.shape, None)
        decoded = decode(data)
        assert decoded.dtype == dtype
        assert decoded.flags.writeable
        np.testing.assert_array_equal(decoded, array, str(layout))


@pytest.mark.parametrize("compression", ["tiff_lzw", "packbits", "tiff_deflate"])
def test_samples_are_those_of_each_compression(compression, seed):
    array = np.random.default_rng(seed).integers(0, 256, (*SHAPE, 4), np.uint8)
    for image in (Image.fromarray(array), Image.fromarray(array[..., :3])):
        decoded = decode(save(image, "TIFF", compression=compression))
        np.testing.assert_array_equal(decoded, np.asarray(image))


def test_floats_stored_as_differences_of_integers_are_read():
    """Predictor 2, which tifffile writes for integers alone: here as integers called floats."""
    array = np.random.default_rng(0).standard_normal((*SHAPE, 2)).astype(np.float32)
    # Another tag becomes that of the format.
    formats = [(340, 3, 2, (3, 3), True)]
    data = tiff(array.view(np.uint32), compression="zlib", predictor=2, extratags=formats)
    data = data.replace(b"\x54\1\3\0\2\0\0\0", b"\x53\1\3\0\2\0\0\0")
    np.testing.assert_array_equal(tifffile.imread(io.BytesIO(data)), array)
    np.testing.assert_array_equal(decode(data), array)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_samples_come_out_upright(orientation):
    array = np.random.default_rng(0).standard_normal((*SHAPE, 3)).astype(np.float32)
    data = tiff(array, extratags=[(274, 3, 1, orientation, True)])
    turned = {
        1: array,
        2: array[:, ::-1],
        3: array[::-1, ::-1],
        4: array[::-1],
        5: array.transpose(1, 0, 2),
        6: np.rot90(array, -1),
        7: array[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(array),
    }[orientation]
    np.testing.assert_array_equal(decode(data), turned)
    header = read_header(data, LARGEST)
    assert (header.height, header.width) == turned.shape[:2]


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros((4, 4, 1), np.int8), "signed integers"),
        (np.zeros((4, 4, 1), np.int16), "signed integers"),
        (np.zeros((4, 4, 1), np.uint32), "integers of 32 bits"),
        (np.zeros((4, 4, 1), np.float64), "floating-point samples of 64 bits"),
        (np.zeros((4, 4, 3), np.float16), "floating-point samples of 16 bits"),
        (np.zeros((4, 4, 5), np.uint16), "5 samples of a pixel, more than 4"),
    ],
)
def test_what_no_column_holds_is_refused_by_its_format(array, reason):
    with pytest.raises(BadImage, match=rf"unsupported-format: .*{reason}"):
        decode(tiff(array))


def test_samples_of_no_colour_have_a_header_and_say_how_to_read_them():
    data = tiff(np.zeros((5, 4, 2), np.float32))
    assert read_header(data, LARGEST).channels == 2
    with pytest.raises(BadImage, match=r"unsupported-format: .*read mode='raw'"):
        decode(data, "RGB")


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32])
def test_labels_of_any_integers_are_their_values(dtype):
    array = np.arange(100, dtype=dtype).reshape(10, 10, 1)
    np.testing.assert_array_equal(decode(tiff(array), "labels"), array)
    for photometric in ("minisblack", "miniswhite"):
        if np.dtype(dtype).kind == "u" and np.dtype(dtype).itemsize < 4:
            np.testing.assert_array_equal(decode(tiff(array, photometric), "labels"), array)


def test_labels_below_zero_are_refused():
    with pytest.raises(BadImage, match="labels from -3 to -3"):
        decode(tiff(np.full((4, 4, 1), -3, np.int8)), "labels")


def test_labels_of_two_samples_are_refused_unless_the_second_is_alpha():
    array = np.random.default_rng(0).integers(0, 256, (*SHAPE, 2), np.uint8)
    with pytest.raises(BadImage, match=r"labels .* 2 samples of a pixel"):
        decode(tiff(array), "labels")
    labels = decode(tiff(array, extrasamples=["unassalpha"]), "labels")
    np.testing.assert_array_equal(labels, array[..., :1])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_grey_of_which_0_is_white_is_shown_as_meant_and_stored_as_it_is(mode, dtype):
    most = np.iinfo(dtype).max
    array = np.linspace(0, most, 64).astype(dtype).reshape(8, 8, 1)
    negative = decode(tiff(array, "miniswhite"), mode)
    np.testing.assert_array_equal(negative, decode(tiff(most - array), mode))
    np.testing.assert_array_equal(decode(tiff(array, "miniswhite")), array)


def test_bits_of_which_0_is_white_are_stored_as_they_are():
    bits = np.random.default_rng(0).random(SHAPE) < 0.5
    for photometric in ("minisblack", "miniswhite"):
        data = tiff(bits[..., None], photometric)
        np.testing.assert_array_equal(decode(data)[..., 0], bits)
        np.testing.assert_array_equal(decode(data, "labels")[..., 0], bits)
    fax = decode(save(Image.fromarray(bits), "TIFF", compression="group4"))
    np.testing.assert_array_equal(fax[..., 0], bits)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_planes_that_pillow_misreads_are_refused_as_colours(mode):
    data = tiff(np.zeros((4, 4, 3), np.uint16), "rgb", planarconfig="separate")
    with pytest.raises(BadImage, match="unsupported-format: uncompressed planes of 16 bits"):
        decode(data, mode)


@pytest.mark.rounds(2, nightly=60)
def test_mutated_samples_raise_nothing_but_bad_image(rng):
    arrays = [np.zeros((*SHAPE, samples), dtype) for dtype in "BHf" for samples in (1, 3)]
    files = [tiff(array, **layout) for array, layout in itertools.product(arrays, LAYOUTS[:6])]
    for _ in range(300):
        data = bytearray(rng.choice(files))
        if rng.random() < 0.2:
            data = data[: rng.randrange(len(data))]
        for _ in range(rng.choice((1, 3, 10))):
            at = rng.randrange(min(len(data), rng.choice((300, 10**6)))) if data else 0
            data[at : at + 1] = bytes([rng.randrange(256)])
        header = read_header(bytes(data), LARGEST)
        try:
            pixels = decode(bytes(data), rng.choice(("raw", "labels")))
        except BadImage:
            continue
        assert header.error is None
        assert pixels.shape[:2] == (header.height, header.width)


def test_samples_that_are_cut_off_are_told():
    data = tiff(np.zeros((*SHAPE, 3), np.float32))
    with pytest.raises(BadImage, match="truncated"):
        decode(data[:-4])
