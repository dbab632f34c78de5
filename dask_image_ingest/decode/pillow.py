"""Decode one image with Pillow.

DALI decodes most images and Pillow the rest, with the same pixels. These rules hold for both; this
module corrects Pillow where it differs.

orientation
    The EXIF orientation is applied (in TIFF, tag 274). Orientation in XMP is ignored.
metadata
    Neither decoder sees what pixels don't depend on: text, profiles, gamma, damaged or not.
alpha
    Dropped, not blended: transparent pixels show their stored colour. The same for palettes. In
    mode RGBA, the stored alpha, or 0 for the one transparent colour of a PNG; 255 if there is none.
CMYK
    In a JPEG always taken to be inverted, with Adobe's marker or without, as Pillow, OpenCV and
    browsers do. Converted by (255 - C) (255 - K) / 255, without colour profiles.
16 bits
    Scaled to 8 bits and rounded: value * 255 / 65535. Pillow reads only the upper byte of 16-bit
    RGB, which is lower by 1 in at most half of the pixels. Integers of 32 bits (PGM and TIFF)
    nearly always hold 16-bit values: they are clipped to 16 bits and scaled in the same way. TIFFs
    of 9 to 15 bits are scaled by their own maximum.
floats
    0 to 1 is scaled to 0 to 255, as is usual for float images; values outside are clipped, and NaN
    becomes 0. Scaling by each image's own range would make images incomparable.
1 bit, grey, palette
    Repeated or looked up to RGB.
grey (mode L)
    0.299 R + 0.587 G + 0.114 B; for a JPEG its stored luma.
labels
    Stored values of a grey image of at most 8 bits, palette indices, 0 and 1 of 1 bit; 16 and 32
    bits only if no value exceeds 255. Colour images are refused.
raw
    Stored values, unscaled: uint8, uint16 for 9 to 16 bits, float32 for floats, in 1 to 4 channels;
    palette indices. Signed integers, CMYK and Lab are refused. A JPEG's colours become RGB.
grey in which 0 is white (TIFF)
    Inverted, except in the modes labels and raw.
TIFF
    tifffile reads stored samples, and colours of which Pillow gets some wrong: floats, signed and
    wide integers, planes.
animations, pages
    The first one, unless another is asked for.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np
from PIL import Image, ImageFile
from PIL.TiffImagePlugin import COMPRESSION_INFO, PHOTOMETRIC_INTERPRETATION, TiffImageFile

from dask_image_ingest.decode.decode_spec import Mode
from dask_image_ingest.decode.formats import (
    SWAPPED,
    BadImage,
    open_image,
    pillow_errors,
    read_stored_header,
    too_large,
)
from dask_image_ingest.decode.formats.jpeg import without_jpeg_metadata
from dask_image_ingest.decode.formats.pillow_image import NoColours, count_frames, seek_frame
from dask_image_ingest.decode.formats.png_webp import png_transparency, without_png_metadata
from dask_image_ingest.decode.formats.stored import no_page
from dask_image_ingest.decode.formats.tiff import (
    TiffCut,
    TiffLayout,
    is_tiff,
    read_layout,
    read_samples,
)
from dask_image_ingest.decode.region import Region
from dask_image_ingest.storage import LazyBytes


def upright(stored: np.ndarray, orientation: int) -> np.ndarray:
    """Apply an EXIF orientation (1 to 8) to an array (height, width, channels). Returns a view."""
    if orientation in SWAPPED:
        stored = stored.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        stored = stored[:, ::-1]
    if orientation in (3, 4, 7, 8):
        stored = stored[::-1]
    return stored


def decode_with_pillow(data: LazyBytes, mode: Mode, max_pixels: int, page: int = 0) -> np.ndarray:
    """Decode one image.

    Parameters
    ----------
    data : bytes-like, or an object with a length and bytes-like slices
        The whole encoded image.
    mode : {"RGB", "RGBA", "L", "labels", "raw"}
        Colour, colour and alpha, grey, class numbers, or stored values.
    max_pixels : int
        An image with more pixels is refused before memory is allocated for it.
    page : int
        Number of the page of a TIFF, or the frame of an animation, as `page_shapes` counts them.

    Returns
    -------
    numpy.ndarray, shape (height, width, channels)
        uint8; in mode raw also uint16 or float32. Contiguous and writable.

    Raises
    ------
    BadImage
        For every error, of `read_header` or of Pillow.
    """
    format, stored = read_stored_header(data, page)
    if stored.error is not None or format is None:
        raise BadImage.of(stored.error or "not-an-image")
    height, width = stored.height or 0, stored.width or 0
    if height * width > max_pixels:
        raise BadImage.of(too_large(height, width, max_pixels))
    if format == "tiff":
        return _decode_tiff(data, mode, max_pixels, None, page)
    if page:
        return Animation(data, mode).frame(page)
    encoded = bytes(data[:])
    if mode in ("labels", "raw"):
        pixels = _stored_values(encoded, format, mode)
    else:
        # The stored luma; for rare kinds of JPEG libjpeg can't skip the colours.
        luma = mode == "L" and format == "jpeg" and not stored.needs_pillow
        with _loaded(encoded, format, _draft_luma if luma else None) as image:
            pixels = _converted(image, mode)
            is_png = mode == "RGBA" and format == "png"
            if is_png and (stored_alpha := png_transparency(encoded)):
                pixels[..., 3] = _png_alpha(image, encoded, stored_alpha)
    return np.require(upright(pixels, stored.orientation), requirements=["C", "W"])


def decode_region(
    data: LazyBytes, mode: Mode, max_pixels: int, region: Region | None, page: int = 0
) -> np.ndarray:
    """Decode one image, and return a view of its region, not mirrored; None for all of it.

    Of a TIFF, only the strips or tiles that the region meets are decoded, and ``max_pixels`` is
    their limit. Other parameters, and errors, are those of `decode_with_pillow`.
    """
    if region is not None and is_tiff(data):
        return _decode_tiff(data, mode, max_pixels, region, page)
    image = decode_with_pillow(data, mode, max_pixels, page)
    if region is None:
        return image
    if region.inside((image.shape[0], image.shape[1])) != region:
        raise BadImage("corrupt", "its pixels are not of the size in its header")
    return region.of(image)


def decode_parts(
    data: LazyBytes,
    mode: Mode,
    max_pixels: int,
    page: int,
    shape: tuple[int, int],
    regions: Sequence[Region],
) -> list[np.ndarray]:
    """Decode regions of a page of this upright shape, black where they reach beyond it.

    Other parameters, and errors, are those of `decode_with_pillow`. The picture is decoded once,
    and is not kept: results are copies. Of a TIFF, what is around the regions is decoded.
    """
    around = Region.around([region.inside(shape) for region in regions])
    image = decode_region(data, mode, max_pixels, around, page)
    return [region.shifted(-around.top, -around.left).of(image).copy() for region in regions]


class Animation:
    """Decoder of the frames of an animation after the first.

    In ascending order they take one walk: each is drawn over the one before.
    """

    def __init__(self, data: LazyBytes, mode: Mode) -> None:
        format, stored = read_stored_header(data)
        self._format, self._orientation = format or "", stored.orientation
        self._encoded, self._mode = bytes(data[:]), mode
        self._file: _StrictFile
        self._image: ImageFile.ImageFile | None = None

    def frame(self, number: int) -> np.ndarray:
        """Decode a frame, counted from 0; result and errors as of `decode_with_pillow`."""
        if self._image is None or number <= self._image.tell():
            if number >= (count := count_frames(self._encoded, self._format)):
                raise no_page(number, count)
            self._file = _StrictFile(self._encoded)
            self._image = open_image(self._file, self._format)
        image = self._image
        try:
            with pillow_errors():
                self._file.strict = False
                seek_frame(image, number)
                self._file.strict = True
                image.load()
        except BadImage:
            self._image = None
            raise
        with pillow_errors():
            transparency = image.info.get("transparency")
            if self._mode in ("labels", "raw"):
                pixels = _stored_mode(image, self._encoded, self._mode)
            else:
                pixels = _converted(image, self._mode)
            if transparency is not None:  # the next frame needs it
                image.info["transparency"] = transparency
        return np.require(upright(pixels, self._orientation), requirements=["C", "W"])


def decode_reduced(encoded: bytes, mode: Mode, factor: int) -> np.ndarray:
    """Decode a JPEG to RGB or grey at 1/``factor`` of its size (2, 4, 8), without its orientation.

    Raises
    ------
    BadImage
    """

    def draft(image: Image.Image) -> None:
        image.draft(mode, (image.width // factor, image.height // factor))

    with _loaded(encoded, "jpeg", draft) as image:
        pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels[..., None] if mode == "L" else pixels


@contextmanager
def _loaded(
    encoded: bytes,
    format: str,
    prepare: Callable[[ImageFile.ImageFile], None] | None = None,
) -> Iterator[Image.Image]:
    """Decode an image; ``prepare`` is called before and may change how it is decoded."""
    file = _StrictFile(_WITHOUT_METADATA.get(format, bytes)(encoded))
    with open_image(file, format) as image, pillow_errors():
        # Decode in one call, which releases the GIL, rather than in blocks of 64 kB.
        image.decodermaxblock = len(encoded)
        if prepare is not None:
            prepare(image)
        # The JPEG 2000 decoder reads past the end of intact files, too.
        file.strict = format not in ("jp2", "j2k")
        image.load()
        yield image


def _draft_luma(image: Image.Image) -> None:
    image.draft("L", image.size)


class _StrictFile(io.BytesIO):
    """File that raises if a decoder reads past its end.

    Pillow raises too, unless other code in this process has set its `LOAD_TRUNCATED_IMAGES`.
    """

    strict = False

    def read(self, size: int | None = -1, /) -> bytes:
        chunk = super().read(size)
        if self.strict and not chunk and size:
            raise BadImage("truncated", "the pixels end before the image does")
        return chunk


def _converted(image: Image.Image, mode: Mode) -> np.ndarray:
    """Pixels in mode RGB, RGBA or L."""
    if mode != "RGBA":
        # Otherwise Pillow looks for the transparent colour in the result: slow, and with warnings.
        image.info.pop("transparency", None)
    if image.mode.startswith("I"):
        values = np.clip(np.asarray(image), 0, 65535).astype(np.uint32)
        if image.mode.startswith("I;16") and _is_white_zero(image):
            # Pillow inverts only up to 8 bits.
            values = 65535 - values
        return _grey(_scaled(values), mode)
    if image.mode == "F":
        return _grey(_scaled(np.asarray(image)), mode)
    if image.mode == "LAB":
        raise BadImage("unsupported-format", "pixels in the Lab colour space")
    if image.mode in _UNPREMULTIPLIED:
        image = image.convert(_UNPREMULTIPLIED[image.mode])
    pixels = np.array(image if image.mode == mode else image.convert(mode))
    return pixels[..., None] if mode == "L" else pixels


def _scaled(values: np.ndarray, maximum: int = 65535) -> np.ndarray:
    """Values of 0 to ``maximum``, or floats of 0 to 1, as bytes; others are clipped."""
    scaled = np.empty(values.shape, np.uint8)
    for row, out in zip(values, scaled, strict=True):  # without copies of the whole image
        if row.dtype.kind == "f":
            out[...] = np.rint(np.nan_to_num(np.clip(row, 0, 1)).astype(np.float32) * 255)
        else:
            highest = min(maximum, np.iinfo(row.dtype).max)  # NumPy 2.0 takes no other
            clipped = np.clip(row, 0, highest).astype(np.uint32)
            out[...] = (clipped * 255 + maximum // 2) // maximum
    return scaled


def _is_white_zero(image: Image.Image) -> bool:
    return isinstance(image, TiffImageFile) and not image.tag_v2.get(PHOTOMETRIC_INTERPRETATION, 1)


def _grey(values: np.ndarray, mode: Mode) -> np.ndarray:
    if mode == "L":
        return values[..., None]
    opaque = [np.full_like(values, 255)] if mode == "RGBA" else []
    return np.stack([values, values, values, *opaque], axis=2)


def _stored_values(encoded: bytes, format: str, mode: Mode) -> np.ndarray:
    with _loaded(encoded, format) as image:
        return _stored_mode(image, encoded, mode)


def _stored_mode(image: Image.Image, encoded: bytes, mode: Mode) -> np.ndarray:
    return _labels(image, encoded) if mode == "labels" else _raw(image, encoded)


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
    """Bits of a stored value; 0 if Pillow may have scaled it."""
    if image.format == "PNG":
        return encoded[24]
    if image.format == "PPM":
        maximum = _PNM_MAXIMUM.match(encoded[:1024])
        if maximum is None:  # bitmaps and floats have none
            return 32 if image.mode == "F" else 8
        return {255: 8, 65535: 16}.get(int(maximum[1]), 0)
    return 8 if image.format in ("JPEG", "WEBP", "BMP", "GIF", "TIFF") else 0


def _unscaled(image: Image.Image, bits: int) -> np.ndarray:
    """Pixels with Pillow's scaling of 2-bit and 4-bit grey undone."""
    values = np.asarray(image)
    return values // _GREY_SCALES.get(bits, 1) if image.mode == "L" else values


