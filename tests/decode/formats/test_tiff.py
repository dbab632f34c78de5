"""Samples of TIFFs as tifffile writes them: raw values are these, whatever they are meant to be."""

from __future__ import annotations

import io
import itertools
import struct
import sys
from contextlib import suppress

import numpy as np
import pytest
import tifffile
from corpus import save
from loop_over import loop_over
from PIL import Image
from synthetic import tiff

from dask_image_ingest.decode.formats import BadImage
from dask_image_ingest.decode.formats.header import read_header
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


def decode(data, mode="raw"):
    return decode_with_pillow(data, mode, LARGEST)


@loop_over(
    "photometric, samples",
    [
        *itertools.product(["minisblack", "miniswhite"], [1, 2, 3, 4]),
        *itertools.product(["rgb"], [3, 4]),
    ],
)
@loop_over("dtype", [np.uint8, np.uint16, np.float32])
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


@pytest.mark.parametrize("tile", [None, (32, 32)])
@pytest.mark.parametrize(
    ("compression", "name"),
    [("webp", "WebP"), ("lerc", "LERC"), ("jpegxl", "JPEG XL"), ("jpeg2000", "JPEG 2000")],
)
def test_a_compression_that_is_not_read_is_named(compression, name, tile):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    file = io.BytesIO()
    tifffile.imwrite(file, pixels, compression=compression, photometric="rgb", tile=tile)
    file.seek(0)
    assert tifffile.imread(file).shape == pixels.shape
    shown = None
    with suppress(OSError), Image.open(io.BytesIO(file.getvalue())) as image:
        shown = np.asarray(image)  # some builds of Pillow read WebP
    for mode in ("RGB", "raw", "labels"):
        if shown is not None and mode != "labels":
            assert (decode_with_pillow(file.getvalue(), mode, 1 << 20) == shown).all()
            continue
        with pytest.raises(BadImage, match=rf"^unsupported-format: .*compressed by {name} \(\d+\)"):
            decode_with_pillow(file.getvalue(), mode, 1 << 20)


def test_damaged_pixels_of_a_compression_that_is_read_are_corrupt():
    file = io.BytesIO()
    tifffile.imwrite(file, np.zeros((64, 64, 3), np.uint8), compression="zstd", photometric="rgb")
    file.seek(0)
    with tifffile.TiffFile(file) as opened:
        at = opened.pages.first.dataoffsets[0]
    damaged = bytearray(file.getvalue())
    damaged[at : at + 4] = b"\xff" * 4
    with pytest.raises(BadImage, match=r"^corrupt: "):
        decode_with_pillow(bytes(damaged), "RGB", 1 << 20)


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


KINDS = ["u1", "u2", "u4", "i1", "i2", "i4", "f2", "f4", "f8"]
COMPRESSIONS = [None, "zlib", "lzw", "packbits", "zstd", "lzma"]
# Tags that make readers see more than an image, or stumble: descriptions, vendors' own, depth.
METADATA = [254, 255, 270, 271, 285, 305, 330, 333, 700, 32997, 32998, 33628, 33629, 33432]
METADATA += [34361, 34412, 34665, 34675, 34735, 37500, 42112, 42113, 50838, 50839, 65420]


