"""The shape of an image as its file stores it, read from the headers of JPEG, PNG and WebP.

By hand, in a few microseconds, since this happens for every image of a dataset even when none is
decoded; Pillow's lazy `open` answers for the other formats.
"""

from __future__ import annotations

import io
from struct import Struct
from typing import Final, NamedTuple

from PIL import Image

from dask_image_ingest.decode.formats.exif import read_orientation
from dask_image_ingest.decode.formats.pillow_image import open_image, pillow_errors
from dask_image_ingest.decode.formats.sniff import BadImage
from dask_image_ingest.storage import LazyBytes, ReaderFile

# Up to the pixels in most photos. Segments that are passed over are not read.
_WINDOW: Final = 2048
# No real file has more parts; a made one must not keep us busy.
MAX_PARTS: Final = 1 << 16
_EXIF_PREFIX: Final = b"Exif\0\0"


class Stored(NamedTuple):
    """An image's shape before orientation, its orientation, and what is wrong with it."""

    height: int | None
    width: int | None
    channels: int | None
    orientation: int
    needs_pillow: bool
    error: str | None


SEGMENT: Final = Struct(">BBH").unpack_from
_FRAME: Final = Struct(">BHHB").unpack_from
# Tables, application data but APP1, comments: nothing that matters here.
_PASSED: Final = frozenset((0xDB, 0xC4, 0xDD, 0xCC, 0xFE, 0xE0, *range(0xE2, 0xF0)))
FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Baseline, extended and progressive, all Huffman-coded.
ORDINARY_FRAMES: Final = frozenset((0xC0, 0xC1, 0xC2))
_EXIF, _SCAN, _END = 0xE1, 0xDA, b"\xff\xd9"


def jpeg(data: LazyBytes) -> Stored:
    """Read the segments of a JPEG up to its first scan."""
    head, start, at = bytes(data[:_WINDOW]), 0, 2
    room = len(head) - 10
    frame: tuple[int, int, int, int] | None = None
    orientation, needs_pillow, exif_blocks = 1, False, 0
    for _ in range(MAX_PARTS):
        if at > room:
            start += at
            head, at = bytes(data[start : start + _WINDOW]), 0
            room = len(head) - 10
            if room < 0:
                return _jpeg_stored(
                    frame, orientation, "truncated: it ends before its pixels begin"
                )
        mark, kind, length = SEGMENT(head, at)
        if kind in _PASSED and mark == 0xFF:
            at += 2 + length
        elif mark != 0xFF or kind in (0x00, 0xFF):
            # Fill bytes are allowed, junk is not, yet every decoder looks for the next marker.
            needs_pillow = needs_pillow or mark != 0xFF or kind == 0x00
            following = head.find(b"\xff", at + 1)
            at = following if following >= 0 else len(head)
        elif kind in FRAMES:
            needs_pillow = needs_pillow or frame is not None or kind not in ORDINARY_FRAMES
            frame = _FRAME(head, at + 4)
            at += 2 + length
        elif kind == _EXIF:
            if head.startswith(_EXIF_PREFIX, at + 4):
                exif_blocks += 1
                begin = start + at
                found, plain = read_orientation(data, begin + 10, begin + 2 + length)
                orientation = found if exif_blocks == 1 else orientation
                needs_pillow = needs_pillow or not plain or exif_blocks > 1
            at += 2 + length
        elif kind == _SCAN:
            if bytes(data[-2:]) == _END or _has_end(data, start + at):
                return _jpeg_stored(frame, orientation, None, needs_pillow)
            return _jpeg_stored(frame, orientation, "truncated: it has no end marker")
        else:
            return _jpeg_stored(
                frame, orientation, f"corrupt: marker {kind:#04x} before the pixels"
            )
    return _jpeg_stored(frame, orientation, "corrupt: more segments than a picture has")


def _jpeg_stored(
    frame: tuple[int, int, int, int] | None,
    orientation: int,
    error: str | None,
    needs_pillow: bool = False,
) -> Stored:
    if frame is None:
        return Stored(
            None, None, None, 1, True, error or "corrupt: no frame header before the pixels"
        )
    precision, height, width, channels = frame
    if not height or not width:
        return Stored(None, None, None, 1, True, f"corrupt: its size is {width} x {height}")
    if precision != 8:
        error = f"unsupported-format: {precision}-bit JPEG"
    elif channels not in (1, 3, 4):
        error = error or f"unsupported-format: JPEG of {channels} channels"
    return Stored(height, width, channels, orientation, needs_pillow, error)


def _has_end(data: LazyBytes, start: int) -> bool:
    # Not by chance in a scan: there, a zero follows each byte that could begin a marker.
    size = len(data)
    if _END in bytes(data[max(start, size - 4096) :]):
        return True
    block = 1 << 20
    return any(_END in bytes(data[at : at + block + 1]) for at in range(start, size, block))


_HEADER_CHUNK: Final = Struct(">I4sIIBB").unpack
PNG_CHUNK: Final = Struct(">I4s").unpack
_PNG_CHANNELS: Final = {
    **{(depth, 0): 1 for depth in (1, 2, 4, 8, 16)},
    **{(depth, 3): 1 for depth in (1, 2, 4, 8)},
    (8, 2): 3,
    (16, 2): 3,
    (8, 4): 2,
    # Pillow has no mode of 16-bit grey with alpha, and makes it RGBA.
    (16, 4): 4,
    (8, 6): 4,
    (16, 6): 4,
}