def _raw(image: Image.Image, encoded: bytes) -> np.ndarray:
    if image.format == "PNG" and encoded[24:26] in _PNG_16_BIT_COLOURS:
        if image.tell():
            raise BadImage("unsupported-format", "raw values of 16 bits in a further frame")
        return _png_16_bit_colours(encoded, image.mode)
    bits = _bits(image, encoded)
    grey = _GREY_BITS.get(image.mode, 16 if image.mode.startswith("I") else 0)
    if not bits or bits > (grey or 8) or not (grey or image.mode in _RAW_COLOURS):
        stored = f"of {bits} bits" if bits else "that this format may have scaled"
        raise BadImage(
            "unsupported-format", f"raw values {stored} in the mode {image.mode} can't be read"
        )
    return _as_raw(_unscaled(image, bits))


def _as_raw(values: np.ndarray) -> np.ndarray:
    """Values as (height, width, channels) of a type that a column can hold."""
    if values.dtype == np.int32:  # 16-bit values, which Pillow widens
        values = values.astype(np.uint16)
    elif values.dtype == bool:
        values = values.astype(np.uint8)
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    return values if values.ndim == 3 else values[..., None]


def _png_16_bit_colours(encoded: bytes, mode: str) -> np.ndarray:
    """16-bit colours of a PNG.

    Pillow keeps only the first byte of each value. Decode twice: read as little-endian, the first
    byte is the lower one.
    """

    def one_byte(order: str) -> np.ndarray:
        def unpack(image: ImageFile.ImageFile) -> None:
            image.tile = [tile._replace(args=f"{mode};16{order}") for tile in image.tile]

        with _loaded(encoded, "png", unpack) as image:
            return np.asarray(image).astype(np.uint16)

    return one_byte("B") << 8 | one_byte("L")


