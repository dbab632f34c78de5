"""The rules by which Pillow decodes, each against the numbers that it promises."""

import io
import pickle
import struct
import warnings
from concurrent.futures import ThreadPoolExecutor

import corpus
import numpy as np
import pandas as pd
import pytest
from handmade import exif, insert_after_soi, jpeg_segment, png, png_chunk, without_segment
from loop_over import loop_over
from photo_shards import write_tar
from PIL import Image, ImageFile, ImageOps

import dask_image_ingest as dii
from dask_image_ingest.decode.formats.header import read_header
from dask_image_ingest.decode.formats.stored import BadImage
from dask_image_ingest.decode.pillow import decode_with_pillow

MAX_PIXELS = 10**7
IMAGES = corpus.images()
BAD_IMAGES = corpus.bad_images()
PICTURE = np.asarray(corpus.picture())


def decode(data, mode="RGB"):
    return decode_with_pillow(data, mode, MAX_PIXELS)


@loop_over("mode", ["RGB", "L"])
@loop_over("name", IMAGES)
def test_every_image_decodes_to_the_shape_that_its_header_tells(name, mode):
    pixels = decode(IMAGES[name], mode)
    header = read_header(IMAGES[name], MAX_PIXELS)
    assert pixels.shape == (header.height, header.width, {"RGB": 3, "L": 1}[mode])
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable


@loop_over("name", BAD_IMAGES)
def test_bad_image_raises_its_code(name):
    data, code = BAD_IMAGES[name]
    with pytest.raises(BadImage) as raised:
        decode_with_pillow(data, "RGB", 178_956_970)
    assert raised.value.code == code
    header = read_header(data, 178_956_970)
    # An edge that no column holds is told by its own words.
    assert header.error in (None, str(raised.value)) or "no edge may exceed" in header.error


@loop_over(
    "name",
    # On what is cut or comes twice, readers do not agree.
    [name for name in IMAGES if "-exif-" in name and not name.endswith(("-cut", "-twice"))],
)
def test_orientation_is_applied_as_pillow_applies_it(name):
    with Image.open(io.BytesIO(IMAGES[name])) as image:
        turned = ImageOps.exif_transpose(image).convert("RGB")
    np.testing.assert_array_equal(decode(IMAGES[name]), np.asarray(turned))


def test_orientation_in_xmp_is_not_applied():
    assert decode(IMAGES["jpeg-xmp-orientation"]).shape == PICTURE.shape


@pytest.mark.parametrize("name", ["png-rgba-8", "webp-lossless-alpha", "tiff-rgba", "png-rgb-trns"])
def test_alpha_is_dropped_and_not_blended(name):
    np.testing.assert_array_equal(decode(IMAGES[name]), PICTURE)


def test_transparent_palette_keeps_its_colours():
    np.testing.assert_array_equal(
        decode(IMAGES["png-palette-8-trns"]), decode(IMAGES["png-palette-8"])
    )


@pytest.mark.parametrize("container", ["png", "tiff"])
def test_16_bits_are_scaled_and_rounded(container):
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    image = Image.fromarray(values)
    pixels = decode(corpus.save(image, container))
    expected = np.floor(values * (255 / 65535) + 0.5)
    np.testing.assert_array_equal(pixels, np.repeat(expected[..., None], 3, axis=2))


def test_16_bit_colours_are_at_most_one_off():
    values = corpus.deep("RGB")
    pixels = decode(png(values, 16, 2))
    assert np.abs(pixels - values * (255 / 65535)).max() <= 1


def test_wide_integers_are_16_bit_values():
    values = np.array([[-5, 0, 257, 65535, 70_000, 2**31 - 1]], np.int32)
    pixels = decode(corpus.save(Image.fromarray(values), "TIFF"), "L")
    assert pixels[0, :, 0].tolist() == [0, 0, 1, 255, 255, 255]


def test_floats_are_scaled_from_the_unit_range():
    values = np.array([[-1, 0, 0.25, 0.5, 1, 7, np.nan, np.inf, -np.inf]], np.float32)
    with warnings.catch_warnings(record=True) as caught:
        pixels = decode(corpus.save(Image.fromarray(values), "TIFF"), "L")
    assert pixels[0, :, 0].tolist() == [0, 0, 64, 128, 255, 255, 0, 255, 0]
    assert not caught


@loop_over("mode", ["RGB", "RGBA", "L"])
@loop_over("transform", [None, 0, 2])
@loop_over("name", ["jpeg-cmyk", "jpeg-ycck"])
def test_cmyk_is_what_pillow_shows_with_any_marker_of_adobe(name, transform, mode):
    data = without_segment(IMAGES[name], 0xEE)
    if transform is not None:
        data = insert_after_soi(
            data, jpeg_segment(0xEE, b"Adobe\0\x64\0\0\0\0" + bytes([transform]))
        )
    if name == "jpeg-cmyk" and transform in (None, 0):
        assert np.abs(decode(data).astype(int) - PICTURE).mean() < 3
    with Image.open(io.BytesIO(data)) as image:
        shown = np.asarray(image.convert(mode))
    (row,) = dii.decode_images(
        pd.DataFrame({"x": [data]}), image={"image": "x"}, mode=mode
    ).images.arrays()
    np.testing.assert_array_equal(row, shown.reshape(row.shape))


