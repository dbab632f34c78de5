"""File types by magic bytes."""

from __future__ import annotations

import re
from typing import Final

#: Most bytes that `image_format` and `describe_bytes` need.
SIGNATURE_BYTES: Final = 64

_IMAGE_SIGNATURES: Final = (
    (b"\xff\xd8\xff", "jpeg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF87a", "gif"),
    (b"GIF89a", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tiff"),
    (b"MM\0*", "tiff"),
    (b"II+\0", "tiff"),
    (b"MM\0+", "tiff"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "jp2"),
    (b"\xff\x4f\xff\x51", "j2k"),
    (b"\0\0\x01\0", "ico"),
    (b"8BPS", "psd"),
    (b"qoif", "qoi"),
    (b"P7\n", "pam"),
    (b"icns", "icns"),
    (b"DDS ", "dds"),
    (b"\xff\x0a", "jxl"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "jxl"),
)
_BRANDS: Final = {b"avif": "avif", b"avis": "avif"} | dict.fromkeys(
    (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"), "heif"
)
_PNM: Final = re.compile(rb"P[1-6Ff]\s")
_SVG: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?<svg\b", re.IGNORECASE)

_NON_IMAGE_SIGNATURES: Final = (
    (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x28\xb5\x2f\xfd", "zstandard"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ", "xz"),
    (b"%PDF", "PDF"),
    (b"%!PS", "PostScript"),
    (b"RIFF", "a RIFF file that is not WebP"),
    (b"\x1aE\xdf\xa3", "Matroska or WebM"),
    (b"ID3", "MP3"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"PAR1", "a parquet file"),
    (b"\x80\x04\x95", "a Python pickle"),
    (b"version https://git-lfs", "a Git LFS pointer"),
)
_TEXT: Final = bytes(range(32, 127)) + b"\t\n\r\f"
_HTML: Final = re.compile(rb"<(?:!doctype html|html|head|body|script|!--)", re.IGNORECASE)


def image_format(head: bytes) -> str | None:
    """Format of an image that begins with ``head``; None if it is no image."""
    for magic, name in _IMAGE_SIGNATURES:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    if head[4:8] == b"ftyp":
        return _brand(head)
    if _PNM.match(head):
        return "pnm"
    return "svg" if _SVG.match(head) else None


def _brand(head: bytes) -> str | None:
    # The major brand of an AVIF may be mif1, with avif only among the compatible brands.
    size = int.from_bytes(head[:4], "big")
    brands = [head[8:12], *(head[at : at + 4] for at in range(16, min(size, len(head)), 4))]
    names = [_BRANDS[brand] for brand in brands if brand in _BRANDS]
    return "avif" if "avif" in names else next(iter(names), None)


def describe_bytes(head: bytes) -> str:
    """File type by its first bytes, for errors; ``unknown data`` if none matches."""
    if (image := image_format(head)) is not None:
        return f"a {image.upper()} image"
    for magic, name in _NON_IMAGE_SIGNATURES:
        if head.startswith(magic):
            return name
    if not head.strip(b"\0"):
        return "zeros"
    if head[4:8] == b"ftyp":
        return "a video"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if _HTML.match(text):
        return "HTML"
    if text.startswith(b"<"):
        return "XML"
    if text[:1] in (b"{", b"["):
        return "JSON"
    # A multi-byte character may be cut at the end of the head, hence not a strict decode.
    return "text" if not head.translate(None, _TEXT + bytes(range(128, 256))) else "unknown data"
