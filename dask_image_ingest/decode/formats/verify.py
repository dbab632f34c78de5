"""Whether a file's structure holds, so that DALI will not refuse it, and its whole batch with it.

Looked at just before decoding, in a hundredth of its time; `measure` reads the headers of images
that nobody may ever decode. A file that is not sound is not bad yet: Pillow has the last word.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from dask_image_ingest.decode.formats.dimensions import (
    FRAMES,
    MAX_PARTS,
    ORDINARY_FRAMES,
    PNG_CHUNK,
    SEGMENT,
)


def is_valid(format: str | None, data: Any, thorough: bool = False) -> bool:
    """Whether the structure of a JPEG or PNG holds; of other formats nothing is known.

    Parameters
    ----------
    format : str or None
        As `Header` has it.
    data : bytes-like, or anything with a length and slices that are bytes-like
    thorough
        Whether to look for markers among the pixels of a JPEG too, which takes 40 µs instead of 5.
    """
    if format == "jpeg":
        return _jpeg(data, thorough)
    return format != "png" or _png(data)


def jpeg_head(data: Any) -> bytes | None:
    """All of a JPEG before its pixels, height and width being zeros; None if that is not short.

    Files of one origin often have the same. It is a guess: such bytes may also be in a table.
    """
    head = bytes(data[:_SHORT])
    frame = _frame(head)
    scan = head.find(_SCAN_START, frame)
    if frame < 0 or not 0 < scan < len(head) - 3:
        return None
    end = scan + 2 + head[scan + 3]
    # What has no height or no width is no picture, whatever comes before and after.
    if (
        end > len(head)
        or not any(head[frame + 5 : frame + 7])
        or not any(head[frame + 7 : frame + 9])
    ):
        return None
    return head[: frame + 5] + bytes(4) + head[frame + 9 : end]


def is_jpeg_head(head: bytes) -> bool:
    """Whether `jpeg_head` has guessed rightly: one frame where it is taken to be, then a scan."""
    at, frames = 2, []
    while at + 4 <= len(head):
        mark, kind, length = SEGMENT(head, at)
        if mark != 0xFF or (length < 8 and kind in FRAMES):
            return False
        if kind in FRAMES:
            frames.append(at)
        at += 2 + length
        if kind == _SCAN:
            return at == len(head) and frames == [_frame(head)]
    return False


def _frame(head: bytes) -> int:
    """Where the first thing is that looks like a frame of a common kind."""
    baseline = head.find(b"\xff\xc0\0")
    return baseline if baseline >= 0 else head.find(b"\xff\xc2\0")


_HUFFMAN, _QUANTIZATION, _RESTART, _SCAN = 0xC4, 0xDB, 0xDD, 0xDA
_PROGRESSIVE: Final = 0xC2
# Application data and comments.
_NO_TABLES: Final = frozenset((0xFE, *range(0xE0, 0xF0)))
_END: Final = b"\xd9"
_SCAN_START: Final = b"\xff\xda\0"
# Up to the pixels in most photos, and in those that have little but tables before them.
_WINDOW: Final = 2048
_SHORT: Final = 1024
_TABLE_NAMES: Final = frozenset((0, 1, 2, 3, 0x10, 0x11, 0x12, 0x13))


def _jpeg(data: Any, thorough: bool) -> bool:
    """The rules by which libjpeg stops, of ITU T.81, B and C: markers, and what they define.

    Damage among the pixels is no reason for it to stop, unless it looks like a marker.
    """
    head = bytes(data[:_WINDOW])
    frame, progressive = b"", False
    huffman: frozenset[int] = frozenset()
    quantization: frozenset[int] = frozenset()
    markers: Iterator[int] | None = None
    at, size = 2, len(data)
    while at + 4 <= size:
        mark, kind, length = SEGMENT(data, at)
        if mark != 0xFF or length < 2:
            return False
        start, at = at + 4, at + 2 + length
        if kind in _NO_TABLES:
            continue
        body = head[start:at] if at <= _WINDOW else bytes(data[start:at])
        if kind == _HUFFMAN:
            if not (defined := _huffman_tables(body)):
                return False
            huffman |= defined
        elif kind == _QUANTIZATION:
            if not (defined := _quantization_tables(body)):
                return False
            quantization |= defined
        elif kind in ORDINARY_FRAMES:
            if frame or not _is_frame(body[5:]):
                return False
            frame, progressive = body[5:], kind == _PROGRESSIVE
        elif kind == _SCAN:
            if not _is_scan(body, frame, progressive, huffman, quantization):
                return False
            if not thorough:
                return True
            markers = markers or _markers(data, at)
            at = next((place for place in markers if place >= at), size)
            if data[at + 1 : at + 2] == _END:
                return True
        elif kind != _RESTART or len(body) != 2:
            return False
    return False


def _markers(data: Any, start: int) -> Iterator[int]:
    """Where markers are, or what looks like them, but for restarts and fill bytes."""
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
    """Whether there is room for so many codes of 1 to 16 bits."""
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


def _png(data: Any) -> bool:
    """Verify the chunks in which the pixels are; the others may be skipped by decoders."""
    at = 8
    for _ in range(MAX_PARTS):
        head = data[at : at + 8]
        if len(head) < 8:
            return False
        size, kind = PNG_CHUNK(head)
        end = at + 8 + size
        if kind in (b"IHDR", b"PLTE", b"IDAT"):
            stored = int.from_bytes(data[end : end + 4], "big")
            if zlib.crc32(data[at + 4 : end]) != stored:
                return False
        elif kind == b"IEND":
            return True
        at = end + 4
    return True
