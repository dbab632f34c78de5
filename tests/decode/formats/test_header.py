"""What is read from an image's first bytes, against what Pillow reads from the whole of it."""

import io
import random
import struct
import time
import tracemalloc
import zlib

import corpus
import pytest
from handmade import insert_after_soi, jpeg_segment, png_chunk, webp_with_exif
from loop_over import loop_over
from PIL import Image, ImageOps

from dask_image_ingest.decode.formats.header import Header, read_header
from dask_image_ingest.decode.formats.stored import MAX_DETAIL

MAX_PIXELS = 10**7
IMAGES = corpus.images()
BAD_IMAGES = corpus.bad_images()
CODES = {"empty", "not-an-image", "unsupported-format", "too-large", "truncated", "corrupt"}


class Ranges:
    """A reader of remote ranges, which counts the bytes that were asked for."""

    def __init__(self, data: bytes) -> None:
        self.data, self.count = data, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, key: slice) -> bytes:
        self.count += len(self.data[key])
        return self.data[key]


# Pillow also turns images by XMP, of which DALI knows nothing, and by the last EXIF of two; and it
# refuses these texts.
OTHERWISE = {"jpeg-xmp-orientation", "png-exif-twice", "png-text-2m", "png-text-checksum"}


@loop_over("name", sorted(set(IMAGES) - OTHERWISE))
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_header_says_what_pillow_says(name):
    header = read_header(IMAGES[name], MAX_PIXELS)
    with Image.open(io.BytesIO(IMAGES[name])) as image:
        bands = len(image.getbands())
        width, height = ImageOps.exif_transpose(image).size
    assert header[:5] == (name.split("-")[0], height, width, bands, None)


@loop_over("name", [*IMAGES, *BAD_IMAGES])
def test_bytes_views_and_ranges_give_the_same(name):
    data = IMAGES[name] if name in IMAGES else BAD_IMAGES[name][0]
    header = read_header(data, MAX_PIXELS)
    assert read_header(memoryview(data), MAX_PIXELS) == header
    assert read_header(Ranges(data), MAX_PIXELS) == header


@loop_over("name", BAD_IMAGES)
def test_bad_image_has_the_code_of_its_error(name):
    data, code = BAD_IMAGES[name]
    header = read_header(data, MAX_PIXELS)
    if header.error is None:
        # The decoders have the last word on these: Pillow's formats, and damaged pixels.
        assert header.format not in ("jpeg", "png", "webp") or code == "corrupt"
    else:
        assert header.needs_pillow
        assert header.error.startswith(f"{code}: ")


def test_an_image_that_is_too_large_still_tells_its_size():
    data, _ = BAD_IMAGES["too-large-jpeg"]
    header = read_header(data, MAX_PIXELS)
    assert (header.height, header.width) == (60_000, 60_000)
    assert header.error == (
        "too-large: 60000 x 60000 is 3,600,000,000 pixels, more than max_pixels=10,000,000"
    )
    assert read_header(data, 60_000**2).error is None


