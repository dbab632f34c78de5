"""Each mode of each format: what NumPy and Pillow say of the stored values, or an error."""

from __future__ import annotations

import io
from typing import NamedTuple

import numpy as np
import pytest
import tifffile
from corpus import save
from handmade import png
from loop_over import loop_over
from PIL import Image

from dask_image_ingest.decode import make_decode_spec
from dask_image_ingest.decode.formats import BadImage
from dask_image_ingest.decode.formats.header import read_header
from dask_image_ingest.decode.pillow import decode_with_pillow

LARGEST = 10**6
MODES = ("RGB", "RGBA", "L", "labels", "raw")


class Case(NamedTuple):
    """An image: its stored values (height, width, channels), colours of its indices, and file."""

    values: np.ndarray
    data: bytes
    palette: np.ndarray | None = None


def cases(seed) -> dict[str, Case]:
    random = np.random.default_rng(seed)
    bytes_ = random.integers(0, 256, (13, 17, 4), np.uint8)
    deep = random.integers(0, 1 << 16, (13, 17, 4)).astype(np.uint16)
    floats = random.normal(0.5, 1, (13, 17, 3)).astype(np.float32)
    floats[0, :3, 0] = np.nan, np.inf, -0.0
    grey, wide, few = bytes_[..., 0], deep[..., 0], bytes_[..., 0] % 16
    palette = random.integers(0, 256, (16, 3), np.uint8)
    indexed = Image.fromarray(few)
    indexed.putpalette(palette.tobytes())
    bits = grey % 2 == 1

    def case(array, image, format, colours=None, **options):
        values = np.asarray(array).astype(array.dtype if array.dtype != bool else np.uint8)
        return Case(
            values if values.ndim == 3 else values[..., None],
            image if isinstance(image, bytes) else save(image, format, **options),
            colours,
        )

    def tiff(array, **options):
        file = io.BytesIO()
        tifffile.imwrite(file, array, planarconfig="contig", **options)
        return file.getvalue()

    found = {}
    for format in ("png", "tiff", "bmp", "ppm", "jpeg2000"):
        found[f"grey {format}"] = case(grey, Image.fromarray(grey), format)
        found[f"RGB {format}"] = case(bytes_[..., :3], Image.fromarray(bytes_[..., :3]), format)
    for format in ("png", "tiff", "bmp", "ppm"):
        found[f"bits {format}"] = case(bits, Image.fromarray(bits), format)
    for format in ("png", "tiff", "jpeg2000"):
        found[f"RGBA {format}"] = case(bytes_, Image.fromarray(bytes_), format)
        pair = Image.merge("LA", [Image.fromarray(plane) for plane in (grey, bytes_[..., 1])])
        found[f"grey and alpha {format}"] = case(bytes_[..., :2], pair, format)
    for format in ("png", "tiff", "gif"):
        found[f"palette {format}"] = case(few, indexed, format, palette)
    for lossless in (bytes_, bytes_[..., :3]):
        name = "RGBA webp" if lossless.shape[2] == 4 else "RGB webp"
        image = Image.fromarray(lossless)
        found[name] = case(lossless, image, "webp", lossless=True, exact=True)
    for depth in (1, 2, 4):
        values = bytes_[..., :1] % (1 << depth)
        found[f"grey of {depth} bits png"] = case(values, png(values, depth, 0), "png")
        found[f"palette of {depth} bits png"] = case(
            values,
            png(values, depth, 3, chunks=((b"PLTE", palette.tobytes()[: 3 << depth]),)),
            "png",
            palette,
        )
    for format in ("png", "tiff"):
        found[f"16 bits {format}"] = case(wide, Image.fromarray(wide), format)
    found["16 bits ppm"] = case(wide, Image.fromarray(wide.astype(np.int32)), "ppm")
    for interlaced in (False, True):
        name = "interlaced 16 bits" if interlaced else "16 bits"
        rgb = png(deep[..., :3], 16, 2, interlaced=interlaced)
        found[f"RGB of {name} png"] = case(deep[..., :3], rgb, "png")
        found[f"RGBA of {name} png"] = case(deep, png(deep, 16, 6, interlaced=interlaced), "png")
    found["RGB of 16 bits tiff"] = case(deep[..., :3], tiff(deep[..., :3]), "tiff")
    alpha = tiff(deep, photometric="rgb", extrasamples=["unassalpha"])
    found["RGBA of 16 bits tiff"] = case(deep, alpha, "tiff")
    found["floats tiff"] = case(floats[..., 0], Image.fromarray(floats[..., 0]), "tiff")
    found["floats pfm"] = case(floats[..., 0], Image.fromarray(floats[..., 0]), "ppm")
    found["RGB of floats tiff"] = case(floats, tiff(floats, photometric="rgb"), "tiff")
    found["pairs of floats tiff"] = case(
        floats[..., :2], tiff(floats[..., :2], photometric="minisblack"), "tiff"
    )
    return found


