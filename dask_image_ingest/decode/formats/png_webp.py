"""PNG and WebP: read the shape from their chunk headers; check a PNG's, and drop its metadata."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from struct import Struct
from typing import Final

from dask_image_ingest.decode.formats.stored import MAX_PARTS, StoredHeader, read_orientation
from dask_image_ingest.storage import LazyBytes

_HEADER_CHUNK: Final = Struct(">I4sIIBB").unpack
_PNG_CHUNK: Final = Struct(">I4s").unpack
_PALETTE: Final = 3
# By bit depth and colour type.
_PNG_CHANNELS: Final = {
    **{(depth, 0): 1 for depth in (1, 2, 4, 8, 16)},
    **{(depth, 3): 1 for depth in (1, 2, 4, 8)},
    (8, 2): 3,
    (16, 2): 3,
    (8, 4): 2,
    # Pillow has no mode for 16-bit grey with alpha, and converts it to RGBA.
    (16, 4): 4,
    (8, 6): 4,
    (16, 6): 4,
}


def read_png_header(data: LazyBytes) -> StoredHeader:
    """Read the header of a PNG. Visits every chunk, as EXIF may come after the pixels."""
    head = bytes(data[8:26])
    if len(head) < 18:
        return StoredHeader(None, None, None, 1, True, "truncated: it ends inside its header")
    size, kind, width, height, depth, colour = _HEADER_CHUNK(head)
    channels = _PNG_CHANNELS.get((depth, colour))
    if kind != b"IHDR" or size != 13 or channels is None:
        return StoredHeader(None, None, None, 1, True, "corrupt: no valid header chunk")
    if not 0 < width < 1 << 31 or not 0 < height < 1 << 31:
        return StoredHeader(None, None, None, 1, True, f"corrupt: its size is {width} x {height}")
    orientation, needs_pillow, exif_blocks = 1, False, 0
    error: str | None = "truncated: it ends before its end chunk"
    for kind, at, end in _chunks(data):
        if kind == b"eXIf":
            if not _is_intact(data, at, end):
                needs_pillow = True  # DALI might read it
                continue
            exif_blocks += 1
            this_orientation, unambiguous = read_orientation(data, at + 8, end - 4)
            orientation = this_orientation if exif_blocks == 1 else orientation
            needs_pillow = needs_pillow or not unambiguous or exif_blocks > 1
        elif kind == b"IEND":
            error = None if end <= len(data) else error
        elif kind == _TOO_MANY:
            needs_pillow, error = True, None  # let Pillow find the end
    return StoredHeader(height, width, channels, orientation, needs_pillow, error)


_CRITICAL: Final = (b"IHDR", b"PLTE", b"IDAT")

# Kind in place of a chunk's: the end of `_chunks` at its limit.
_TOO_MANY: Final = b""


def _chunks(data: LazyBytes) -> Iterator[tuple[bytes, int, int]]:
    """Kind, start and end of each chunk of a PNG, up to IEND."""
    at = 8
    for _ in range(MAX_PARTS):
        head = data[at : at + 8]
        if len(head) < 8:
            return
        size, kind = _PNG_CHUNK(head)
        yield kind, at, at + 12 + size
        at += 12 + size
        if kind == b"IEND":
            return
    yield _TOO_MANY, at, at


def _is_intact(data: LazyBytes, at: int, end: int) -> bool:
    """True if the checksum of a chunk is right."""
    checksum = int.from_bytes(data[end - 4 : end], "big")
    return zlib.crc32(data[at + 4 : end - 4]) == checksum


def without_png_metadata(data: bytes | memoryview, *, exif: bool = False) -> bytes | memoryview:
    """The PNG with only the chunks that colours depend on, and with ``exif`` its orientation.

    So damaged or huge text, colour profiles and gamma neither fail a decoder nor change pixels, in
    none of them. Transparency is left out, too: see `png_transparency`. An animation becomes its
    still picture. ``data`` itself if it has no others.
    """
    kept = {b"IHDR", b"IDAT", b"IEND"}
    # In others, a palette is a hint for displays of few colours.
    kept |= {b"PLTE"} if data[25] == _PALETTE else set()
    kept |= {b"eXIf"} if exif else set()
    parts, start = [], 0
    for kind, at, end in _chunks(data):
        if kind == _TOO_MANY:
            return data
        if kind not in kept:
            parts.append(data[start:at])
            start = end
    return b"".join([*parts, data[start:]]) if parts else data


def png_transparency(data: bytes) -> bytes:
    """Body of a PNG's tRNS chunk: a colour, or the alpha of a palette; empty if it has none.

    As in libpng, a chunk that is damaged, misplaced, repeated, or does not fit is ignored.
    """
    colours = 0  # of the palette
    for kind, at, end in _chunks(data):
        if kind == b"PLTE":
            colours = (end - at - 12) // 3
        elif kind == b"IDAT":
            break
        elif kind == b"tRNS" and _is_intact(data, at, end):
            lengths = {0: (2,), 2: (6,), 3: range(1, colours + 1)}.get(data[25], ())
            if end - at - 12 in lengths:
                return data[at + 8 : end - 4]
    return b""


_WEBP_CHUNK: Final = Struct("<4sI").unpack
_ALPHA, _EXIF_FLAG, _ANIMATED = 0x10, 0x08, 0x02


def read_webp_header(data: LazyBytes) -> StoredHeader:
    """Read the header of a WebP: its first chunk, and its EXIF chunk if it announces one."""
    head = bytes(data[:30])
    end = 8 + int.from_bytes(head[4:8], "little")
    kind = head[12:16]
    orientation, needs_pillow, flags = 1, False, 0
    if len(head) < 30 and end > len(head):
        return StoredHeader(None, None, None, 1, True, "truncated: it ends inside its header")
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
            orientation, unambiguous = _webp_orientation(data, min(end, len(data)))
            needs_pillow = needs_pillow or not unambiguous
    else:
        return StoredHeader(None, None, None, 1, True, "corrupt: no valid first chunk")
    if not width or not height:
        return StoredHeader(None, None, None, 1, True, f"corrupt: its size is {width} x {height}")
    error = None
    if end > len(data):
        error = f"truncated: {len(data)} of the {end} bytes in its header"
    return StoredHeader(height, width, 4 if flags & _ALPHA else 3, orientation, needs_pillow, error)


def _webp_orientation(data: LazyBytes, end: int) -> tuple[int, bool]:
    at, blocks, orientation, unambiguous = 30, 0, 1, True
    for _ in range(MAX_PARTS):
        if at + 8 > end:
            break
        kind, size = _WEBP_CHUNK(data[at : at + 8])
        if kind == b"EXIF":
            blocks += 1
            if blocks == 1:
                block = at + 8, min(at + 8 + size, end)
                orientation, unambiguous = read_orientation(data, *block)
        at += 8 + size + size % 2
    # If the chunks don't lead to the announced EXIF, DALI may still find it.
    return orientation, unambiguous and blocks == 1


def is_valid_png(data: LazyBytes) -> bool:
    """Check the checksums of the chunks that pixels depend on; decoders may skip the others."""
    kind = None
    for kind, at, end in _chunks(data):
        if kind in _CRITICAL and not _is_intact(data, at, end):
            return False
    return kind in (b"IEND", _TOO_MANY)