@pytest.mark.rounds(3, nightly=200)
def test_any_tiff_is_what_was_written_in_every_mode(rng):
    """Samples of any type, layout and metadata; NumPy says what colours they are."""
    draw = np.random.default_rng(rng.randrange(1 << 30))
    for _ in range(40):
        kind, photometric = rng.choice(KINDS), rng.choice(["minisblack", "miniswhite", "rgb"])
        colours = 3 if photometric == "rgb" else 1
        alpha = rng.choice([[], ["unassalpha"]])
        shape = rng.randint(1, 40), rng.randint(1, 40), colours + len(alpha)
        array = draw.normal(0.5, 0.6, shape).astype(kind)
        if kind[0] != "f":
            limits = np.iinfo(kind)
            array = draw.integers(limits.min, limits.max, shape, endpoint=True, dtype=kind)
            array = array & rng.choice([-1 if limits.min else limits.max, 127])
        options = {"extrasamples": alpha} if alpha else {}
        options["compression"] = rng.choice(COMPRESSIONS)
        if options["compression"] not in (None, "packbits"):
            options["predictor"] = rng.choice([False, 3 if kind[0] == "f" else True])
        if shape[2] > 1:
            options["planarconfig"] = rng.choice(["contig", "separate"])
        layout = rng.choice([{}, {"rowsperstrip": rng.randint(1, 50)}, {"tile": (16, 32)}])
        size = rng.randint(1, 9)
        kinds_of_tag = [(1, draw.bytes(size)), (2, "x" * size), (3, (7,) * size), (4, (7,) * size)]
        tags = [(rng.choice(METADATA), rng.choice(kinds_of_tag)) for _ in range(rng.randrange(4))]
        options["extratags"] = [(tag, kind_, size, value, True) for tag, (kind_, value) in tags]
        options |= layout | {"byteorder": rng.choice("<>"), "bigtiff": rng.random() < 0.3}
        data = tiff(array, photometric, metadata=None, **options)
        header = read_header(data, LARGEST)
        assert (header.height, header.width, header.channels, header.error) == (*shape, None)
        for mode, wanted in as_meant(array, photometric, alpha).items():
            said = f"{kind} {photometric} {mode} {options}"
            if wanted is None:
                with pytest.raises(BadImage, match=r"^unsupported-format"):
                    decode(data, mode)
                continue
            pixels = decode(data, mode)
            assert pixels.dtype == wanted.dtype, said
            # Pillow gives the upper byte of 16 bits in colours.
            atol = int(kind == "u2" and mode != "raw")
            np.testing.assert_allclose(pixels, wanted, rtol=0, atol=atol, err_msg=said)


def as_meant(array, photometric, alpha):
    """The pixels of an array by mode; None where it is refused."""
    if array.dtype.kind == "f":
        shown = np.rint(np.clip(array.astype("f4"), 0, 1) * 255)
    else:
        most = (1 << min(8 * array.itemsize, 16)) - 1
        shown = np.floor(np.clip(array.astype("f8"), 0, most) * 255 / most + 0.5)
    shown = shown.astype("u1")
    grey = photometric != "rgb"
    if photometric == "miniswhite":
        shown[..., 0] = 255 - shown[..., 0]
    rgb = np.repeat(shown[..., :1], 3, axis=2) if grey else shown[..., :3]
    opacity = shown[..., -1:] if alpha else np.full_like(shown[..., :1], 255)
    first = array[..., :1]
    is_label = grey and array.dtype.kind != "f" and 0 <= first.min() <= first.max() <= 255
    return {
        "raw": array if array.dtype.str[1:] in ("u1", "u2", "f4") else None,
        "labels": first.astype("u1") if is_label else None,
        "RGB": rgb,
        "RGBA": np.concatenate([rgb, opacity], axis=2),
        "L": np.asarray(Image.fromarray(np.ascontiguousarray(rgb)).convert("L"))[..., None],
    }


def edited(data, tag, value):
    """A little-endian TIFF with another value of a tag."""
    at = data.index(struct.pack("<H", tag), 8) + 8
    return data[:at] + struct.pack("<I", value) + data[at + 4 :]


@pytest.mark.parametrize("bits", [10, 12, 14])
def test_grey_of_9_to_15_bits_is_scaled_by_its_own_maximum(bits):
    array = np.linspace(0, (1 << bits) - 1, 64).astype(np.uint16).reshape(8, 8)
    packed = np.packbits((array[..., None] >> np.arange(bits)[::-1] & 1).astype(np.uint8)).tobytes()
    data = edited(tiff(array[..., None]), 258, bits).replace(array.tobytes(), packed)
    np.testing.assert_array_equal(decode(data)[..., 0], array)
    wanted = np.rint(array * 255.0 / ((1 << bits) - 1))
    np.testing.assert_array_equal(decode(data, "L")[..., 0], wanted)


@pytest.mark.parametrize("mode", ["raw", "labels", "RGB"])
def test_without_the_extra_an_error_names_it(mode, monkeypatch):
    data = tiff(np.zeros((4, 4, 1), np.uint8 if mode == "labels" else np.float32))
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    with pytest.raises(BadImage, match=r"^unsupported-format: .*dask-image-ingest\[tiff\]"):
        decode(data, mode)


@pytest.mark.parametrize("mode", ["raw", "RGB"])
def test_a_tile_of_gigabytes_is_too_large_by_its_header(mode):
    plain = tiff(np.zeros((8, 8, 1), np.uint8), tile=(16, 16), compression="zlib")
    data = edited(edited(plain, 322, 65_520), 323, 32_768)
    assert read_header(data, LARGEST).error == (
        "too-large: a tile of 65520 x 32768 in an image of 8 x 8"
    )
    with pytest.raises(BadImage, match=r"^too-large: a tile of"):
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