def _png_alpha(image: Image.Image, encoded: bytes, transparency: bytes) -> np.ndarray:
    """Alpha of a PNG with a tRNS chunk: looked up by palette index, or 0 for one colour."""
    stored = _raw(image, encoded)
    if image.mode == "P":
        table = np.frombuffer(transparency.ljust(256, b"\xff"), np.uint8)
        return table[stored[..., 0]]
    colour = np.frombuffer(transparency, ">u2") & ((1 << encoded[24]) - 1)
    return np.where((stored == colour).all(axis=2), 0, 255)


def _decode_tiff(
    data: LazyBytes, mode: Mode, max_pixels: int, region: Region | None, page: int
) -> np.ndarray:
    """Upright pixels of a page of a TIFF, or of a region of it."""
    layout = read_layout(data, page=page)
    header = layout.header()
    if header.error is not None:
        raise BadImage.of(header.error)
    part = layout.cut(data, region)
    height, width = part.held[2:4]
    if height * width > max_pixels:
        held = f"its strips or tiles there hold {width} x {height} pixels"
        raise BadImage("too-large", f"{held}, more than max_pixels={max_pixels:,}")
    with pillow_errors():
        pixels = _tiff(data, mode, layout, part)
    if pixels.shape[:2] != (height, width):
        raise BadImage("corrupt", "its pixels are not of the size in its header")
    pixels = part.part.shifted(-part.held.top, -part.held.left).of(pixels)
    return np.require(upright(pixels, header.orientation), requirements=["C", "W"])


