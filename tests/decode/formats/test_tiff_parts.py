"""Parts, pages and levels of TIFFs, and frames of animations, beside tifffile and Pillow."""

from __future__ import annotations

import io
import itertools
import struct
import zlib

import numpy as np
import pytest
import tifffile
from corpus import save
from PIL import Image
from synthetic import tiff

from dask_image_ingest.decode.formats import BadImage, page_shapes
from dask_image_ingest.decode.formats.header import read_header
from dask_image_ingest.decode.formats.tiff import OpenTiff
from dask_image_ingest.decode.pillow import Animation, decode_region, decode_with_pillow
from dask_image_ingest.decode.region import Region

LARGEST = 10**6
MODES = ("RGB", "RGBA", "L", "labels", "raw")


class Counted:
    """Bytes that count what is read of them."""

    def __init__(self, data):
        self.data, self.read, self.slices = data, 0, 0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, part):
        found = self.data[part]
        self.read, self.slices = self.read + len(found), self.slices + 1
        return found


def upright(array, orientation):
    """By NumPy's rotations, as EXIF describes the eight."""
    array = np.rot90(array, {3: 2, 4: 2, 5: 3, 6: 3, 7: 1, 8: 1}.get(orientation, 0))
    return array[:, ::-1] if orientation in (2, 4, 5, 7) else array


def regions(rng, shape, number=3):
    """Regions of an image of this height and width."""
    for _ in range(number):
        height, width = rng.randint(1, shape[0]), rng.randint(1, shape[1])
        top, left = rng.randint(0, shape[0] - height), rng.randint(0, shape[1] - width)
        yield Region(top, left, height, width)


def check_parts(rng, data, said):
    """Regions in all modes are slices of the whole; how many modes show it."""
    header, shown = read_header(data, LARGEST), 0
    for mode in MODES:
        try:
            whole = decode_with_pillow(data, mode, LARGEST)
        except BadImage:
            continue
        shown += 1
        for region in regions(rng, (header.height, header.width)):
            part = decode_region(Counted(data), mode, LARGEST, region)
            assert part.dtype == whole.dtype
            np.testing.assert_array_equal(part, region.of(whole), f"{mode} {region} {said}")
    return shown


@pytest.mark.rounds(1, nightly=100)
def test_a_region_has_the_pixels_of_a_decode_in_full(rng):
    draw = np.random.default_rng(rng.randrange(1 << 30))
    for _ in range(25):
        shape = rng.randint(1, 90), rng.randint(1, 90), rng.choice([1, 1, 2, 3, 3, 4])
        kind = rng.choice(["u1", "u1", "u2", "f4"])
        array = draw.integers(0, 127, shape).astype(kind)
        orientation = rng.randint(1, 8)
        options = {"compression": rng.choice([None, "zlib", "lzw", "packbits", "zstd", "lzma"])}
        if options["compression"] not in (None, "packbits"):
            options["predictor"] = rng.choice([False, 3 if kind == "f4" else True])
        if shape[2] > 1:
            options["planarconfig"] = rng.choice(["contig", "separate"])
        options |= rng.choice([{}, {"rowsperstrip": rng.randint(1, 50)}, {"tile": (16, 32)}])
        options |= {"byteorder": rng.choice("<>"), "bigtiff": rng.random() < 0.3}
        photometric = "rgb" if shape[2] > 2 else rng.choice(["minisblack", "miniswhite"])
        data = tiff(
            array, photometric, metadata=None, extratags=[(274, 3, 1, orientation, True)], **options
        )
        for region in regions(rng, upright(array, orientation).shape):
            part = decode_region(data, "raw", LARGEST, region)
            np.testing.assert_array_equal(part, region.of(upright(array, orientation)))
        assert check_parts(rng, data, (photometric, orientation, options))


def with_common_tables(tiles, shape, tile, subsampling):
    """A TIFF of JPEGs without their tables, which are in a tag, as scanners of slides write it."""
    tables, rests = b"", []
    for pixels in tiles:
        jpeg = save(Image.fromarray(pixels), "JPEG", subsampling=0 if subsampling == 1 else 2)
        at, kept, rest = 2, b"", b""
        while jpeg[at : at + 2] != b"\xff\xda":
            end = at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
            if jpeg[at + 1] in (0xDB, 0xC4):  # of quantization, Huffman's
                kept += jpeg[at:end]
            else:
                rest += jpeg[at:end]
            at = end
        assert kept == (tables or kept)
        tables = kept
        rests.append(b"\xff\xd8" + rest + jpeg[at:])
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        writer.write(
            iter(rests), shape=shape, dtype=np.uint8, tile=tile, compression="jpeg",
            photometric="ycbcr", subsampling=(subsampling,) * 2, metadata=None,
            jpegtables=b"\xff\xd8" + tables + b"\xff\xd9",
        )  # fmt: skip
    return file.getvalue()