NAMES = list(cases(0))

# What Pillow, whose reading of them is the only one, has no exact values or no colours of.
NO_RAW = ("grey jpeg2000", "RGB jpeg2000", "RGBA jpeg2000", "grey and alpha jpeg2000")
NO_COLOURS = ("pairs of floats tiff",)


def expected(name: str, case: Case, mode: str) -> np.ndarray | None:
    """The image that the guide promises; None for an error of its row."""
    values = case.values
    if mode == "raw":
        return None if name in NO_RAW else values
    if mode == "labels":
        grey = values.shape[2] == 1 or name.startswith("grey")
        return values[..., :1] if grey and values.dtype == np.uint8 else None
    if name in NO_COLOURS:
        return None
    if case.palette is not None:
        values = case.palette[values[..., 0]]
    elif values.dtype == np.uint16:
        values = np.floor(values / 257 + 0.5).astype(np.uint8)
    elif values.dtype == np.float32:
        unit = np.clip(np.nan_to_num(values), 0, 1)
        values = np.rint(unit * 255).astype(np.uint8)
    elif name.startswith(("bits", "grey of")):
        depth = 1 if name.startswith("bits") else int(name.split()[2])
        values = values * np.uint8(255 // ((1 << depth) - 1))
    channels = values.shape[2]
    alpha = values[..., -1:] if channels in (2, 4) else np.full_like(values[..., :1], 255)
    rgb = values[..., :3] if channels > 2 else np.repeat(values[..., :1], 3, axis=2)
    if mode == "L":
        return np.asarray(Image.fromarray(rgb).convert("L"))[..., None]
    return rgb if mode == "RGB" else np.concatenate([rgb, alpha], axis=2)


@loop_over("mode", MODES)
@loop_over("name", NAMES)
def test_an_image_is_what_the_guide_says_of_its_values(name, mode, seed):
    case = cases(seed)[name]
    wanted = expected(name, case, mode)
    header = read_header(case.data, LARGEST)
    assert (header.height, header.width, header.error) == (13, 17, None)
    if wanted is None:
        with pytest.raises(BadImage, match=r"^unsupported-format: "):
            decode_with_pillow(case.data, mode, LARGEST)
        return
    decoded = decode_with_pillow(case.data, mode, LARGEST)
    assert (decoded.dtype, decoded.shape) == (wanted.dtype, wanted.shape)
    assert decoded.flags.writeable
    if mode != "raw" and ("of 16" in name or "of interlaced" in name):
        # The upper byte of each value.
        assert np.abs(decoded.astype(int) - wanted).max() <= 1
    else:
        assert decoded.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("colours", ["L", "RGB"])
def test_a_jpeg_is_what_pillow_decodes(colours, mode):
    photo = Image.linear_gradient("L").resize((40, 30)).convert(colours)
    data = save(photo, "JPEG")
    if (mode, colours) == ("labels", "RGB"):
        with pytest.raises(BadImage, match="labels in the mode RGB: these are colours"):
            decode_with_pillow(data, mode, LARGEST)
        return
    with Image.open(io.BytesIO(data)) as image:
        if mode == "L":
            image.draft("L", image.size)
        kept = mode in ("labels", "raw")
        wanted = np.asarray(image if kept else image.convert(mode))
    decoded = decode_with_pillow(data, mode, LARGEST)
    np.testing.assert_array_equal(decoded, wanted.reshape(30, 40, -1))


def test_no_raw_image_takes_more_memory_than_its_header_foretells():
    decoding = make_decode_spec(
        device="cpu", size=None, resize="stretch", mode="raw", transform=None, max_pixels=None
    )
    for name, case in cases(0).items():
        told = decoding.nbytes(read_header(case.data, LARGEST))
        assert case.values.nbytes <= told <= 4 * case.values.nbytes, name


@pytest.mark.parametrize("maximum", [15, 300, 4095])
def test_grey_maps_that_pillow_would_scale_are_refused_as_raw(maximum):
    head = b"P5\n# a comment\n2 1\n%d\n" % maximum
    data = head + (b"\1\2" if maximum < 256 else b"\0\1\0\2")
    with pytest.raises(BadImage, match="may have scaled"):
        decode_with_pillow(data, "raw", LARGEST)


@pytest.mark.parametrize(
    "data",
    [
        b"P6 2 1 65535\n" + bytes(12),
        png(np.zeros((2, 3, 2), np.uint16), 16, 4),
        save(Image.new("CMYK", (3, 2)), "TIFF"),
    ],
)
def test_values_of_which_pillow_has_a_part_are_refused_as_raw(data):
    with pytest.raises(BadImage, match="unsupported-format: raw values"):
        decode_with_pillow(data, "raw", LARGEST)
