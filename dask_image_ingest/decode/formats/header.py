"""Read the header of an encoded image of any format, without a decode.

An error found here is final: no bytes, not an image, too large, an invalid header, an unsupported
format. So is ``truncated``: a JPEG with no end marker after its pixels, a PNG whose chunks do not
lead to IEND, a WebP shorter than its RIFF size. DALI refuses all three even if only the last bytes
are missing, and Pillow decodes some of them. One rule, independent of the decoder, gives the same
rows everywhere. Extra bytes after the end are no error.

Damaged compressed data is found only by the decoders. Neither DALI nor Pillow notices a JPEG that
was cut in the middle but has an end marker.

An image ``needs_pillow`` if DALI might return other pixels than Pillow, or crash:

- all formats but JPEG, PNG, WebP: DALI reads few of them, some wrongly, and crashes on JPEG 2000;
- more than one EXIF block: for JPEG and PNG, DALI 2.4 allocates memory by one orientation and
  rotates by another, and crashes;
- ambiguous EXIF, or EXIF that DALI ignores: after a second prefix, or with a wrong checksum;
- JPEG that is lossless or arithmetic, CMYK, has two frame headers, or junk between segments;
- animations: DALI does not always return the first frame.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from dask_image_ingest.decode.formats.jpeg import is_valid_jpeg, read_jpeg_header
from dask_image_ingest.decode.formats.pillow_image import count_frames, read_header_with_pillow
from dask_image_ingest.decode.formats.png_webp import (
    is_valid_png,
    read_png_header,
    read_webp_header,
)
from dask_image_ingest.decode.formats.stored import (
    MAX_PARTS,
    SWAPPED,
    BadImage,
    StoredHeader,
    looks_like,
)
from dask_image_ingest.decode.formats.tiff import as_open_tiff, read_tiff_header
from dask_image_ingest.storage import SIGNATURE_BYTES, LazyBytes, image_format

#: Largest height or width that an int32 column can hold; no decoder goes that far.
LONGEST_EDGE: Final = 2**31 - 1
_READERS: Final = {
    "jpeg": read_jpeg_header,
    "png": read_png_header,
    "webp": read_webp_header,
}


class Header(NamedTuple):
    """Format, shape and error of an encoded image, found without a decode.

    Attributes
    ----------
    format : str or None
        ``jpeg``, ``png``, ``webp``, ...; None if it is not an image.
    height, width : int or None
        Size after EXIF orientation; None if unreadable.
    channels : int or None
        Channels of the stored image, as Pillow counts bands: 1 for a palette.
    error : str or None
        ``"<code>: <detail>"`` if the image certainly can't be decoded. The codes are ``empty``,
        ``not-an-image``, ``unsupported-format``, ``too-large``, ``truncated`` and ``corrupt``.
    needs_pillow : bool
        True if DALI must not decode this image.
    """

    format: str | None
    height: int | None
    width: int | None
    channels: int | None
    error: str | None
    needs_pillow: bool


def read_header(data: LazyBytes, max_pixels: int, page: int = 0) -> Header:
    """Read an image's format, shape and error from as few bytes as possible.

    Parameters
    ----------
    data : bytes-like, or an object with a length and bytes-like slices
        The whole encoded image.
    max_pixels : int
        An image of more pixels is ``too-large``.
    page : int
        Number of the page of a TIFF, or the frame of an animation, as `page_shapes` counts them.

    Returns
    -------
    Header
        For any bytes: errors are in its ``error``, and never raised.
    """
    return header_of(*read_stored_header(data, page), max_pixels)


def header_of(format: str | None, stored: StoredHeader, max_pixels: int) -> Header:
    """Apply the orientation and ``max_pixels`` to the result of `read_stored_header`."""
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


def read_stored_header(data: LazyBytes, page: int = 0) -> tuple[str | None, StoredHeader]:
    """Read an image's format and stored header: before orientation and the check of max_pixels.

    That an animation has a frame is known when it is decoded.
    """
    head = bytes(data[:SIGNATURE_BYTES])
    format = image_format(head)
    try:
        if format is None:
            if not head:
                raise BadImage("empty", "the file has no bytes")
            raise BadImage("not-an-image", looks_like(head))
        if format == "tiff":
            return format, read_tiff_header(data, page)
        reader = _READERS.get(format)
        stored = reader(data) if reader else read_header_with_pillow(data, format)
        if page:
            # Pillow makes colours of a GIF's further frames, some of them with alpha.
            channels = 4 if format == "gif" else stored.channels
            stored = stored._replace(needs_pillow=True, channels=channels)
        return format, stored
    except BadImage as bad:
        return format, StoredHeader(None, None, None, 1, True, str(bad))


def page_shapes(data: LazyBytes) -> list[tuple[int, int]]:
    """Height and width of each page of a TIFF, or frame of an animation, after orientation.

    Nothing is decoded. Levels of a pyramid are pages, too: those in SubIFDs follow their page. All
    frames of a GIF, WebP or PNG are of one size; images of other formats have one page. `BadImage`
    is raised if it is not an image, or its pages can't be counted.
    """
    format, stored = read_stored_header(data)
    if format == "tiff":
        return as_open_tiff(data).shapes()
    header = header_of(format, stored, LONGEST_EDGE**2)
    if format is None or header.height is None or header.width is None:
        raise BadImage.of(header.error or "not-an-image")
    frames = count_frames(data, format)
    if frames > MAX_PARTS:
        raise BadImage("corrupt", f"an animation of {frames:,} frames")
    return [(header.height, header.width)] * frames


def has_several_pages(data: LazyBytes, format: str | None) -> bool:
    """True for a TIFF of several pages; smaller copies of the first one are none."""
    return format == "tiff" and as_open_tiff(data).has_several_pages()


def is_valid(format: str | None, data: bytes | memoryview, thorough: bool = False) -> bool:
    """Check the structure of a JPEG or PNG before a decode, so that DALI does not refuse its batch.

    Takes a hundredth of the decode. An invalid image goes to Pillow, which may still decode it.
    Other formats are not checked: True.

    Parameters
    ----------
    format : str or None
        As in `Header`.
    data : bytes-like, or an object with a length and bytes-like slices
    thorough
        Look for markers among the pixels of a JPEG too: 40 µs instead of 5.
    """
    if format == "jpeg":
        return is_valid_jpeg(data, thorough)
    return format != "png" or is_valid_png(data)


def too_large(height: int, width: int, max_pixels: int) -> str:
    """Error text for an image of more than ``max_pixels`` pixels."""
    pixels = height * width
    return (
        f"too-large: {width} x {height} is {pixels:,} pixels, more than max_pixels={max_pixels:,}"
    )