@pytest.mark.parametrize("subsampling", [1, 2])
def test_a_region_of_jpegs_with_common_tables_is_that_of_the_whole(subsampling, rng):
    array = np.random.default_rng(0).integers(0, 256, (70, 90, 3), np.uint8)
    padded = np.pad(array, ((0, 26), (0, 6), (0, 0)))
    tiles = [
        padded[top : top + 32, left : left + 48]
        for top, left in itertools.product(range(0, 96, 32), range(0, 96, 48))
    ]
    data = with_common_tables(tiles, array.shape, (32, 48), subsampling)
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        assert 347 in file.pages[0].tags
    with Image.open(io.BytesIO(data)) as image:
        whole = np.asarray(image.convert("RGB"))
    for region in regions(rng, array.shape, 20):
        part = decode_region(data, "RGB", LARGEST, region)
        np.testing.assert_array_equal(part, region.of(whole))
    assert check_parts(rng, data, subsampling) == 4


@pytest.mark.parametrize("compression", ["jpeg", "tiff_lzw", "tiff_deflate", "packbits", "group4"])
def test_a_region_of_strips_that_libtiff_wrote_is_that_of_the_whole(compression, rng):
    array = np.random.default_rng(0).integers(0, 256, (70, 90, 3), np.uint8)
    image = Image.fromarray(array[..., 0] > 99 if compression == "group4" else array)
    data = save(image, "TIFF", compression=compression, strip_size=2_000)
    assert check_parts(rng, data, compression) >= 4


