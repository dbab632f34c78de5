"""Which files DALI may get: those that it would not refuse, DALI itself being the witness."""

import struct

import numpy as np
import pytest
from corpus import images, picture, save
from fuzz import mutate
from handmade import jpeg_segment, png_chunk, without_segment
from loop_over import loop_over

from dask_image_ingest.decode.formats import is_valid
from dask_image_ingest.decode.formats.header import read_header

MAX_PIXELS = 1 << 22
BASELINE = save(picture(), "JPEG", quality=80)
PROGRESSIVE = save(picture(), "JPEG", quality=80, progressive=True)
PNG = save(picture(), "PNG")
# libjpeg skips them, and so does Pillow, which gets these images here: they are rare.
FILLED = "jpeg-fill-bytes"


def edited(data: bytes, marker: int, offset: int, new: bytes) -> bytes:
    """``data`` with other bytes in its first segment of a kind, from ``offset`` of its body on."""
    at = data.index(bytes((0xFF, marker))) + 4 + offset
    return data[:at] + new + data[at + len(new) :]


@loop_over("name", [name for name in images() if name.startswith(("jpeg", "png"))])
@loop_over("thorough", [False, True])
def test_what_dali_gets_is_not_held_back(name, thorough):
    data = images()[name]
    header = read_header(data, MAX_PIXELS)
    if not header.needs_pillow:
        assert is_valid(header.format, data, thorough) == (name != FILLED)


@loop_over(
    "damaged",
    {
        "huffman table of too many codes": edited(BASELINE, 0xC4, 1, b"\xff" * 16),
        "huffman table of no such name": edited(BASELINE, 0xC4, 0, b"\x07"),
        "huffman table beyond its segment": edited(BASELINE, 0xC4, 16, b"\xff"),
        "quantization table of no such name": edited(BASELINE, 0xDB, 0, b"\x09"),
        "quantization table missing": without_segment(BASELINE, 0xDB),
        "huffman tables missing": without_segment(BASELINE, 0xC4),
        "sampling factor of 0": edited(BASELINE, 0xC0, 7, b"\x00"),
        "components of one name": edited(BASELINE, 0xC0, 9, b"\x01"),
        "scan of an unknown component": edited(BASELINE, 0xDA, 1, b"\x63"),
        "scan of part of the frequencies": edited(BASELINE, 0xDA, 8, b"\x05"),
        "scan of no components": edited(BASELINE, 0xDA, 0, b"\x00"),
        "progressive scan out of order": edited(PROGRESSIVE, 0xDA, 9, b"\x20"),
        "segment shorter than its length": edited(BASELINE, 0xE0, -2, b"\x00\x01"),
        "restart interval of three bytes": BASELINE[:2] + jpeg_segment(0xDD, b"abc") + BASELINE[2:],
        "arithmetic conditioning": BASELINE[:2] + jpeg_segment(0xCC, b"\x00\x00") + BASELINE[2:],
        "nothing after a segment": BASELINE[:20],
    }.items(),
)
def test_a_jpeg_that_would_fail_its_batch_is_found(damaged):
    assert not is_valid("jpeg", damaged[1])


@pytest.mark.parametrize("marker", [0xC0, 0xC4, 0xDA, 0xF8, 0x01])
def test_a_marker_among_the_pixels_is_found_by_a_thorough_look(marker):
    at = BASELINE.index(b"\xff\xda") + 200
    damaged = BASELINE[:at] + bytes((0xFF, marker, 0, 2)) + BASELINE[at + 4 :]
    assert is_valid("jpeg", damaged)
    assert not is_valid("jpeg", damaged, thorough=True)


@pytest.mark.parametrize("kind", [b"IHDR", b"IDAT"])
def test_a_png_with_a_wrong_checksum_is_found(kind):
    at = PNG.index(kind) + 8
    assert not is_valid("png", PNG[:at] + bytes((PNG[at] ^ 1,)) + PNG[at + 1 :])


def test_checksums_of_other_chunks_do_not_matter():
    at = 33
    text = bytearray(png_chunk(b"tEXt", b"a\0b"))
    text[-1] ^= 1
    assert is_valid("png", PNG[:at] + text + PNG[at:])
    (size,) = struct.unpack(">I", PNG[at : at + 4])
    assert size < len(PNG)


def test_dali_refuses_no_jpeg_that_has_passed_a_thorough_look(rng):
    pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")
    from dask_image_ingest.decode import DecodeSpec
    from dask_image_ingest.decode.dali import Refused
    from dask_image_ingest.decode.planner import decoders_for

    originals = [data for name, data in images().items() if name.startswith("jpeg")]
    dali = decoders_for(DecodeSpec()).encoded
    refused = 0
    for _ in range(600):
        mutant = mutate(rng, rng.choice(originals), rng.choice(originals))
        header = read_header(mutant, MAX_PIXELS)
        if header.format != "jpeg" or header.error is not None or header.needs_pillow:
            continue
        (pixels,) = dali.run([[np.frombuffer(mutant, np.uint8)]])
        if isinstance(pixels, Refused):
            refused += 1
            assert not is_valid("jpeg", mutant, thorough=True), mutant.hex()
    assert refused > 20
