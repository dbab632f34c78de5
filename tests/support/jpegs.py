"""JPEGs of every coding, and what others read in them: their segments, their coefficients."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import jpeglib
import numpy as np
from corpus import picture, save
from handmade import exif, insert_after_soi, jpeg_segment, rare_jpeg
from PIL import Image

PROFILE = bytes(range(256)) * 300


def not_baseline() -> dict[str, bytes]:
    """Pictures that become baseline, by name."""
    rgb, grey, cmyk = (picture(mode) for mode in ("RGB", "L", "CMYK"))
    one = {"quality": 90, "progressive": True}
    turned = jpeg_segment(0xE1, b"Exif\0\0" + exif(6))
    return {
        "444": save(rgb, "JPEG", subsampling="4:4:4", **one),
        "422": save(rgb, "JPEG", subsampling="4:2:2", **one),
        "420": save(rgb, "JPEG", subsampling="4:2:0", **one),
        "rgb": save(rgb, "JPEG", keep_rgb=True, **one),
        "grey": save(grey, "JPEG", **one),
        "cmyk": save(cmyk, "JPEG", **one),
        "restart": save(rgb, "JPEG", restart_marker_rows=1, **one),
        "low": save(rgb, "JPEG", quality=3, progressive=True),
        "turned": insert_after_soi(save(rgb, "JPEG", **one), turned),
        "profile": save(rgb, "JPEG", icc_profile=PROFILE, comment=b"kept", **one),
        "arithmetic": rare_jpeg("jpeg-arithmetic"),
        "arithmetic-progressive": rare_jpeg("jpeg-arithmetic-progressive"),
    }


def never_baseline() -> dict[str, bytes]:
    """Pictures that cannot become baseline, by name."""
    whole = save(picture(), "JPEG", progressive=True)
    wide = save(picture(), "JPEG", progressive=True, qtables=[[300] * 64, [300] * 64])
    return {
        "cut": whole[: len(whole) // 2],
        "cut-and-closed": whole[: len(whole) // 2] + b"\xff\xd9",
        "lossless": rare_jpeg("jpeg-lossless"),
        "12-bit": rare_jpeg("jpeg-12bit"),
        "wide-tables": wide,
    }


def segments(jpeg: bytes) -> list[tuple[int, bytes]]:
    """Markers and contents, those between scans included, without the pixels."""
    found, at = [], 2
    while at < len(jpeg) and jpeg[at + 1] != 0xD9:
        assert jpeg[at] == 0xFF
        kind, length = struct.unpack_from(">BH", jpeg, at + 1)
        found.append((kind, jpeg[at + 4 : at + 2 + length]))
        at += 2 + length
        if kind == 0xDA:
            while jpeg[at] != 0xFF or jpeg[at + 1] in (0, *range(0xD0, 0xD8)):
                at += 1
    return found


def coefficients(jpeg: bytes, folder: Path) -> list[np.ndarray]:
    """The coefficients of each component and the tables, as jpeglib reads them."""
    path = folder / "picture.jpg"
    path.write_bytes(jpeg)
    read = jpeglib.read_dct(str(path))
    arrays = (read.Y, read.Cb, read.Cr, read.K, read.qt)
    return [np.array(array) for array in arrays if array is not None]


def pixels(jpeg: bytes) -> np.ndarray:
    """As Pillow decodes them."""
    return np.asarray(Image.open(io.BytesIO(jpeg)))