def _tiff(data: LazyBytes, mode: Mode, layout: TiffLayout, part: TiffCut) -> np.ndarray:
    """Stored pixels of some strips or tiles of a TIFF."""
    if mode in ("labels", "raw"):
        if layout.is_picture or layout.is_fax:
            _refuse_compression(layout)
            return _stored_values(layout.written(data, part, inverted=False), "tiff", mode)
        if reason := layout.unreadable() or _unsuitable(layout, mode):
            kind = "labels" if mode == "labels" else "raw values"
            raise BadImage("unsupported-format", f"{kind} can't be read from {reason}")
        values = read_samples(layout.written(data, part))
        return _as_labels(values[..., 0]) if mode == "labels" else _as_raw(values)
    tiff = layout.written(data, part)
    if layout.suits_pillow:
        _refuse_compression(layout)
        with suppress(NoColours), _loaded(tiff, "tiff") as image:
            return _converted(image, mode)
    if reason := layout.unreadable():
        raise BadImage("unsupported-format", f"colours can't be read from {reason}")
    return _converted(_tiff_picture(read_samples(tiff), layout), mode)


def _refuse_compression(layout: TiffLayout) -> None:
    """Raise `BadImage` for a compression that Pillow's libtiff was built without."""
    name = COMPRESSION_INFO.get(layout.compression)
    if name is None or (name in _OPTIONAL and not _has_codec(name)):
        raise BadImage("unsupported-format", layout.unsupported)


