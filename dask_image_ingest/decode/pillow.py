"""Decoding with Pillow, one image at a time.

DALI decodes most images and Pillow the rest, with the same pixels. These rules hold for both; where
Pillow by itself does otherwise, this module corrects it.

orientation
    That of EXIF is applied (in TIFF, of tag 274). Orientation in XMP is not.
alpha
    Dropped, not blended: the colours beneath transparent pixels come to light. So for palettes.
    In the mode RGBA as it is stored; 255 where there is none.
CMYK
    JPEG of Adobe stores it inverted, other JPEG does not. Converted by (255 - C) (255 - K) / 255,
    without colour profiles.
16 bits
    Scaled to 8 and rounded, value * 255 / 65535. Pillow reads 16-bit RGB by its upper byte alone,
    which is lower by 1 in every second pixel at most. Pillow's 32-bit integers (PGM and TIFF) are
    16-bit values in a wide container nearly always: they are clipped to 16 bits and scaled alike.
floats
    0 to 1 is scaled to 0 to 255, the convention of images in floats; what lies outside is clipped
    and NaN is 0. Scaling by each image's own extremes would make images incomparable.
1 bit, grey, palette
    Repeated or looked up to RGB.
grey (mode L)
    0.299 R + 0.587 G + 0.114 B; in a JPEG its luma as it is stored.
labels
    The values of a grey image of at most 8 bits, the indices of a palette, 0 and 1 of 1 bit, as
    they are stored; of 16 and 32 bits, if none is above 255. Colours are no labels.
raw
    The values as they are stored, none of them scaled: uint8, uint16 for 9 to 16 bits, float32 for
    floats, in 1 to 4 channels; a palette's indices. Not signed integers, CMYK and Lab. Colours of a
    JPEG are RGB.
grey of which 0 is white (TIFF)
    Inverted, but as labels and raw as it is stored.
animations, pages
    The first one.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from PIL import Image, ImageChops
from PIL.TiffImagePlugin import (
    BITSPERSAMPLE,
    PHOTOMETRIC_INTERPRETATION,
    PLANAR_CONFIGURATION,
    TiffImageFile,
)

from dask_image_ingest.decode.formats import (
    SWAPPED,
    BadImage,
    measure,
    open_image,
    pillow_errors,
    too_large,
)
from dask_image_ingest.decode.formats.tiff import TiffLayout, read_layout
from dask_image_ingest.decode.options import Mode
from dask_image_ingest.storage import LazyBytes


def upright(stored: np.ndarray, orientation: int) -> np.ndarray:
    """Apply an EXIF orientation, 1 to 8, to an array (height, width, channels): a view."""
    if orientation in SWAPPED:
        stored = stored.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        stored = stored[:, ::-1]
    if orientation in (3, 4, 7, 8):
        stored = stored[::-1]
    return stored


def decode_with_pillow(data: LazyBytes, mode: Mode, max_pixels: int) -> np.ndarray:
    """Decode one image.

    Parameters
    ----------
    data : bytes-like, or anything with a length and slices that are bytes-like
        The whole encoded image.
    mode : {"RGB", "RGBA", "L", "labels", "raw"}
        Colour, colour and alpha, grey, the numbers of classes, or the values as they are stored.
    max_pixels : int
        An image of more pixels than this is refused before any memory is reserved for it.

    Returns
    -------
    numpy.ndarray, shape (height, width, channels)
        Of uint8, raw values of uint16 or float32 too. Contiguous and writable.

    Raises
    ------
    BadImage
        Whatever is wrong with it, for Pillow or for `read_header`.
    """
    format, stored = measure(data)
    if stored.error is not None or format is None:
        raise BadImage.of(stored.error or "not-an-image")
    height, width = stored.height or 0, stored.width or 0
    if height * width > max_pixels:
        raise BadImage.of(too_large(height, width, max_pixels))
    encoded = bytes(data[:])
    if mode in ("labels", "raw") and format == "tiff":
        pixels, turn = _tiff_samples(encoded, mode)
    elif mode in ("labels", "raw"):
        pixels, turn = _stored_values(encoded, format, mode), stored.orientation
    else:
        # The luma as it is stored; libjpeg has no such short cut for every rare kind of JPEG.
        luma = mode == "L" and format == "jpeg" and not stored.needs_pillow
        with _loaded(encoded, format, _draft_luma if luma else _refuse_planes) as image:
            pixels, turn = _pixels(image, mode), stored.orientation
    return np.require(upright(pixels, turn), requirements=["C", "W"])


def decode_reduced(encoded: bytes, mode: Mode, factor: int) -> np.ndarray:
    """Decode a JPEG of RGB or grey at a half, a quarter or an eighth, as it is stored.

    Raises
    ------
    BadImage
    """

    def draft(image: Any) -> None:
        image.draft(mode, (image.width // factor, image.height // factor))

    with _loaded(encoded, "jpeg", draft) as image:
        pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels[..., None] if mode == "L" else pixels


@contextmanager
def _loaded(
    encoded: bytes, format: str, prepare: Callable[[Any], None] | None = None
) -> Iterator[Image.Image]:
    """A decoded image; ``prepare`` may change how it is decoded."""
    file = _WholeFile(encoded)
    with open_image(file, format) as image, pillow_errors():
        # In one go, without the lock of Python: not in blocks of 64 kB.
        image.decodermaxblock = len(encoded)
        if prepare is not None:
            prepare(image)
        # The JPEG 2000 decoder looks past the end as a matter of course.
        file.strict = format not in ("jp2", "j2k")
        image.load()
        yield image


def _draft_luma(image: Any) -> None:
    image.draft("L", image.size)


def _refuse_planes(image: Any) -> None:
    # Pillow takes each byte of such planes for a pixel.
    if isinstance(image, TiffImageFile) and image.tile[0].codec_name == "raw":
        bits = image.tag_v2.get(BITSPERSAMPLE, (1,))
        if image.tag_v2.get(PLANAR_CONFIGURATION) == 2 and max(bits) > 8:
            raise BadImage("unsupported-format", f"uncompressed planes of {max(bits)} bits")


class _WholeFile(io.BytesIO):
    """A file that raises where a decoder reads past its end.

    By itself Pillow raises then too, unless somebody in this process has set its
    `LOAD_TRUNCATED_IMAGES`.
    """

    strict = False

    def read(self, size: int | None = -1, /) -> bytes:
        chunk = super().read(size)
        if self.strict and not chunk and size:
            raise BadImage("truncated", "the pixels end before the image does")
        return chunk


def _pixels(image: Image.Image, mode: Mode) -> np.ndarray:
    if mode != "RGBA":
        # Pillow would look for the transparent colour in the result, at a cost and with warnings.
        image.info.pop("transparency", None)
    if image.mode.startswith("I"):
        values = np.clip(np.asarray(image), 0, 65535).astype(np.uint32)
        if image.mode.startswith("I;16") and _is_white_zero(image):
            # Pillow inverts no more than 8 bits.
            values = 65535 - values
        return _grey(((values + 128) // 257).astype(np.uint8), mode)
    if image.mode == "F":
        unit = np.clip(np.nan_to_num(np.asarray(image)), 0, 1)
        return _grey(np.rint(unit * 255).astype(np.uint8), mode)
    if image.mode == "LAB":
        raise BadImage("unsupported-format", "pixels in the Lab colour space")
    if image.mode == "CMYK" and image.format == "JPEG" and "adobe" not in image.info:
        # Pillow takes every CMYK JPEG for an inverted one.
        image = ImageChops.invert(image)
    if image.mode in _STRAIGHT:
        image = image.convert(_STRAIGHT[image.mode])
    pixels = np.array(image.convert(mode))
    return pixels[..., None] if mode == "L" else pixels


def _is_white_zero(image: Image.Image) -> bool:
    return isinstance(image, TiffImageFile) and not image.tag_v2.get(PHOTOMETRIC_INTERPRETATION, 1)


def _grey(values: np.ndarray, mode: Mode) -> np.ndarray:
    if mode == "L":
        return values[..., None]
    opaque = [np.full_like(values, 255)] if mode == "RGBA" else []
    return np.stack([values, values, values, *opaque], axis=2)


def _stored_values(encoded: bytes, format: str, mode: Mode) -> np.ndarray:
    with _loaded(encoded, format) as image:
        if mode == "labels":
            return _labels(image, encoded)
        if format == "png" and encoded[24:26] in _DEEP_COLOURS:
            return _deep_colours(encoded, image.mode)
        return _raw(image, encoded)


def _labels(image: Image.Image, encoded: bytes) -> np.ndarray:
    if image.mode in ("LA", "La", "PA"):
        image = image.getchannel(0)
    if image.mode not in ("1", "L", "P") and not image.mode.startswith("I"):
        raise BadImage("unsupported-format", f"labels in the mode {image.mode}: these are colours")
    return _as_labels(_unscaled(image, _bits(image, encoded)))


def _as_labels(values: np.ndarray) -> np.ndarray:
    if values.size and not 0 <= values.min() <= values.max() <= 255:
        raise BadImage("unsupported-format", f"labels from {values.min()} to {values.max()}")
    return values.astype(np.uint8)[..., None]


def _bits(image: Image.Image, encoded: bytes) -> int:
    """Bits of a value as it is stored; 0 where this is not known."""
    if image.format == "PNG":
        return encoded[24]
    if image.format == "PPM":
        most = _PNM_MAXIMUM.match(encoded[:1024])
        if most is None:  # bitmaps, and floats
            return 32 if image.mode == "F" else 8
        return {255: 8, 65535: 16}.get(int(most[1]), 0)
    return 8 if image.format in ("JPEG", "WEBP", "BMP", "GIF", "TIFF") else 0


def _unscaled(image: Image.Image, bits: int) -> np.ndarray:
    values = np.asarray(image)
    return values // _GREY_SCALES.get(bits, 1) if image.mode == "L" else values


def _raw(image: Image.Image, encoded: bytes) -> np.ndarray:
    bits = _bits(image, encoded)
    grey = _GREY_BITS.get(image.mode, 16 if image.mode.startswith("I") else 0)
    if not bits or bits > (grey or 8) or not (grey or image.mode in _RAW_COLOURS):
        stored = f"of {bits} bits" if bits else "that this format may have scaled"
        raise BadImage(
            "unsupported-format", f"raw values {stored} in the mode {image.mode} can't be read"
        )
    return _as_raw(_unscaled(image, bits))


def _as_raw(values: np.ndarray) -> np.ndarray:
    """Values of one of the types that a column holds; a bit and a wide integer in place of it."""
    if values.dtype == np.int32:  # 16 bits, of which Pillow makes 32
        values = values.astype(np.uint16)
    elif values.dtype == bool:
        values = values.astype(np.uint8)
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    return values if values.ndim == 3 else values[..., None]


def _deep_colours(encoded: bytes, mode: str) -> np.ndarray:
    """16-bit colours of a PNG, of which Pillow's images have room for one byte.

    It gives the upper ones, and by the other order of bytes the lower ones.
    """

    def half(order: str) -> np.ndarray:
        def unpack(image: Any) -> None:
            image.tile = [tile._replace(args=f"{mode};16{order}") for tile in image.tile]

        with _loaded(encoded, "png", unpack) as image:
            return np.asarray(image).astype(np.uint16)

    return half("B") << 8 | half("L")


def _tiff_samples(encoded: bytes, mode: Mode) -> tuple[np.ndarray, int]:
    """Labels or raw values of a TIFF as they are stored, and their orientation."""
    layout = read_layout(encoded)
    if layout.is_jpeg:
        # Its colours; Pillow applies the orientation.
        return _stored_values(encoded, "tiff", mode), 1
    if reason := layout.unreadable() or _unwanted(layout, mode):
        wanted = "labels" if mode == "labels" else "raw values"
        raise BadImage("unsupported-format", f"{wanted} can't be read from {reason}")
    parts = []
    for part in layout.grey_parts(encoded):
        with _loaded(part, "tiff") as image:
            parts.append(_unscaled(image, layout.bits))
    values = layout.joined(parts)
    if layout.is_signed and layout.bits == 8:
        values = values.view(np.int8)  # of which Pillow has no images
    return _as_labels(values[..., 0]) if mode == "labels" else _as_raw(values), layout.orientation


def _unwanted(layout: TiffLayout, mode: Mode) -> str | None:
    """Reason why samples that can be read are no labels, or no raw values."""
    if mode == "raw":
        if layout.is_signed:
            return "signed integers, which no column holds"
        if layout.bits == 32 and not layout.is_float:
            return "integers of 32 bits, which no column holds"
    elif layout.is_float:
        return "floats"
    elif layout.samples > 1 + layout.has_alpha:
        return f"{layout.samples} samples of a pixel: these are colours"
    return None


# The most bits of a value in grey images and palettes; those of integers have 16.
_GREY_BITS: Final = {"1": 8, "L": 8, "P": 8, "F": 32}

_RAW_COLOURS: Final = ("RGB", "RGBA", "LA", "PA")

# The bits of a PNG and what it holds: RGB, RGBA.
_DEEP_COLOURS: Final = (b"\x10\x02", b"\x10\x06")

# The largest value of a PGM or PPM, which Pillow scales to 255 or 65,535.
_PNM_MAXIMUM: Final = re.compile(rb"P[2356](?:(?:\s|#[^\n]*\n)+(\d+)){3}\s")

# By how much Pillow multiplies grey values of 2 and 4 bits.
_GREY_SCALES: Final = {2: 85, 4: 17}

# Colours that were multiplied by alpha; Pillow drops alpha only after undoing that.
_STRAIGHT: Final = {"RGBa": "RGBA", "La": "LA"}
