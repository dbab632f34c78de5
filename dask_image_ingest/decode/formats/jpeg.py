"""JPEG: read shape and coding from its segments, and check them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from struct import Struct
from typing import Final

import numpy as np

from dask_image_ingest.decode.formats.stored import (
    EXIF_PREFIX,
    MAX_PARTS,
    StoredHeader,
    read_orientation,
)
from dask_image_ingest.storage import LazyBytes

# Bytes read at once: in most photos, all before the pixels. Skipped segments are not read.
_WINDOW: Final = 2048

_SEGMENT: Final = Struct(">BBH").unpack_from
_FRAME: Final = Struct(">BHHB").unpack_from

# Bytes that `segments` needs of a segment: marker, length, and what _FRAME reads.
_MIN_SEGMENT: Final = 10

_FRAMES: Final = frozenset((*range(0xC0, 0xC4), *range(0xC9, 0xCC)))
# Frames of JPEGs that no decoder here reads. 0xDE precedes those of a hierarchical one.
_OTHER_FRAMES: Final = {
    **dict.fromkeys((*range(0xC5, 0xC8), *range(0xCD, 0xD0), 0xDE), "hierarchical JPEG"),
    0xC8: "JPEG of a reserved kind",
    0xF7: "JPEG-LS",
}
# Baseline, extended and progressive, all with Huffman coding.
_ORDINARY_FRAMES: Final = frozenset((0xC0, 0xC1, 0xC2))
_PROGRESSIVE: Final = 0xC2
_HUFFMAN, _QUANTIZATION, _RESTART, _SCAN, _EXIF = 0xC4, 0xDB, 0xDD, 0xDA, 0xE1
# Kinds in place of a marker: junk, fill bytes, and the end of `segments` at its limit.
_JUNK, _FILL, _TOO_MANY = 0x00, 0xFF, -1

# Kind, position and length of a segment; a window of the file, and the segment's position in it.
_Segment = tuple[int, int, int, bytes, int]


def segments(
    data: LazyBytes, skipped: frozenset[int] = frozenset(), start: int = 2
) -> list[_Segment]:
    """Segments of a JPEG up to its next scan, without the ``skipped`` kinds.

    Skips junk between segments up to the next marker, as every decoder does.
    """
    # A list of tuples, no generator: this runs for each image of a dataset, in a few microseconds.
    found: list[_Segment] = []
    window, at = bytes(data[start : start + _WINDOW]), 0
    last = len(window) - _MIN_SEGMENT
    for _ in range(MAX_PARTS):
        if at > last:
            start += at
            window, at = bytes(data[start : start + _WINDOW]), 0
            last = len(window) - _MIN_SEGMENT
            if last < 0:
                return found
        mark, kind, length = _SEGMENT(window, at)
        if kind in skipped and mark == 0xFF:
            at += 2 + length
        elif mark != 0xFF or kind in (_JUNK, _FILL):
            found.append(((_FILL if mark == kind == 0xFF else _JUNK), start + at, 0, window, at))
            following = window.find(b"\xff", at + 1)
            at = following if following >= 0 else len(window)
        else:
            found.append((kind, start + at, length, window, at))
            if kind == _SCAN:
                return found
            at += 2 + length
    found.append((_TOO_MANY, start + at, 0, window, at))
    return found


def _body(data: LazyBytes, segment: _Segment) -> bytes:
    _, position, length, window, at = segment
    if at + 2 + length <= len(window):
        return window[at + 4 : at + 2 + length]
    return bytes(data[position + 4 : position + 2 + length])


# --- header ---------------------------------------------------------------------------------------

# Segments that don't determine the shape: tables (0xF8: of JPEG-LS), comments, application data
# except APP1 (EXIF).
_NO_SHAPE: Final = frozenset((0xDB, 0xC4, 0xDD, 0xCC, 0xF8, 0xFE, 0xE0, *range(0xE2, 0xF0)))
_END: Final = b"\xff\xd9"


def read_jpeg_header(data: LazyBytes) -> StoredHeader:
    """Read the header of a JPEG: its segments up to the first scan, and its end marker."""
    frame: tuple[int, int, int, int] | None = None
    orientation, needs_pillow, exif_blocks = 1, False, 0
    for kind, position, length, window, at in segments(data, _NO_SHAPE):
        if kind in _FRAMES:
            needs_pillow = needs_pillow or frame is not None or kind not in _ORDINARY_FRAMES
            frame = _FRAME(window, at + 4)
        elif kind == _EXIF:
            if window.startswith(EXIF_PREFIX, at + 4):
                exif_blocks += 1
                block = position + 10, position + 2 + length
                this_orientation, unambiguous = read_orientation(data, *block)
                orientation = this_orientation if exif_blocks == 1 else orientation
                needs_pillow = needs_pillow or not unambiguous or exif_blocks > 1
        elif kind == _SCAN:
            if bytes(data[-2:]) == _END or _has_end(data, position):
                return _from_frame(frame, orientation, None, needs_pillow)
            return _from_frame(frame, orientation, "truncated: it has no end marker")
        elif kind in (_JUNK, _FILL):
            # Fill bytes are allowed, junk is not.
            needs_pillow = needs_pillow or kind == _JUNK
        elif kind in _OTHER_FRAMES:
            error = f"unsupported-format: {_OTHER_FRAMES[kind]}"
            return _from_frame(_FRAME(window, at + 4), orientation, error)
        elif kind == _TOO_MANY:
            return _from_frame(frame, orientation, "corrupt: more segments than a picture has")
        else:
            return _from_frame(frame, orientation, f"corrupt: marker {kind:#04x} before the pixels")
    return _from_frame(frame, orientation, "truncated: it ends before its pixels begin")


def _from_frame(
    frame: tuple[int, int, int, int] | None,
    orientation: int,
    error: str | None,
    needs_pillow: bool = False,
) -> StoredHeader:
    if frame is None:
        return StoredHeader(
            None, None, None, 1, True, error or "corrupt: no frame header before the pixels"
        )
    precision, height, width, channels = frame
    if not height or not width:
        return StoredHeader(None, None, None, 1, True, f"corrupt: its size is {width} x {height}")
    if precision != 8 and not (error or "").startswith("unsupported-format"):
        error = f"unsupported-format: {precision}-bit JPEG"
    elif channels not in (1, 3, 4):
        error = error or f"unsupported-format: JPEG of {channels} channels"
    # Whether CMYK is inverted without Adobe's marker is a matter of the decoder.
    needs_pillow = needs_pillow or channels == 4
    return StoredHeader(height, width, channels, orientation, needs_pillow, error)


def _has_end(data: LazyBytes, start: int) -> bool:
    # The marker can't be part of the pixels: in a scan, a zero follows each 0xFF that is no marker.
    size = len(data)
    if _END in bytes(data[max(start, size - 4096) :]):
        return True
    block = 1 << 20
    return any(_END in bytes(data[at : at + block + 1]) for at in range(start, size, block))


# --- metadata -------------------------------------------------------------------------------------

# Segments by which libjpeg chooses colours, and their least length; it ignores shorter ones.
_COLOURS: Final = {0xE0: (b"JFIF\0", 16), 0xEE: (b"Adobe", 14)}


def without_jpeg_metadata(data: bytes) -> bytes:
    """The JPEG without comments and application data, for which Pillow may refuse an image.

    Those on which its colours depend stay.
    """
    parts, start = [], 0
    for segment in segments(data):
        kind, position, length, _, _ = segment
        if kind in _NO_TABLES:
            name, least = _COLOURS.get(kind, (b"", 1 << 16))
            if length < least or not _body(data, segment).startswith(name):
                parts.append(data[start:position])
                start = position + 2 + length
    return b"".join([*parts, data[start:]]) if parts else data


# --- coding ---------------------------------------------------------------------------------------

_BASELINE: Final = 0xC0


def is_baseline_jpeg(data: LazyBytes) -> bool:
    """True for a JPEG of baseline coding, which hardware decoders support."""
    frames = (segment for segment in segments(data, _NO_SHAPE) if segment[0] in _FRAMES)
    return next(frames, (None,))[0] == _BASELINE


# --- validity -------------------------------------------------------------------------------------


# Application data and comments.
_NO_TABLES: Final = frozenset((0xFE, *range(0xE0, 0xF0)))
_TABLE_NAMES: Final = frozenset((0, 1, 2, 3, 0x10, 0x11, 0x12, 0x13))


def is_valid_jpeg(data: bytes | memoryview, thorough: bool) -> bool:
    """Check markers and tables by the rules that libjpeg enforces (ITU T.81, B and C).

    libjpeg tolerates damaged pixels unless they look like a marker; only a ``thorough`` check
    searches for these.
    """
    # ``frame`` is the frame header from its number of components on.
    frame, progressive = b"", False
    huffman: frozenset[int] = frozenset()
    quantization: frozenset[int] = frozenset()
    markers: Iterator[int] | None = None
    start: int | None = 2
    while start is not None:
        begin, start = start, None
        for segment in segments(data, _NO_TABLES, begin):
            kind, position, length, _, _ = segment
            if length < 2:
                return False
            body = _body(data, segment)
            if kind == _HUFFMAN:
                if not (defined := _huffman_tables(body)):
                    return False
                huffman |= defined
            elif kind == _QUANTIZATION:
                if not (defined := _quantization_tables(body)):
                    return False
                quantization |= defined
            elif kind in _ORDINARY_FRAMES:
                if frame or not _is_frame(body[5:]):
                    return False
                frame, progressive = body[5:], kind == _PROGRESSIVE
            elif kind == _SCAN:
                if not _is_scan(body, frame, progressive, huffman, quantization):
                    return False
                if not thorough:
                    return True
                pixels = position + 2 + length
                markers = markers or _markers(data, pixels)
                start = next((marker for marker in markers if marker >= pixels), len(data))
                if data[start + 1 : start + 2] == _END[1:]:
                    return True
                break
            elif kind != _RESTART or len(body) != 2:
                return False
    return False


def _markers(data: bytes | memoryview, start: int) -> Iterator[int]:
    """Positions of everything that looks like a marker, except restarts and fill bytes."""
    pixels = np.frombuffer(data, np.uint8)[start:]
    is_marker = pixels[:-1] == 0xFF
    is_marker &= pixels[1:] != 0
    positions = np.flatnonzero(is_marker)
    kinds = pixels[positions + 1]
    wanted = ((kinds < 0xD0) | (kinds > 0xD7)) & (kinds != 0xFF)
    return iter((start + positions[wanted]).tolist())


# Most files share a few tables and frames.
_cached = functools.lru_cache(maxsize=1024)


@_cached
def _huffman_tables(body: bytes) -> frozenset[int]:
    """Ids of the tables that a segment defines; empty if it is invalid."""
    defined = set()
    at = 0
    while at < len(body):
        table, counts = body[at], body[at + 1 : at + 17]
        symbols = body[at + 17 : at + 17 + sum(counts)]
        is_dc = table < 0x10
        if (
            table not in _TABLE_NAMES
            or len(counts) < 16
            or not len(symbols) == sum(counts) <= 256
            or (is_dc and max(symbols, default=0) > 15)
            or not _is_prefix_code(counts)
        ):
            return frozenset()
        defined.add(table)
        at += 17 + len(symbols)
    return frozenset(defined)


def _is_prefix_code(counts: bytes) -> bool:
    """True if a prefix code can have these numbers of codes of 1 to 16 bits (Kraft)."""
    free = 1
    for count in counts:
        free = 2 * free - count
        if free < 0:
            return False
    return True


@_cached
def _quantization_tables(body: bytes) -> frozenset[int]:
    """Ids of the tables that a segment defines; empty if it is invalid."""
    defined = set()
    at = 0
    while at < len(body):
        precision, table = body[at] >> 4, body[at] & 15
        at += 129 if precision else 65
        if precision > 1 or table > 3 or at > len(body):
            return frozenset()
        defined.add(table)
    return frozenset(defined)


@_cached
def _is_frame(components: bytes) -> bool:
    """Check a frame header from its number of components on."""
    if not components or len(components) != 1 + 3 * components[0]:
        return False
    names, sampling = components[1::3], components[2::3]
    return len(set(names)) == len(names) and all(
        1 <= factor <= 4 for both in sampling for factor in (both >> 4, both & 15)
    )


@_cached
def _is_scan(
    body: bytes,
    frame: bytes,
    progressive: bool,
    huffman: frozenset[int],
    quantization: frozenset[int],
) -> bool:
    """Check a scan header against its frame and the tables defined before it."""
    count = body[0] if body else 0
    if not 1 <= count <= 4 or len(body) != 4 + 2 * count:
        return False
    names, tables = body[1:-3:2], body[2:-3:2]
    quantized_by = dict(zip(frame[1::3], frame[3::3], strict=True))
    if len(set(names)) < count or any(quantized_by.get(n) not in quantization for n in names):
        return False
    # Ss, Se, Ah and Al of T.81, B.2.3: spectral selection and successive approximation.
    first, last, high_bit, low_bit = body[-3], body[-2], body[-1] >> 4, body[-1] & 15
    if not progressive:
        valid = (first, last, high_bit, low_bit) == (0, 63, 0, 0)
        needs_dc = needs_ac = True
    else:
        valid = (first <= last < 64 and count == 1) if first else last == 0
        valid = valid and low_bit <= 13 and high_bit in (0, low_bit + 1)
        needs_dc, needs_ac = not first and not high_bit, first > 0
    return valid and all(
        (not needs_dc or ids >> 4 in huffman) and (not needs_ac or 0x10 | ids & 15 in huffman)
        for ids in tables
    )
