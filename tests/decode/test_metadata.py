"""Metadata change no pixel and make no error, in any mode, alone and among other images.

The witness is the same image without them.
"""

from __future__ import annotations

import functools
import struct
import zlib

import dask
import numpy as np
import pandas as pd
import pytest
from corpus import images
from handmade import exif, insert_after_soi, jpeg_segment, png_chunk

import dask_image_ingest as dii
from dask_image_ingest.decode.formats.header import read_header

MODES = ("RGB", "RGBA", "L", "labels", "raw")
FORMATS = ("png", "jpeg", "webp")
# Of no part of the picture's: those change the pixels, or how they are decoded.
PLAIN = {
    name: data
    for name, data in images().items()
    if name.startswith(FORMATS)
    and not any(word in name for word in ("exif", "anim", "junk", "zeros"))
}
CHUNKS = "tEXt zTXt iTXt iCCP gAMA cHRM sRGB pHYs bKGD hIST sPLT tIME sBIT cICP oFFs acTL fcTL fdAT"
SEGMENTS = [b"", b"JFIF", b"JFIF\0", b"JFXX\0", b"Adobe", b"ICC_PROFILE\0", b"ICC_PROFILE\0\1\2"]
SEGMENTS += [b"Photoshop 3.0\x008BIM\x03\xed", b"MPF\0", b"http://ns.adobe.com/xap/1.0/\0"]


def anything(rng):
    """Bytes of any kind, some of which are two million when they are unpacked."""
    text = zlib.compress(bytes([rng.randrange(256)]) * rng.choice((10, 1 << 21)))
    return rng.choice((b"", text, bytes(1000), rng.randbytes(rng.randrange(300))))


def in_png(data, rng):
    kind = rng.choice(CHUNKS.split()).encode()
    start = {b"zTXt": b"Comment\0\0", b"iTXt": b"Comment\0\1\0\0\0", b"iCCP": b"profile\0\0"}
    chunk = png_chunk(kind, start.get(kind, b"") + anything(rng))
    if rng.random() < 0.3:
        chunk = chunk[:-4] + rng.randbytes(4)
    at = rng.choice((33, data.index(b"IDAT") - 4, data.rindex(b"IEND") - 4))
    return data[:at] + chunk + data[at:]


def in_jpeg(data, rng):
    # Whole segments of JFIF and Adobe change colours.
    marker, body = rng.choice((0xFE, *range(0xE0, 0xF0))), rng.choice(SEGMENTS)
    body += anything(rng)[: 4 if marker in (0xE0, 0xEE) else 60_000]
    return insert_after_soi(data, jpeg_segment(marker, body))


def in_webp(data, rng):
    if data[12:16] != b"VP8X":
        header = read_header(data, 1 << 20)
        alpha = 0x10 * (header.channels == 4)
        edges = (struct.pack("<I", edge - 1)[:3] for edge in (header.width, header.height))
        data = data[:12] + b"VP8X" + struct.pack("<II", 10, alpha) + b"".join(edges) + data[12:]
    end = len(data)
    kind = rng.choice((b"ICCP", b"EXIF", b"XMP ", b"abcd"))
    flag = {b"ICCP": 0x20, b"EXIF": 0x08, b"XMP ": 0x04}.get(kind, 0) * rng.randrange(2)
    body = exif(1) if kind == b"EXIF" else anything(rng)
    chunk = kind + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)
    at = 30 if kind == b"ICCP" else end
    flags = bytes([data[20] | flag])
    made = data[:20] + flags + data[21:at] + chunk + data[at:end]
    return made[:4] + struct.pack("<I", len(made) - 8) + made[8:]


def decoded(files, mode):
    with dask.config.set(scheduler="synchronous"):
        frame = dii.decode_images(pd.DataFrame({"x": files}), image={"image": "x"}, mode=mode)
    return frame.images.arrays()


@functools.cache
def without(mode):
    return dict(zip(PLAIN, decoded(list(PLAIN.values()), mode), strict=True))


def add_metadata(name, rng):
    data = PLAIN[name]
    for _ in range(rng.choice((1, 1, 3))):
        data = {"png": in_png, "jpeg": in_jpeg, "webp": in_webp}[name.split("-")[0]](data, rng)
    return data


@pytest.mark.rounds(1, nightly=100)
@pytest.mark.parametrize("mode", MODES)
def test_metadata_change_no_pixel_alone_or_among_others(mode, rng):
    names = [rng.choice(list(PLAIN)) for _ in range(40)]
    files = [add_metadata(name, rng) for name in names]
    among = decoded(files, mode)
    alone = {row: decoded([files[row]], mode)[0] for row in rng.sample(range(40), 5)}
    for row, name in enumerate(names):
        wanted = without(mode)[name]
        for pixels in [among[row], *([alone[row]] if row in alone else [])]:
            assert (pixels is None) == (wanted is None), name
            if wanted is not None:
                np.testing.assert_array_equal(pixels, wanted, name)


@pytest.mark.rounds(1, nightly=50)
@pytest.mark.parametrize("name", ["webp-exif-3", "png-rgb-8", "png-palette-4-trns"])
def test_a_damaged_image_has_one_fate_alone_and_among_others(name, rng):
    damaged = []
    for _ in range(30):
        data = bytearray(images()[name])
        data[rng.randrange(30, len(data))] = rng.randrange(256)
        damaged.append(bytes(data))
    photos = [images()["jpeg-420"] + bytes([number]) for number in range(60)]
    among = decoded(damaged + photos, "RGB")[: len(damaged)]
    kept = decoded(damaged, "RGBA")
    for pixels, alone, alpha in zip(among, decoded(damaged, "RGB"), kept, strict=True):
        assert (pixels is None) == (alone is None) == (alpha is None)
        if pixels is not None:
            np.testing.assert_array_equal(pixels, alone)