@pytest.mark.parametrize("name", ["gif-animated", "png-animated", "webp-animated", "tiff-pages"])
def test_the_first_frame_is_given(name):
    assert np.abs(decode(IMAGES[name]).astype(int) - PICTURE).mean() < 10


@pytest.mark.parametrize("name", ["png-grey-1", "tiff-group4", "pnm-pbm", "bmp-1"])
def test_one_bit_becomes_black_and_white(name):
    pixels = decode(IMAGES[name])
    assert np.unique(pixels).tolist() == [0, 255]
    assert (pixels[..., :1] == pixels).all()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_of_any_kind_are_taken(kind):
    np.testing.assert_array_equal(decode(kind(IMAGES["png-rgb-8"])), PICTURE)


def test_too_large_is_told_before_memory_is_reserved():
    with pytest.raises(BadImage, match="too-large: 67 x 45 is 3,015 pixels, more than"):
        decode_with_pillow(IMAGES["gif-still"], "RGB", 45 * 67 - 1)
    assert decode_with_pillow(IMAGES["gif-still"], "RGB", 45 * 67).shape == PICTURE.shape


@pytest.mark.parametrize("name", ["jpeg-420", "png-rgb-8", "pnm-ppm", "bmp-rgb", "avif-rgb"])
def test_the_limit_is_ours_and_not_the_one_of_the_process(name, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert read_header(IMAGES[name], MAX_PIXELS).error is None
    assert decode(IMAGES[name]).shape == PICTURE.shape
    assert Image.MAX_IMAGE_PIXELS == 10


@loop_over("name", [name for name in BAD_IMAGES if name.startswith("truncated-")])
def test_truncated_images_are_refused_whatever_the_process_allows(name, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(BadImage, match="truncated: "):
        decode(BAD_IMAGES[name][0])


def test_no_warning_leaks_from_any_thread():
    odd = corpus.save(corpus.picture(), "TIFF", tiffinfo={305: "software " * 9})
    # Longer than the file, of which Pillow warns.
    software = odd.index(struct.pack("<HHI", 305, 2, 82))
    odd = odd[: software + 4] + b"\xff\xff\xff\0" + odd[software + 8 :]
    with warnings.catch_warnings(record=True) as direct:
        warnings.simplefilter("always")
        Image.open(io.BytesIO(odd)).load()
    assert direct
    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        for pixels in pool.map(decode, [odd, IMAGES["gif-still"]] * 50):
            assert pixels.shape == PICTURE.shape
    assert list(warnings.filters) == before


@pytest.mark.slow
@pytest.mark.rounds(1, nightly=60)
def test_mutated_images_raise_nothing_but_bad_image(rng):
    names = [name for name, data in IMAGES.items() if len(data) < 30_000]
    for _ in range(500):
        data = bytearray(IMAGES[rng.choice(names)])
        for _ in range(rng.choice((1, 3, 10))):
            data[rng.randrange(min(len(data), rng.choice((100, 10**6))))] ^= 1 << rng.randrange(8)
        header = read_header(bytes(data), 10**6)
        try:
            pixels = decode_with_pillow(bytes(data), rng.choice(("RGB", "L")), 10**6)
        except BadImage:
            continue
        assert header.error is None
        assert pixels.shape[:2] == (header.height, header.width)


def test_hostile_text_is_escaped_and_short():
    bad = BadImage("corrupt", "\x1b[31m<b>é\n" + "x" * 1000)
    assert bad.detail.startswith("\\x1b[31m<b>\\xe9\\nxxx")
    assert len(bad.detail) == 200
    assert str(bad) == f"corrupt: {bad.detail}"


def test_bad_image_travels_between_processes():
    bad = pickle.loads(pickle.dumps(BadImage("corrupt", "back\\slash")))
    assert (bad.code, bad.detail, str(bad)) == ("corrupt", "back\\slash", "corrupt: back\\slash")


def test_first_of_two_exif_blocks_wins():
    blocks = [png_chunk(b"eXIf", exif(turn)) for turn in (6, 3)]
    image = IMAGES["png-rgb-8"]
    data = image[:33] + b"".join(blocks) + image[33:]
    np.testing.assert_array_equal(decode(data), np.rot90(PICTURE, -1))


def test_masks_keep_their_classes_only_where_the_guide_says_so(tmp_path):
    """Grey, of 8 bits, and not resized; what is done to others is what a picture wants."""
    mask = np.repeat(np.repeat(np.array([[1, 9], [200, 9]], np.uint8), 10, 0), 10, 1)
    grey, palette = Image.fromarray(mask), Image.fromarray(mask, "P")
    palette.putpalette([value for n in range(256) for value in (n // 2, 255 - n, 7)])
    files = {
        f"{name}.png": corpus.save(image, "PNG")
        for name, image in {"grey": grey, "palette": palette}.items()
    }
    shard = write_tar(tmp_path / "masks.tar", files)

    def read(**options):
        frame = dii.read_webdataset_images(shard, mode="L", backend="pandas", **options).compute()
        return dict(zip(frame["__key__"], frame.images.arrays(), strict=True))

    assert (read()["grey"][..., 0] == mask).all()
    assert len(np.unique(read(size=7)["grey"])) > 3
    assert (read()["palette"][..., 0] == np.asarray(palette.convert("RGB").convert("L"))).all()
    assert (np.asarray(Image.open(io.BytesIO(files["palette.png"]))) == mask).all()
