"""Header of an encoded image of any format, without a decode.

An error of a header is certain, and final: no bytes, not an image, too large, a header that makes
no sense, a format that nothing here reads. So is ``truncated``: a JPEG with no end marker after its
pixels, a PNG whose chunks do not lead to IEND, a WebP shorter than its RIFF size. DALI refuses all
three even where only the last bytes are gone, and Pillow gives the pixels of some: one rule, which
needs no decode, gives the same rows whoever decodes. Bytes after the end are no error.

What cannot be seen here, the decoders say: damaged compressed data. A JPEG cut in the middle that
still has an end marker is not told from a good one by DALI or Pillow either.

Where DALI could give other pixels than Pillow, or crash, an image ``needs_pillow``:

- all but JPEG, PNG and WebP: DALI reads few of them, some wrongly, and JPEG 2000 kills the process;
- more than one EXIF block: in a JPEG or PNG, DALI reserves memory by one orientation and turns the
  image by another, which kills the process (DALI 2.4);
- EXIF that readers may take in two ways, or that DALI takes for none: a PNG or WebP whose EXIF has
  the prefix that belongs in a JPEG;
- JPEG that is lossless or arithmetic, has two frame headers, or junk between its segments;
- animations, whose first frame is not always what DALI gives.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from dask_image_ingest.decode.formats.exif import SWAPPED
from dask_image_ingest.decode.formats.jpeg import is_valid_jpeg, jpeg_stored
from dask_image_ingest.decode.formats.pillow_image import pillow_stored
from dask_image_ingest.decode.formats.png_webp import is_valid_png, png_stored, webp_stored
from dask_image_ingest.decode.formats.stored import BadImage, Stored, looks_like
from dask_image_ingest.storage import SIGNATURE_BYTES, LazyBytes, image_format

#: What the columns can hold, and no decoder can.
LONGEST_EDGE: Final = 2**31 - 1
_READERS: Final = {"jpeg": jpeg_stored, "png": png_stored, "webp": webp_stored}


class Header(NamedTuple):
    """Format, shape and error of an encoded image, from its first bytes.

    Attributes
    ----------
    format : str or None
        ``jpeg``, ``png``, ``webp``, ...; None if it is not an image.
    height, width : int or None
        Of the image as it is delivered, after EXIF orientation; None when unreadable.
    channels : int or None
        Of the stored image, as Pillow counts its bands: 1 for a palette.
    error : str or None
        ``"<code>: <detail>"`` if the image can't be decoded for certain. The codes are ``empty``,
        ``not-an-image``, ``unsupported-format``, ``too-large``, ``truncated`` and ``corrupt``.
    needs_pillow : bool
        DALI must not get this image: Pillow decodes it, one at a time.
    """

    format: str | None
    height: int | None
    width: int | None
    channels: int | None
    error: str | None
    needs_pillow: bool


def read_header(data: LazyBytes, max_pixels: int) -> Header:
    """Read an image's format and shape, and whether it can be decoded, from as few bytes as needed.

    Parameters
    ----------
    data : bytes-like, or anything with a length and slices that are bytes-like
        The whole encoded image.
    max_pixels : int
        An image of more pixels than this is ``too-large``.

    Returns
    -------
    Header
        Whatever the bytes are: this never raises for what they hold.
    """
    return header_of(*measure(data), max_pixels)


def header_of(format: str | None, stored: Stored, max_pixels: int) -> Header:
    """:func:`read_header` of an image that was measured before."""
    height, width, channels, orientation, needs_pillow, error = stored
    if height is None or width is None:
        return Header(format, None, None, None, error, True)
    if max(height, width) > LONGEST_EDGE:
        error = error or f"too-large: {width} x {height}, and no edge may exceed {LONGEST_EDGE:,}"
        return Header(format, None, None, None, error, True)
    if height * width > max_pixels:
        error = too_large(height, width, max_pixels)
    if orientation in SWAPPED:
        height, width = width, height
    return Header(format, height, width, channels, error, needs_pillow or error is not None)


def measure(data: LazyBytes) -> tuple[str | None, Stored]:
    """The format of an image, and its shape as stored: before orientation, of any size."""
    head = bytes(data[:SIGNATURE_BYTES])
    format = image_format(head)
    try:
        if format is None:
            if not head:
                raise BadImage("empty", "the file has no bytes")
            raise BadImage("not-an-image", looks_like(head))
        reader = _READERS.get(format)
        return format, reader(data) if reader else pillow_stored(data, format)
    except BadImage as bad:
        return format, Stored(None, None, None, 1, True, str(bad))


def is_valid(format: str | None, data: Any, thorough: bool = False) -> bool:
    """Check the structure of a JPEG or PNG, so that DALI will not refuse its batch.

    Checked just before decoding, in a hundredth of its time. An invalid image is not bad yet:
    Pillow has the last word. Nothing is known of other formats.

    Parameters
    ----------
    format : str or None
        As `Header` has it.
    data : bytes-like, or anything with a length and slices that are bytes-like
    thorough
        Whether to look for markers among the pixels of a JPEG too, which takes 40 µs instead of 5.
    """
    if format == "jpeg":
        return is_valid_jpeg(data, thorough)
    return format != "png" or is_valid_png(data)


def too_large(height: int, width: int, max_pixels: int) -> str:
    """The error of an image of more than ``max_pixels`` pixels."""
    pixels = height * width
    return (
        f"too-large: {width} x {height} is {pixels:,} pixels, more than max_pixels={max_pixels:,}"
    )