def png(data: LazyBytes) -> Stored:
    """Read the head of each chunk of a PNG: EXIF may also come after the pixels."""
    head = bytes(data[8:26])
    if len(head) < 18:
        return Stored(None, None, None, 1, True, "truncated: it ends inside its header")
    size, kind, width, height, depth, colour = _HEADER_CHUNK(head)
    channels = _PNG_CHANNELS.get((depth, colour))
    if kind != b"IHDR" or size != 13 or channels is None:
        return Stored(None, None, None, 1, True, "corrupt: no valid header chunk")
    if not 0 < width < 1 << 31 or not 0 < height < 1 << 31:
        return Stored(None, None, None, 1, True, f"corrupt: its size is {width} x {height}")
    orientation, needs_pillow, exif_blocks = 1, False, 0
    error: str | None = "truncated: it ends before its end chunk"
    at = 33
    for _ in range(MAX_PARTS):
        chunk = data[at : at + 8]
        if len(chunk) < 8:
            break
        size, kind = PNG_CHUNK(chunk)
        if kind == b"eXIf":
            exif_blocks += 1
            found, plain = _exif(data, at + 8, at + 8 + size)
            orientation = found if exif_blocks == 1 else orientation
            needs_pillow = needs_pillow or not plain or exif_blocks > 1
        elif kind == b"acTL":
            needs_pillow = True
        at += 12 + size
        if kind == b"IEND":
            error = None if at <= len(data) else error
            break
    else:
        needs_pillow, error = True, None
    return Stored(height, width, channels, orientation, needs_pillow, error)


def _exif(data: LazyBytes, start: int, stop: int) -> tuple[int, bool]:
    # Some writers leave the prefix in that EXIF has in a JPEG; DALI then sees no EXIF.
    if bytes(data[start : start + 6]) == _EXIF_PREFIX:
        return read_orientation(data, start + 6, stop)[0], False
    return read_orientation(data, start, stop)


_WEBP_CHUNK: Final = Struct("<4sI").unpack
_ALPHA, _EXIF_FLAG, _ANIMATED = 0x10, 0x08, 0x02


def webp(data: LazyBytes) -> Stored:
    """Read the first chunk of a WebP, and the heads of the others where there is EXIF."""
    head = bytes(data[:30])
    end = 8 + int.from_bytes(head[4:8], "little")
    kind = head[12:16]
    orientation, needs_pillow, flags = 1, False, 0
    if len(head) < 30 and end > len(head):
        return Stored(None, None, None, 1, True, "truncated: it ends inside its header")
    if kind == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        width = int.from_bytes(head[26:28], "little") & 0x3FFF
        height = int.from_bytes(head[28:30], "little") & 0x3FFF
    elif kind == b"VP8L" and head[20:21] == b"\x2f":
        bits = int.from_bytes(head[21:25], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        flags = _ALPHA if bits >> 28 & 1 else 0
    elif kind == b"VP8X" and len(head) == 30:
        flags = head[20]
        width = int.from_bytes(head[24:27], "little") + 1
        height = int.from_bytes(head[27:30], "little") + 1
        needs_pillow = bool(flags & _ANIMATED)
        if flags & _EXIF_FLAG:
            orientation, plain = _webp_exif(data, min(end, len(data)))
            needs_pillow = needs_pillow or not plain
    else:
        return Stored(None, None, None, 1, True, "corrupt: no valid first chunk")
    if not width or not height:
        return Stored(None, None, None, 1, True, f"corrupt: its size is {width} x {height}")
    error = None
    if end > len(data):
        error = f"truncated: {len(data)} bytes of the {end} that its header tells"
    return Stored(height, width, 4 if flags & _ALPHA else 3, orientation, needs_pillow, error)


def _webp_exif(data: LazyBytes, end: int) -> tuple[int, bool]:
    at, blocks, orientation, plain = 30, 0, 1, True
    for _ in range(MAX_PARTS):
        if at + 8 > end:
            break
        kind, size = _WEBP_CHUNK(data[at : at + 8])
        if kind == b"EXIF":
            blocks += 1
            if blocks == 1:
                orientation, plain = _exif(data, at + 8, min(at + 8 + size, end))
        at += 8 + size + size % 2
    # Its header tells of EXIF: where the chunks do not lead to it, DALI may still find it.
    return orientation, plain and blocks == 1


def with_pillow(data: LazyBytes, format: str) -> Stored:
    """Ask Pillow for the shape of an image of any other format.

    Raises
    ------
    BadImage
    """
    file = io.BytesIO(data) if isinstance(data, bytes) else io.BufferedReader(ReaderFile(data))
    with open_image(file, format) as image, pillow_errors():
        width, height = image.size
        if not width or not height:
            raise BadImage("corrupt", f"its size is {width} x {height}")
        return Stored(height, width, len(image.getbands()), pillow_turn(image), True, None)


def pillow_turn(image: Image.Image) -> int:
    """The orientation that Pillow leaves to us to apply: for TIFF it does so itself."""
    exif = image.info.get("exif")
    if image.format == "TIFF" or not isinstance(exif, bytes):
        return 1
    return _exif(exif, 0, len(exif))[0]
