"""PNG and WebP: shape from the heads of their chunks, and whether a PNG's checksums hold."""

from __future__ import annotations

import zlib
from struct import Struct
from typing import Any, Final

from dask_image_ingest.decode.formats.exif import read_any_orientation
from dask_image_ingest.decode.formats.stored import MAX_PARTS, Stored
from dask_image_ingest.storage import LazyBytes

_HEADER_CHUNK: Final = Struct(">I4sIIBB").unpack
_PNG_CHUNK: Final = Struct(">I4s").unpack
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


def png_stored(data: LazyBytes) -> Stored:
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
        size, kind = _PNG_CHUNK(chunk)
        if kind == b"eXIf":
            exif_blocks += 1
            found, plain = read_any_orientation(data, at + 8, at + 8 + size)
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


_WEBP_CHUNK: Final = Struct("<4sI").unpack
_ALPHA, _EXIF_FLAG, _ANIMATED = 0x10, 0x08, 0x02


def webp_stored(data: LazyBytes) -> Stored:
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
                orientation, plain = read_any_orientation(data, at + 8, min(at + 8 + size, end))
        at += 8 + size + size % 2
    # Its header tells of EXIF: where the chunks do not lead to it, DALI may still find it.
    return orientation, plain and blocks == 1


def is_valid_png(data: Any) -> bool:
    """Check the checksums of the chunks with pixels; decoders may skip the others."""
    at = 8
    for _ in range(MAX_PARTS):
        head = data[at : at + 8]
        if len(head) < 8:
            return False
        size, kind = _PNG_CHUNK(head)
        end = at + 8 + size
        if kind in (b"IHDR", b"PLTE", b"IDAT"):
            stored = int.from_bytes(data[end : end + 4], "big")
            if zlib.crc32(data[at + 4 : end]) != stored:
                return False
        elif kind == b"IEND":
            return True
        at = end + 4
    return True
