"""JPEG: shape and coding from its segments, and whether they are valid."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from struct import Struct
from typing import Any, Final

import numpy as np

from dask_image_ingest.decode.formats.exif import EXIF_PREFIX, read_orientation
from dask_image_ingest.decode.formats.stored import MAX_PARTS, Stored
from dask_image_ingest.storage import LazyBytes

# Up to the pixels in most photos. Segments that are passed over are not read.
_WINDOW: Final = 2048

_SEGMENT: Final = Struct(">BBH").unpack_from
_FRAME: Final = Struct(">BHHB").unpack_from

# Bytes that `segments` wants at a segment: its marker and length, and what _FRAME reads.
_LEAST: Final = 10

_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Baseline, extended and progressive, all Huffman-coded.
_ORDINARY_FRAMES: Final = frozenset((0xC0, 0xC1, 0xC2))
_PROGRESSIVE: Final = 0xC2
_HUFFMAN, _QUANTIZATION, _RESTART, _SCAN, _EXIF = 0xC4, 0xDB, 0xDD, 0xDA, 0xE1
# In place of a marker: junk, fill bytes, and more segments than a picture has.
_JUNK, _FILL, _TOO_MANY = 0x00, 0xFF, -1

# Kind, position and length of a segment, and a window of the file with its place there.
_Segment = tuple[int, int, int, bytes, int]


def segments(
    data: LazyBytes, passed: frozenset[int] = frozenset(), start: int = 2
) -> list[_Segment]:
    """The segments of a JPEG up to its next scan, without ``passed`` kinds.

    Junk between segments is passed over to the next marker, as every decoder does.
    """
    # A list, and no generator: this runs for each image of a dataset, in a few microseconds.
    found: list[_Segment] = []
    head, at = bytes(data[start : start + _WINDOW]), 0
    room = len(head) - _LEAST
    for _ in range(MAX_PARTS):
        if at > room:
            start += at
            head, at = bytes(data[start : start + _WINDOW]), 0
            room = len(head) - _LEAST
            if room < 0:
                return found
        mark, kind, length = _SEGMENT(head, at)
        if kind in passed and mark == 0xFF:
            at += 2 + length
        elif mark != 0xFF or kind in (_JUNK, _FILL):
            found.append(((_FILL if mark == kind == 0xFF else _JUNK), start + at, 0, head, at))
            following = head.find(b"\xff", at + 1)
            at = following if following >= 0 else len(head)
        else:
            found.append((kind, start + at, length, head, at))
            if kind == _SCAN:
                return found
            at += 2 + length
    found.append((_TOO_MANY, start + at, 0, head, at))
    return found


def _body(data: LazyBytes, segment: _Segment) -> bytes:
    _, position, length, head, at = segment
    if at + 2 + length <= len(head):
        return head[at + 4 : at + 2 + length]
    return bytes(data[position + 4 : position + 2 + length])


# --- shape ----------------------------------------------------------------------------------------

# Tables, application data but APP1, comments: they say nothing about the shape.
_NO_SHAPE: Final = frozenset((0xDB, 0xC4, 0xDD, 0xCC, 0xFE, 0xE0, *range(0xE2, 0xF0)))
_END: Final = b"\xff\xd9"


def jpeg_stored(data: LazyBytes) -> Stored:
    """Shape and orientation of a JPEG, from its segments up to the first scan."""
    frame: tuple[int, int, int, int] | None = None
    orientation, needs_pillow, exif_blocks = 1, False, 0
    for kind, position, length, head, at in segments(data, _NO_SHAPE):
        if kind in _FRAMES:
            needs_pillow = needs_pillow or frame is not None or kind not in _ORDINARY_FRAMES
            frame = _FRAME(head, at + 4)
        elif kind == _EXIF:
            if head.startswith(EXIF_PREFIX, at + 4):
                exif_blocks += 1
                found, plain = read_orientation(data, position + 10, position + 2 + length)
                orientation = found if exif_blocks == 1 else orientation
                needs_pillow = needs_pillow or not plain or exif_blocks > 1
        elif kind == _SCAN:
            if bytes(data[-2:]) == _END or _has_end(data, position):
                return _stored(frame, orientation, None, needs_pillow)
            return _stored(frame, orientation, "truncated: it has no end marker")
        elif kind in (_JUNK, _FILL):
            # Fill bytes are allowed, junk is not.
            needs_pillow = needs_pillow or kind == _JUNK
        elif kind == _TOO_MANY:
            return _stored(frame, orientation, "corrupt: more segments than a picture has")
        else:
            return _stored(frame, orientation, f"corrupt: marker {kind:#04x} before the pixels")
    return _stored(frame, orientation, "truncated: it ends before its pixels begin")


def _stored(
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


# --- coding ---------------------------------------------------------------------------------------

_BASELINE: Final = 0xC0


def is_baseline_jpeg(data: LazyBytes) -> bool:
    """True for a JPEG of baseline coding, which hardware decoders take."""
    frames = (segment for segment in segments(data, _NO_SHAPE) if segment[0] in _FRAMES)
    return next(frames, (None,))[0] == _BASELINE


# --- validity -------------------------------------------------------------------------------------


# Application data and comments.
_NO_TABLES: Final = frozenset((0xFE, *range(0xE0, 0xF0)))
_TABLE_NAMES: Final = frozenset((0, 1, 2, 3, 0x10, 0x11, 0x12, 0x13))


def is_valid_jpeg(data: Any, thorough: bool) -> bool:
    """Check markers and tables by the rules at which libjpeg stops (ITU T.81, B and C).

    Damage among the pixels does not stop it, unless it looks like a marker: only a ``thorough``
    check looks for those.
    """
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
                after = position + 2 + length
                markers = markers or _markers(data, after)
                start = next((place for place in markers if place >= after), len(data))
                if data[start + 1 : start + 2] == _END[1:]:
                    return True
                break
            elif kind != _RESTART or len(body) != 2:
                return False
    return False


def _markers(data: Any, start: int) -> Iterator[int]:
    """Positions of markers and of what looks like them, without restarts and fill bytes."""
    pixels = np.frombuffer(data, np.uint8)[start:]
    marked = pixels[:-1] == 0xFF
    marked &= pixels[1:] != 0
    places = np.flatnonzero(marked)
    kinds = pixels[places + 1]
    meant = ((kinds < 0xD0) | (kinds > 0xD7)) & (kinds != 0xFF)
    return iter((start + places[meant]).tolist())


# Few tables and frames are in use, and most files have the same ones.
_remembered = functools.lru_cache(maxsize=1024)


@_remembered
def _huffman_tables(body: bytes) -> frozenset[int]:
    """The tables that a segment defines; none if it is wrong."""
    defined = set()
    at = 0
    while at < len(body):
        table, counts = body[at], body[at + 1 : at + 17]
        symbols = body[at + 17 : at + 17 + sum(counts)]
        direct = table < 0x10
        if (
            table not in _TABLE_NAMES
            or len(counts) < 16
            or not len(symbols) == sum(counts) <= 256
            or (direct and max(symbols, default=0) > 15)
            or not _is_prefix_code(counts)
        ):
            return frozenset()
        defined.add(table)
        at += 17 + len(symbols)
    return frozenset(defined)


def _is_prefix_code(counts: bytes) -> bool:
    """True if there is room for so many codes of 1 to 16 bits."""
    room = 1
    for count in counts:
        room = 2 * room - count
        if room < 0:
            return False
    return True


@_remembered
def _quantization_tables(body: bytes) -> frozenset[int]:
    defined = set()
    at = 0
    while at < len(body):
        precision, table = body[at] >> 4, body[at] & 15
        at += 129 if precision else 65
        if precision > 1 or table > 3 or at > len(body):
            return frozenset()
        defined.add(table)
    return frozenset(defined)


@_remembered
def _is_frame(components: bytes) -> bool:
    """Check a frame header from its number of components on."""
    if not components or len(components) != 1 + 3 * components[0]:
        return False
    names, sampling = components[1::3], components[2::3]
    return len(set(names)) == len(names) and all(
        1 <= factor <= 4 for both in sampling for factor in (both >> 4, both & 15)
    )


@_remembered
def _is_scan(
    body: bytes,
    frame: bytes,
    progressive: bool,
    huffman: frozenset[int],
    quantization: frozenset[int],
) -> bool:
    count = body[0] if body else 0
    if not 1 <= count <= 4 or len(body) != 4 + 2 * count:
        return False
    names, tables = body[1:-3:2], body[2:-3:2]
    quantized_by = dict(zip(frame[1::3], frame[3::3], strict=True))
    if len(set(names)) < count or any(quantized_by.get(n) not in quantization for n in names):
        return False
    first, last, before, now = body[-3], body[-2], body[-1] >> 4, body[-1] & 15
    if not progressive:
        in_order = (first, last, before, now) == (0, 63, 0, 0)
        direct = others = True
    else:
        in_order = (first <= last < 64 and count == 1) if first else last == 0
        in_order = in_order and now <= 13 and before in (0, now + 1)
        direct, others = not first and not before, first > 0
    return in_order and all(
        (not direct or which >> 4 in huffman) and (not others or 0x10 | which & 15 in huffman)
        for which in tables
    )
