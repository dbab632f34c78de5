"""Format of an image by its first bytes, and what is said of bytes that are none."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

#: Most segments or chunks of a file that are looked at: a made one must not keep us busy.
MAX_PARTS: Final = 1 << 16

MAX_DETAIL = 200


class Stored(NamedTuple):
    """An image's shape before orientation, its orientation, and what is wrong with it."""

    height: int | None
    width: int | None
    channels: int | None
    orientation: int
    needs_pillow: bool
    error: str | None


class BadImage(Exception):
    """An image that cannot be decoded, and why.

    Parameters
    ----------
    code : str
        The stable part, to group and filter by: ``empty``, ``not-an-image``,
        ``unsupported-format``, ``too-large``, ``truncated`` or ``corrupt``.
    detail : object
        The part for a human reader. It may quote the image, and is escaped and shortened here.
    """

    def __init__(self, code: str, detail: object) -> None:
        self.code = code
        self.detail = printable(str(detail))
        super().__init__(f"{code}: {self.detail}")

    @classmethod
    def of(cls, error: str) -> BadImage:
        """The exception of which ``error`` is the text."""
        code, _, detail = error.partition(": ")
        return cls(code, detail)

    def __reduce__(self) -> tuple[type[BadImage], tuple[str, str]]:
        # Exceptions travel between workers by pickle, which would pass on the joined message alone.
        return BadImage, (self.code, self.detail)


def printable(text: str, limit: int = MAX_DETAIL) -> str:
    """``text`` on one line of ASCII, at most ``limit`` characters.

    What an image says about itself ends up in logs and on screens: control characters and endless
    lines must not.
    """
    escaped = "".join(
        sign if " " <= sign <= "~" else sign.encode("unicode_escape").decode()
        for sign in text[:limit]
    )
    return escaped if len(text) <= limit >= len(escaped) else escaped[: limit - 3] + "..."


HEAD: Final = 64
"""How many bytes `format_of` needs at most."""

_MAGIC: Final = (
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
    (b"icns", "icns"),
    (b"DDS ", "dds"),
    (b"\xff\x0a", "jxl"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "jxl"),
)
_BRANDS: Final = {b"avif": "avif", b"avis": "avif"} | dict.fromkeys(
    (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"), "heif"
)
_PNM: Final = re.compile(rb"P[1-7Ff]\s")
_SVG: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?<svg\b", re.IGNORECASE)

_STRANGERS: Final = (
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
    (b"\x80\x04\x95", "a Python pickle"),
    (b"version https://git-lfs", "a Git LFS pointer"),
)
_TEXT: Final = bytes(range(32, 127)) + b"\t\n\r\f"
_HTML: Final = re.compile(rb"<(?:!doctype html|html|head|body|script|!--)", re.IGNORECASE)


def format_of(head: bytes) -> str | None:
    """Name the image format of a file that begins with ``head``; None when it is not an image."""
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    if head[4:8] == b"ftyp":
        return _brand(head)
    if _PNM.match(head):
        return "pnm"
    return "svg" if _SVG.match(head) else None


def looks_like(head: bytes) -> str:
    """Say what a file that is not an image seems to be, quoting its beginning."""
    kind = _kind(head)
    return f"looks like {kind}: {printable(repr(head[:24]))[1:]}"


def _brand(head: bytes) -> str | None:
    # An AVIF may call itself mif1 first and avif only among the compatible brands.
    size = int.from_bytes(head[:4], "big")
    brands = [head[8:12], *(head[at : at + 4] for at in range(16, min(size, len(head)), 4))]
    names = [_BRANDS[brand] for brand in brands if brand in _BRANDS]
    return "avif" if "avif" in names else next(iter(names), None)


def _kind(head: bytes) -> str:
    for magic, name in _STRANGERS:
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