def test_a_region_of_the_old_form_of_jpeg_is_that_of_the_whole(rng):
    """One JPEG, whose place only tags of its own say."""
    array = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    jpeg = save(Image.fromarray(array), "JPEG", subsampling=0)
    jpeg += bytes(len(jpeg) % 2)
    at, size = 8 + len(jpeg), len(jpeg)
    tags = [(256, 64), (257, 48), (259, 6), (262, 6), (273, 8), (277, 3), (278, 48), (279, size)]
    tags += [(512, 1), (513, 8), (514, size), (530, 1 | 1 << 16)]
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags]
    entries[-1] = struct.pack("<HHII", 530, 3, 2, tags[-1][1])
    entries.insert(2, struct.pack("<HHII", 258, 3, 3, at + 2 + 12 * 13 + 4))
    directory = struct.pack("<H", 13) + b"".join(entries) + bytes(4) + struct.pack("<3H", 8, 8, 8)
    data = b"II*\0" + struct.pack("<I", at) + jpeg + directory
    with Image.open(io.BytesIO(jpeg)) as image:
        whole = np.asarray(image)
    for region in regions(rng, whole.shape, 9):
        part = decode_region(data, "RGB", LARGEST, region)
        np.testing.assert_allclose(part, region.of(whole), rtol=0, atol=1)  # libtiff rounds
    assert check_parts(rng, data, "old") >= 3


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("layout", [{"tile": (64, 64)}, {"rowsperstrip": 8}, {}])
def test_of_a_large_tiff_no_more_is_read_than_the_strips_or_tiles_of_a_region(compression, layout):
    array = np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), np.uint8)
    data = Counted(tiff(array, "rgb", metadata=None, compression=compression, **layout))
    region = Region(500, 300, 40, 50)
    np.testing.assert_array_equal(decode_region(data, "RGB", LARGEST * 2, region), region.of(array))
    rows = {"tile": 2 * 64 * 64 * 3 * 2, "rowsperstrip": 6 * 8 * 1024 * 3}.get(*layout or [None])
    if rows is None:  # one strip, whose rows are known without compression
        rows = array.size if compression else 40 * 1024 * 3
    assert data.read <= 1.02 * rows + 4096
    # The limit is that of what is decoded.
    small = rows // 3
    if rows < array.size:
        decode_region(data, "RGB", small, region)
        with pytest.raises(BadImage, match=r"^too-large"):
            decode_region(data, "RGB", small // 4, region)
        with pytest.raises(BadImage, match=r"^too-large"):
            decode_with_pillow(data, "RGB", small)


@pytest.mark.parametrize("options", [{}, {"bigtiff": True}, {"byteorder": ">"}])
def test_pages_are_directories_each_followed_by_its_levels(options):
    """As OME-TIFFs have them in SubIFDs, and as scanners of slides do, one after the other."""
    draw, file, wanted = np.random.default_rng(0), io.BytesIO(), []
    with tifffile.TiffWriter(file, **options) as writer:
        for height in (96, 80, 64):
            levels = [draw.integers(0, 256, (height // n, 64 // n), np.uint8) for n in (1, 2, 4)]
            tile = {"tile": (16, 16), "compression": "zlib", "metadata": None}
            subifds = 2 if height != 64 else 0  # the last page has its levels after it
            writer.write(levels[0], subifds=subifds, **tile)
            for level in levels[1:]:
                writer.write(level, subfiletype=1, **tile)
            wanted += levels
    data = file.getvalue()
    assert page_shapes(data) == [level.shape for level in wanted]
    for page, level in enumerate(wanted):
        assert read_header(data, LARGEST, page)[1:3] == level.shape
        pixels = decode_with_pillow(data, "raw", LARGEST, page)
        np.testing.assert_array_equal(pixels[..., 0], level)
        region = Region(3, 5, 9, 10)
        part = decode_region(data, "raw", LARGEST, region, page)
        np.testing.assert_array_equal(part[..., 0], region.of(level))
    error = "page: it has 9 pages, counted from 0, and no page 9"
    assert read_header(data, LARGEST, 9).error == error


def test_pages_that_are_turned_have_their_upright_size():
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        for orientation in (1, 6):
            tags = [(274, 3, 1, orientation, True)]
            writer.write(np.zeros((20, 30), np.uint8), extratags=tags, metadata=None)
    assert page_shapes(file.getvalue()) == [(20, 30), (30, 20)]
    assert decode_with_pillow(file.getvalue(), "L", LARGEST, 1).shape == (30, 20, 1)


ANIMATIONS = [
    ("GIF", "RGB", {}),
    ("GIF", "P", {"disposal": 2, "transparency": 3}),
    ("WEBP", "RGB", {"lossless": True}),
    ("PNG", "RGB", {}),
    ("PNG", "RGB", {"default_image": True}),
    ("PNG", "P", {}),
    ("PNG", "RGBA", {"blend": 1}),
]


@pytest.mark.parametrize(("format", "mode", "options"), ANIMATIONS)
def test_frames_of_an_animation_are_those_that_pillow_shows(format, mode, options):
    draw = np.random.default_rng(0)
    frames = [Image.fromarray(draw.integers(0, 256, (20, 30, 3), np.uint8)) for _ in range(4)]
    first, *others = [frame.convert(mode) for frame in frames]
    data = save(first, format, save_all=True, append_images=others, **options)
    assert page_shapes(data) == [(20, 30)] * 4
    for page, mode in itertools.product(range(4), ("RGB", "RGBA", "L")):
        with Image.open(io.BytesIO(data)) as shown:
            shown.seek(page)
            wanted = np.asarray(shown.convert(mode)).reshape(20, 30, -1)
        np.testing.assert_array_equal(decode_with_pillow(data, mode, LARGEST, page), wanted)
        header = read_header(data, LARGEST, page)
        assert header.error is None
        assert header.needs_pillow or page == 0
        region = Region(2, 3, 10, 11)
        part = decode_region(data, mode, LARGEST, region, page)
        np.testing.assert_array_equal(part, region.of(wanted))
    for mode, order in itertools.product(("RGB", "RGBA", "L"), ((1, 2, 3), (2, 1, 3, 3))):
        walk = Animation(data, mode)
        for page in order:  # after other frames as alone
            alone = decode_with_pillow(data, mode, LARGEST, page)
            np.testing.assert_array_equal(walk.frame(page), alone)
    with pytest.raises(BadImage, match=r"^page: it has 4 pages"):
        decode_with_pillow(data, "RGB", LARGEST, 4)


def test_an_animation_that_ends_too_early_costs_its_last_frames():
    frames = [Image.fromarray(np.full((20, 30), 60 * n, np.uint8)) for n in range(3)]
    data = save(frames[0], "PNG", save_all=True, append_images=frames[1:])
    at = data.index(b"acTL") + 4
    chunk = b"acTL" + struct.pack(">I", 1 << 20) + data[at + 4 : at + 8]
    claimed = data[: at - 4] + chunk + struct.pack(">I", zlib.crc32(chunk)) + data[at + 12 :]
    with pytest.raises(BadImage, match=r"^corrupt: an animation of 1,048,576 frames"):
        page_shapes(claimed)
    with pytest.raises(BadImage, match=r"^(corrupt|truncated): "):
        decode_with_pillow(claimed, "L", LARGEST, 7)


def directories(number, first=8, size=6, last=0):
    """A TIFF of directories without tags, and the offset that the last one leads to."""
    starts = [first + size * n for n in range(number)]
    links = [*starts[1:], last]
    body = b"".join(struct.pack("<HI", 0, link) for link in links)
    return b"II*\0" + struct.pack("<I", first) + body


DAMAGED = {
    "to itself": (directories(1, last=8), "lead back to byte 8"),
    "in a circle": (directories(9, last=20), "lead back to byte 20"),
    "out of the file": (directories(3, last=10**9), "ends inside its directory"),
    "cut": (directories(9)[:-20], "ends inside its directory"),
}


@pytest.mark.parametrize(("data", "error"), DAMAGED.values(), ids=[*DAMAGED])
def test_damaged_directories_are_told(data, error):
    with pytest.raises(BadImage, match=error):
        page_shapes(data)
    assert error in read_header(data, LARGEST, 99).error


def test_levels_that_are_their_page_are_none():
    count = 60_000
    tag = struct.pack("<HHII", 330, 4, count, 26) + bytes(4)
    data = b"II*\0" + struct.pack("<IH", 8, 1) + tag + struct.pack("<I", 8) * count
    assert page_shapes(data) == [(0, 0)]


def test_thousands_of_pages_are_found_in_one_walk():
    data = Counted(directories(70_000))
    opened = OpenTiff(data)
    assert len(page_shapes(opened)) == 1 << 16, "no more than that"
    walked = data.slices
    assert walked <= 8 << 16
    for page in range(1_000):
        assert read_header(opened, LARGEST, page).error == "corrupt: its size is 0 x 0"
    assert data.slices - walked <= 10 * 1_000