def test_every_cut_of_a_photo_is_truncated(photos):
    for extension in ("jpg", "png", "webp"):
        data = next(photo.encoded for photo in photos if photo.extension == extension)
        whole = len(data) - data[4] % 2 if extension == "webp" else len(data)
        for length in (*range(16, 60), *range(60, whole, whole // 97), whole - 2, whole - 1):
            header = read_header(data[:length], MAX_PIXELS)
            assert header.error is not None, (extension, length)
            assert header.error.startswith("truncated: "), (extension, length)


@pytest.mark.parametrize("name", [name for name in IMAGES if "trailing" in name])
def test_bytes_after_the_end_are_no_truncation(name):
    assert read_header(IMAGES[name], MAX_PIXELS).error is None


def test_end_marker_far_from_the_end_is_found():
    image = IMAGES["jpeg-420"]
    assert read_header(image + bytes(5_000_000), MAX_PIXELS).error is None
    # On the border of the blocks in which it is looked for.
    scan = image.index(b"\xff\xda")
    start, padding = image[:-2], (1 << 20) - len(image[scan:-2]) - 1
    for shift in (-1, 0, 1):
        data = start + bytes(padding + shift) + b"\xff\xd9" + bytes(10_000)
        assert read_header(data, MAX_PIXELS).error is None


def test_only_the_bytes_that_matter_are_read():
    photo = corpus.save(Image.effect_noise((2000, 1500), 50), "JPEG", quality=95)
    exif = IMAGES["jpeg-exif-6"][2:38]
    ranges = Ranges(photo[:2] + jpeg_segment(0xE2, bytes(65_000)) * 5 + exif + photo[2:])
    header = read_header(ranges, MAX_PIXELS)
    assert (header.height, header.width) == (2000, 1500)
    assert len(ranges) > 1_000_000
    assert ranges.count < 20_000


def test_what_is_no_image_is_named_and_quoted():
    def error(data: bytes) -> str:
        return read_header(data, MAX_PIXELS).error

    assert error(b"") == "empty: the file has no bytes"
    assert error(b"<!DOCTYPE html><p>") == "not-an-image: looks like HTML: '<!DOCTYPE html><p>'"
    assert error(b'{"a": 1}') == "not-an-image: looks like JSON: '{\"a\": 1}'"
    assert error(bytes(100)).startswith("not-an-image: looks like zeros: '\\x00")
    assert error(b"PK\3\4") == "not-an-image: looks like a zip archive: 'PK\\x03\\x04'"


@pytest.mark.slow
@pytest.mark.rounds(2, nightly=60)
def test_mutated_images_never_raise_nor_hang(rng):
    files = [*IMAGES.values(), *(data for data, _ in BAD_IMAGES.values())]
    for number in range(2_000):
        data = mutated(rng.choice(files)[:20_000], rng)
        start = time.thread_time()
        header = read_header(data, MAX_PIXELS)
        assert time.thread_time() - start < 2, number
        check(header)


def mutated(data: bytes, chance: random.Random) -> bytes:
    mutable = bytearray(data)
    reach = max(1, chance.choice((32, 300, len(data))))
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        at = chance.randrange(reach)
        kind = chance.randrange(4)
        if kind == 0:
            mutable[at : at + 1] = chance.randbytes(1)
        elif kind == 1:
            mutable[at : at + 4] = chance.choice((b"\xff" * 4, bytes(4), b"\0\0\0\x01"))
        elif kind == 2:
            del mutable[at : at + chance.randrange(9)]
        else:
            mutable[at:at] = mutable[: chance.randrange(40)]
    if chance.random() < 0.2:
        del mutable[chance.randrange(len(mutable) + 1) :]
    return bytes(mutable)


def check(header: Header) -> None:
    assert header.height is None or header.height > 0
    assert (header.height is None) == (header.width is None) == (header.channels is None)
    if header.error is None:
        assert header.format is not None
        assert header.height * header.width <= MAX_PIXELS
    else:
        code, _, detail = header.error.partition(": ")
        assert code in CODES
        assert detail
        assert detail.isascii()
        assert detail.isprintable()
        assert len(detail) <= MAX_DETAIL


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8" + b"\xff" * 5_000_000,
        b"\xff\xd8\xff\xe0" + bytes(5_000_000),
        b"\xff\xd8\xff" + b"\xe0\0\2\xff" * 1_500_000,
        b"\xff\xd8\xff" + b"\xe1\0\2\xff" * 1_500_000,
        IMAGES["png-rgb-8"][:33] + png_chunk(b"IDAT", b"") * 500_000,
        IMAGES["png-rgb-8"][:33] + png_chunk(b"eXIf", b"") * 500_000,
        IMAGES["webp-exif-6"][:4] + b"\xff\xff\xff\x7f" + IMAGES["webp-exif-6"][8:] * 10_000,
    ],
    ids=["fill", "junk", "segments", "exif", "chunks", "exif-chunks", "webp"],
)
def test_endless_headers_end_soon(data):
    start = time.thread_time()
    check(read_header(data, MAX_PIXELS))
    assert time.thread_time() - start < 2


@pytest.mark.slow
def test_compressed_metadata_stays_compressed():
    bomb = zlib.compress(bytes(50_000_000))
    profile = png_chunk(b"iCCP", b"profile\0\0" + bomb)
    text = png_chunk(b"zTXt", b"Comment\0\0" + bomb)
    image = IMAGES["png-rgb-8"]
    data = image[:33] + profile + text + image[33:]
    tracemalloc.start()
    try:
        assert read_header(data, MAX_PIXELS).error is None
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("image", ["jpeg", "png", "webp"])
@pytest.mark.parametrize("kind", [1, 4, 9])
def test_odd_orientations_are_not_given_to_dali(image, kind):
    # One number, but of another type than EXIF wants: readers do not agree on it.
    entry = struct.pack("<HHII", 0x0112, kind, 1, 6)
    block = b"II*\0\x08\0\0\0\x01\0" + entry + bytes(4)
    if image == "jpeg":
        data = insert_after_soi(IMAGES["jpeg-420"], jpeg_segment(0xE1, b"Exif\0\0" + block))
    elif image == "png":
        data = IMAGES["png-rgb-8"][:33] + png_chunk(b"eXIf", block) + IMAGES["png-rgb-8"][33:]
    else:
        data = webp_with_exif(IMAGES["webp-lossy"], corpus.WIDTH, corpus.HEIGHT, block)
    assert read_header(data, MAX_PIXELS).needs_pillow


def test_png_with_more_chunks_than_are_looked_at_is_careful():
    head, tail = IMAGES["png-rgb-8"][:33], IMAGES["png-rgb-8"][33:]
    data = head + png_chunk(b"teSt", b"") * 70_000 + tail
    header = read_header(data, MAX_PIXELS)
    assert (header.needs_pillow, header.error) == (True, None)