@functools.cache
def _has_codec(name: str) -> bool:
    """True if libtiff has a codec: it can then write with it, which its reader does not tell."""
    try:
        Image.new("RGB", (8, 8)).save(io.BytesIO(), "TIFF", compression=name)
    except OSError:
        return False
    return True


def _tiff_picture(values: np.ndarray, layout: TiffLayout) -> Image.Image:
    """Picture of 8 bits of samples of any type."""
    grey, alpha = layout.photometric < 2, layout.alpha
    colours = 1 if grey else 3
    extra = values.shape[2] - colours
    if layout.photometric > 2 or extra < 0 or (grey and extra != bool(alpha)):
        raise NoColours
    pixels = values[..., : colours + bool(alpha)]
    pixels = _scaled(pixels, (1 << min(layout.bits[0], 16)) - 1)
    if not layout.photometric:
        pixels[..., 0] = 255 - pixels[..., 0]
    if not extra or not alpha:
        return Image.fromarray(pixels[..., 0] if grey else pixels)
    pixels = np.concatenate([pixels[..., :-1]] * (3 // colours) + [pixels[..., -1:]], axis=2)
    size = pixels.shape[1::-1]
    return Image.frombytes("RGBA" if alpha == 2 else "RGBa", size, pixels.tobytes())


def _unsuitable(layout: TiffLayout, mode: Mode) -> str | None:
    """Reason why readable samples can't be labels, or raw values; None if they can."""
    bits = layout.bits[0]
    if mode == "raw":
        if layout.is_signed:
            return "signed integers, which no column holds"
        if layout.is_float and bits != 32:
            return f"floating-point samples of {bits} bits, which no column holds"
        if bits > 16 and not layout.is_float:
            return f"integers of {bits} bits, which no column holds"
    elif layout.is_float:
        return "floats"
    elif layout.samples > 1 + bool(layout.alpha):
        return f"{layout.samples} samples of a pixel: these are colours"
    return None


# Compressions, by Pillow's names, that libtiff may be built without.
_OPTIONAL: Final = ("lzma", "webp", "zstd")

# What pixels don't depend on is kept from Pillow.
_WITHOUT_METADATA: Final[dict[str, Callable[[bytes], bytes | memoryview]]] = {
    "jpeg": without_jpeg_metadata,
    "png": without_png_metadata,
}

# Most bits of a value by Pillow mode, for one channel; modes I and I;16 have 16.
_GREY_BITS: Final = {"1": 8, "L": 8, "P": 8, "F": 32}

_RAW_COLOURS: Final = ("RGB", "RGBA", "LA", "PA")

# Bit depth and colour type of a PNG: 16-bit RGB, 16-bit RGBA.
_PNG_16_BIT_COLOURS: Final = (b"\x10\x02", b"\x10\x06")

# The maximum value in a PGM or PPM header, which Pillow scales to 255 or 65,535.
_PNM_MAXIMUM: Final = re.compile(rb"P[2356](?:(?:\s|#[^\n]*\n)+(\d+)){3}\s")

# Factors by which Pillow scales grey values of 2 and 4 bits.
_GREY_SCALES: Final = {2: 85, 4: 17}

# Modes of premultiplied alpha, which Pillow can drop only after a conversion.
_UNPREMULTIPLIED: Final = {"RGBa": "RGBA", "La": "LA"}
