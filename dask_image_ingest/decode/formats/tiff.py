"""TIFF: read the directory of a page, and write a TIFF of a part of it for readers.

It has only the tags of its pixels, and only the strips or tiles of the part. Readers follow what
other tags say, too: a description makes tifffile stack pages, and libtiff refuses an image for a
damaged comment. So they get a file whose directory has been checked.
"""

from __future__ import annotations

import io
import itertools
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, Literal, NamedTuple

import numpy as np

from dask_image_ingest.decode.formats.stored import (
    MAX_PARTS,
    SWAPPED,
    BadImage,
    StoredHeader,
    no_page,
)
from dask_image_ingest.storage import LazyBytes, Range, merge

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_STRIP_OFFSETS, _ORIENTATION, _SAMPLES, _STRIP_ROWS, _STRIP_BYTES = 273, 274, 277, 278, 279
_PLANAR, _TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_BYTES = 284, 322, 323, 324, 325
_SUB_DIRECTORIES, _EXTRA_SAMPLES, _SAMPLE_FORMAT = 330, 338, 339

# Tags of the header: small values.
_OF_HEADER: Final = frozenset(
    (_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _ORIENTATION, _SAMPLES, _STRIP_ROWS)
) | {_PLANAR, _TILE_WIDTH, _TILE_HEIGHT, _EXTRA_SAMPLES, _SAMPLE_FORMAT}
# Tags with a value for each strip or tile.
_ARRAYS: Final = frozenset((_STRIP_OFFSETS, _STRIP_BYTES, _TILE_OFFSETS, _TILE_BYTES))
# Tags of pixels besides: where they are, fill order, fax options, predictor, palette, tables of
# JPEG, the old form of JPEG, and the coefficients of YCbCr.
_OF_PIXELS: Final = (
    _OF_HEADER | _ARRAYS | {*(266, 292, 293, 317, 320, 347, *range(512, 522), *range(529, 533))}
)

_BIG_NUMBER: Final = b"\x2b"
# Formats by type number: bytes, shorts, longs, pairs of longs, bytes of any meaning.
_TYPES: Final = {1: "B", 3: "H", 4: "I", 5: "II", 7: "B"}
_BIG_TYPES: Final = _TYPES | {16: "Q"}
# Of offsets of directories: longs, and the same with types of their own.
_OFFSETS: Final = {4: "I", 13: "I", 16: "Q", 18: "Q"}
# Most values of a tag, so that a crafted file can't stall a worker.
_MAX_VALUES: Final = 1 << 20

_UNSIGNED, _SIGNED, _FLOATS = 1, 2, 3
_PALETTE, _YCBCR = 3, 6
_UNCOMPRESSED: Final = 1
# Fax (three numbers), JPEG (old and new) and WebP, which tifffile does not get.
_FAX: Final = (2, 3, 4)
_PICTURES: Final = (6, 7, 50001)
_OLD_JPEG: Final = 6
# What tifffile gets: LZW, deflate (two numbers), PackBits, LZMA, Zstandard. Their output is bounded
# by the size of a strip; that of pictures in a tile, such as JPEG 2000, is not.
_BOUNDED: Final = (_UNCOMPRESSED, 5, 8, 32946, 32773, 34925, 50000)
# Pixels of a tile, unless the image has half as many.
_LARGEST_TILE: Final = 1 << 22

# Most samples of a pixel that tifffile reads.
_MAX_SAMPLES: Final = 4


@dataclass(frozen=True)
class TiffLayout:
    """Layout of the samples in a page of a TIFF.

    Attributes
    ----------
    tags
        Type and values by number.
    arrays
        Type, count and position of the offsets and sizes of strips or tiles, by tag: many, of
        which a part needs few.
    """

    order: Literal["<", ">"]
    tags: dict[int, tuple[int, tuple[int, ...]]]
    arrays: dict[int, tuple[int, int, int]]

    def values(self, tag: int) -> tuple[int, ...]:
        """Values of a tag; empty if it is missing."""
        return self.tags.get(tag, (0, ()))[1]

    def _get(self, tag: int, default: int) -> int:
        return (self.values(tag) or (default,))[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width, before orientation."""
        return self._get(_HEIGHT, 0), self._get(_WIDTH, 0)

    @property
    def samples(self) -> int:
        """Samples per pixel."""
        return self._get(_SAMPLES, 1)

    @property
    def bits(self) -> tuple[int, ...]:
        """Bits of each sample."""
        bits = self.values(_BITS) or (1,)
        return (bits * self.samples if len(bits) == 1 else bits)[: self.samples]

    @property
    def photometric(self) -> int:
        """Meaning of the samples: 0 grey (0 is white), 1 grey, 2 RGB, 3 palette, ..."""
        return self._get(_PHOTOMETRIC, 0)

    @property
    def compression(self) -> int:
        """Number of the compression, 1 for none."""
        return self._get(_COMPRESSION, _UNCOMPRESSED)

    @property
    def planar(self) -> bool:
        """True if each sample is stored in its own plane."""
        return self.samples > 1 and self._get(_PLANAR, 1) == 2

    @property
    def alpha(self) -> int:
        """Meaning of the first extra sample: 1 premultiplied alpha, 2 alpha, 0 something else."""
        extra = self._get(_EXTRA_SAMPLES, 0)
        return extra if extra in (1, 2) else 0

    @property
    def is_signed(self) -> bool:
        """True for signed integers."""
        return self._get(_SAMPLE_FORMAT, _UNSIGNED) == _SIGNED

    @property
    def is_float(self) -> bool:
        """True for floats."""
        return self._get(_SAMPLE_FORMAT, _UNSIGNED) == _FLOATS

    @property
    def is_picture(self) -> bool:
        """True if samples exist only after the decode of a JPEG or WebP."""
        return self.compression in _PICTURES

    @property
    def is_fax(self) -> bool:
        """True for black and white of a fax."""
        return self.compression in _FAX

    @property
    def suits_pillow(self) -> bool:
        """True if Pillow reads the colours right: unsigned samples of a pixel side by side."""
        plain = set(self.values(_SAMPLE_FORMAT)) <= {_UNSIGNED}
        plain = plain and not self.planar and set(self.bits) <= {1, 2, 4, 8, 16}
        return plain or self.is_picture or self.photometric > _PALETTE

    def unreadable(self) -> str | None:
        """Reason why tifffile can't read the samples; None if it can."""
        kinds, bits = set(self.values(_SAMPLE_FORMAT)) or {_UNSIGNED}, set(self.bits)
        if len(kinds) > 1 or len(bits) > 1:
            return "samples of several types"
        if kinds - {_UNSIGNED, _SIGNED, _FLOATS} or max(bits) > 64:
            return f"unknown samples of {max(bits)} bits"
        if self.samples > _MAX_SAMPLES:
            return f"{self.samples} samples of a pixel, more than {_MAX_SAMPLES}"
        if self.photometric > _PALETTE:
            return "samples that are neither grey, RGB nor indices of a palette"
        if self.compression not in _BOUNDED:
            return f"compression {self.compression}"
        return None

    def header_error(self) -> str | None:
        """Error of an image whose tiles take much more memory than its pixels; None for others."""
        (height, width), tile = self.shape, (self._get(_TILE_HEIGHT, 0), self._get(_TILE_WIDTH, 0))
        if tile[0] * tile[1] > max(_LARGEST_TILE, 2 * height * width):
            return f"too-large: a tile of {tile[1]} x {tile[0]} in an image of {width} x {height}"
        return None

    def header(self) -> StoredHeader:
        """The header of the page.

        Raises
        ------
        BadImage
            If it has no pixels.
        """
        height, width = self.shape
        if not width or not height:
            raise BadImage("corrupt", f"its size is {width} x {height}")
        orientation = self._get(_ORIENTATION, 1)
        orientation = orientation if 1 <= orientation <= 8 else 1
        return StoredHeader(height, width, self.samples, orientation, True, self.header_error())

    def cut(self, data: LazyBytes, rows: range, columns: range) -> TiffCut:
        """The strips or tiles that some rows and columns meet, before orientation.

        Raises
        ------
        BadImage
            If the directory names bytes that the file does not have.
        """
        (height, width), samples = self.shape, self.samples
        if self.compression == _OLD_JPEG:  # its parts lie where only tags of its own say
            tags = {
                tag: self._numbered(data, tag, range(self.arrays[tag][1])) for tag in self.arrays
            }
            return TiffCut(range(height), range(width), tags, [(0, len(data))])
        tiled = _TILE_OFFSETS in self.arrays
        if tiled:
            high, wide = self._get(_TILE_HEIGHT, 0), self._get(_TILE_WIDTH, 0)
        else:
            high, wide = min(self._get(_STRIP_ROWS, height), height), width
        if not high or not wide:
            raise BadImage("corrupt", f"its pieces are {wide} x {high}")
        down = range(rows.start // high, ceil(rows.stop / high))
        across = range(columns.start // wide, ceil(columns.stop / wide))
        per_row, per_plane = ceil(width / wide), ceil(height / high) * ceil(width / wide)
        where, lengths = (_TILE_OFFSETS, _TILE_BYTES) if tiled else (_STRIP_OFFSETS, _STRIP_BYTES)
        planes = samples if self.planar else 1
        self._refuse_fewer(where, planes * len(down) * len(across))
        numbers = [
            plane * per_plane + row * per_row + column
            for plane in range(planes)
            for row in down
            for column in across
        ]
        offsets = self._numbered(data, where, numbers)
        held = range(down.start * high, min(down.stop * high, height))
        if self.compression == _UNCOMPRESSED and self.photometric != _YCBCR:
            # Many writers get the sizes wrong, and no reader needs them.
            row_bytes = ceil(wide * (self.bits[0] if self.planar else sum(self.bits)) / 8)
            if not tiled and len(down) == 1:  # one strip may be all of a large image
                offsets = [offset + (rows.start - held.start) * row_bytes for offset in offsets]
                held, high = rows, len(rows)
            sizes = [high * row_bytes] * len(numbers)
            if not tiled:
                for last in range(len(down) - 1, len(numbers), len(down)):
                    sizes[last] = (len(held) - (len(down) - 1) * high) * row_bytes
        else:
            sizes = self._numbered(data, lengths, numbers)
            if per_plane == len(numbers) == 1 and not any(sizes):
                sizes = [max(0, len(data) - offsets[0])]
        places = list(zip(offsets, sizes, strict=True))
        for offset, length in places:
            if not length or offset + length > len(data):
                raise BadImage("truncated", f"{length} bytes of pixels at {offset} of {len(data)}")
        columns = range(across.start * wide, min(across.stop * wide, width))
        tags = {where: offsets, lengths: sizes}
        return TiffCut(held, columns, tags, merge((at, at + size) for at, size in places))

    def _numbered(self, data: LazyBytes, tag: int, numbers: Sequence[int]) -> list[int]:
        """Some values of a tag with one for each strip or tile; only these are read."""
        first, stop = min(numbers, default=0), max(numbers, default=-1) + 1
        self._refuse_fewer(tag, stop)
        kind, _, position = self.arrays[tag]
        code = f"{self.order}{stop - first}{_BIG_TYPES[kind][0]}"
        at = position + first * struct.calcsize(code[0] + code[-1])
        values = _unpacked(code, data[at : at + struct.calcsize(code)])
        return [values[number - first] for number in numbers]

    def _refuse_fewer(self, tag: int, wanted: int) -> None:
        count = self.arrays[tag][1] if tag in self.arrays else 0
        if wanted > count:
            raise BadImage("corrupt", f"{count} of {wanted} strips or tiles")

    def written(self, data: LazyBytes, part: TiffCut, *, inverted: bool = True) -> bytes:
        """A TIFF of a part, whose directory has only the tags that its pixels depend on.

        A BigTIFF becomes a TIFF. Orientation is left to the caller, and with ``inverted=False`` 0
        is black.

        Raises
        ------
        BadImage
            If it does not fit into a TIFF.
        """
        tags = {tag: value for tag, value in self.tags.items() if tag != _ORIENTATION}
        if not inverted and not self.photometric:
            tags[_PHOTOMETRIC] = (3, (1,))
        is_whole_file = self.compression == _OLD_JPEG
        ranges = [(8, len(data))] if is_whole_file else part.ranges
        starts = [start for start, _ in ranges]
        ends = list(itertools.accumulate((stop - start for start, stop in ranges), initial=8))
        tags |= {tag: (4, tuple(values)) for tag, values in part.tags.items()}
        if not is_whole_file:
            rows, columns = len(part.rows), len(part.columns)
            tags |= {_HEIGHT: (4, (rows,)), _WIDTH: (4, (columns,))}
            if _STRIP_OFFSETS in part.tags:
                tags[_STRIP_ROWS] = (4, (min(self._get(_STRIP_ROWS, rows), rows),))
            where = _STRIP_OFFSETS if _STRIP_OFFSETS in part.tags else _TILE_OFFSETS
            numbers = [bisect_right(starts, offset) - 1 for offset in part.tags[where]]
            moved = [
                offset - starts[number] + ends[number]
                for offset, number in zip(part.tags[where], numbers, strict=True)
            ]
            tags[where] = (4, tuple(moved))
        stored = memoryview(data) if isinstance(data, bytes) else data
        pieces = [stored[start:stop] for start, stop in ranges]
        at = ends[-1] + ends[-1] % 2
        try:
            head = (b"II*\0" if self.order == "<" else b"MM\0*") + struct.pack(f"{self.order}I", at)
            padding = bytes(at - ends[-1])
            return b"".join([head, *pieces, padding, _directory(self.order, tags, at)])
        except struct.error:
            raise BadImage("corrupt", "an offset beyond 4 GB") from None


class TiffCut(NamedTuple):
    """The strips or tiles of a TIFF that a part of it meets.

    Attributes
    ----------
    rows, columns
        The stored pixels that they hold, at least those of the part.
    tags
        Offsets and sizes of these strips or tiles, by tag.
    ranges
        The bytes of the file that hold them, sorted.
    """

    rows: range
    columns: range
    tags: dict[int, list[int]]
    ranges: list[Range]


class _Start(NamedTuple):
    """Begin of a TIFF: its byte order, its words, and the offset of its first directory."""

    order: Literal["<", ">"]
    is_big: bool
    first: int

    @classmethod
    def of(cls, data: LazyBytes) -> _Start:
        head = bytes(data[:16])
        order: Literal["<", ">"] = "<" if head[:2] == b"II" else ">"
        is_big = _BIG_NUMBER in head[2:4]
        (first,) = _unpacked(f"{order}8xQ" if is_big else f"{order}4xI", head)
        return cls(order, is_big, first)

    def entries(self, data: LazyBytes, at: int) -> tuple[list[tuple[int, int, int, bytes]], int]:
        """Entries (tag, type, count, value or its offset) of a directory, and where they end."""
        start = at + (8 if self.is_big else 2)
        (count,) = _unpacked(f"{self.order}{'Q' if self.is_big else 'H'}", data[at:start])
        if count > MAX_PARTS:
            raise BadImage("corrupt", f"a directory of {count:,} tags")
        entry = struct.Struct(f"{self.order}HHQ8s" if self.is_big else f"{self.order}HHI4s")
        end = start + entry.size * count
        entries = bytes(data[start:end])
        if len(entries) < end - start:
            raise BadImage("truncated", _IN_DIRECTORY)
        return list(entry.iter_unpack(entries)), end

    def offset(self, data: LazyBytes) -> int:
        """An offset of a directory, or of a tag's values."""
        return _unpacked(f"{self.order}{'Q' if self.is_big else 'I'}", data)[0]


def _unpacked(format: str, data: LazyBytes) -> tuple[int, ...]:
    values = struct.Struct(format)
    try:
        return values.unpack(bytes(data[: values.size]))
    except struct.error:
        raise BadImage("truncated", _IN_DIRECTORY) from None


_IN_DIRECTORY: Final = "it ends inside its directory"


def directories(data: LazyBytes) -> Iterator[int]:
    """Offsets of the directories of a TIFF: of each page, and after it those of its SubIFDs.

    Levels of a pyramid are SubIFDs, or pages.

    Raises
    ------
    BadImage
        If they lead in a circle, or out of the file.
    """
    start = _Start.of(data)
    pending, seen = [start.first], set[int]()
    while pending:
        if not (at := pending.pop()):
            continue
        if at in seen:
            raise BadImage("corrupt", f"its directories lead back to byte {at}")
        if len(seen) == MAX_PARTS:
            raise BadImage("corrupt", f"more than {MAX_PARTS:,} pages")
        seen.add(at)
        yield at
        entries, end = start.entries(data, at)
        pending.append(start.offset(data[end : end + 8]))
        for tag, kind, count, value in entries:
            if tag == _SUB_DIRECTORIES and kind in _OFFSETS and count <= MAX_PARTS:
                offsets = f"{start.order}{count}{_OFFSETS[kind]}"
                size = struct.calcsize(offsets)
                if size > len(value):
                    place = start.offset(value)
                    value = bytes(data[place : place + size])
                pending += reversed(_unpacked(offsets, value))


def read_layout(data: LazyBytes, wanted: frozenset[int] = _OF_PIXELS, page: int = 0) -> TiffLayout:
    """Layout of a page of a TIFF or BigTIFF; `directories` counts the pages.

    Raises
    ------
    BadImage
        If its directory is truncated, or there is no such page.
    """
    start = _Start.of(data)
    if not page:
        return _layout_at(data, start, start.first, wanted)
    number = -1
    for number, at in enumerate(directories(data)):
        if number == page:
            return _layout_at(data, start, at, wanted)
    raise no_page(page, number + 1)


def _layout_at(data: LazyBytes, start: _Start, at: int, wanted: frozenset[int]) -> TiffLayout:
    types = _BIG_TYPES if start.is_big else _TYPES
    tags: dict[int, tuple[int, tuple[int, ...]]] = {}
    arrays: dict[int, tuple[int, int, int]] = {}
    entries, end = start.entries(data, at)
    for number, (tag, kind, count, value) in enumerate(entries):
        known = tag in tags or tag in arrays
        if tag not in wanted or known or kind not in types or count > _MAX_VALUES:
            continue
        code, inline = types[kind], len(value)
        size = struct.calcsize(f"{start.order}{count * len(code)}{code[0]}")
        # Some writers of big-endian BigTIFF put a long at the end.
        shift = inline - 4 if size == 4 and not any(value[:4]) else 0
        if tag in _ARRAYS:
            last = end - (len(entries) - number - 1) * (4 + 2 * inline)
            place = start.offset(value) if size > inline else last - inline + shift
            arrays[tag] = kind, count, place
            continue
        if size > inline:
            place = start.offset(value)
            value, shift = bytes(data[place : place + size]), 0
        tags[tag] = kind, _unpacked(f"{start.order}{count * len(code)}{code[0]}", value[shift:])
    return TiffLayout(start.order, tags, arrays)


def read_tiff_header(data: LazyBytes, page: int = 0) -> StoredHeader:
    """Read the header of a page of a TIFF: the tags of its directory.

    Raises
    ------
    BadImage
    """
    return read_layout(data, _OF_HEADER, page).header()


def stored_part(
    region: tuple[int, ...] | None, shape: tuple[int, int], orientation: int
) -> tuple[range, range]:
    """Stored rows and columns of an upright region (top, left, height, width); None for all.

    ``shape`` is that of the stored image.
    """
    if region is None:
        return range(shape[0]), range(shape[1])
    top, left, high, wide = region[:4]
    # The inverse of `upright`, step by step backwards.
    height, width = reversed(shape) if orientation in SWAPPED else shape
    if orientation in (3, 4, 7, 8):
        top = height - top - high
    if orientation in (2, 3, 6, 7):
        left = width - left - wide
    rows, columns = range(top, top + high), range(left, left + wide)
    return (columns, rows) if orientation in SWAPPED else (rows, columns)


def tiff_page_shapes(data: LazyBytes) -> list[tuple[int, int]]:
    """Height and width of each page, upright; 0 of a page that names none.

    Raises
    ------
    BadImage
        As `directories`.
    """
    start, shapes = _Start.of(data), []
    for at in directories(data):
        layout = _layout_at(data, start, at, _OF_HEADER)
        height, width = layout.shape
        swapped = (layout.values(_ORIENTATION) or (1,))[0] in SWAPPED
        shapes.append((width, height) if swapped else (height, width))
    return shapes


def read_samples(tiff: bytes) -> np.ndarray:
    """Samples (height, width, samples) of a file of `TiffLayout.written`.

    Raises
    ------
    BadImage
        ``unsupported-format`` if tifffile or imagecodecs is not installed.
    """
    try:
        import imagecodecs  # noqa: F401 - tifffile imports it when it needs it
        import tifffile
    except ImportError:
        raise BadImage(
            "unsupported-format",
            "this kind of TIFF needs tifffile: pip install 'dask-image-ingest[tiff]'",
        ) from None
    with tifffile.TiffFile(io.BytesIO(tiff)) as file:
        # Planes, depth, height, width, samples of a plane.
        planes = file.pages.first.asarray(squeeze=False, maxworkers=1)[:, 0]
    return np.concatenate(list(planes), axis=-1) if len(planes) > 1 else planes[0]


def _directory(order: str, tags: dict[int, tuple[int, tuple[int, ...]]], start: int) -> bytes:
    """Directory of a TIFF, to be at ``start``."""
    entries, after = [], b""
    end_of_entries = start + 2 + 12 * len(tags) + 4
    for tag, (kind, values) in sorted(tags.items()):
        kind = 4 if kind == 16 else kind
        packed = struct.pack(f"{order}{len(values)}{_TYPES[kind][0]}", *values)
        count = len(values) // len(_TYPES[kind])
        if len(packed) > 4:
            packed += bytes(len(packed) % 2)
            after, packed = after + packed, struct.pack(f"{order}I", end_of_entries + len(after))
        entries.append(struct.pack(f"{order}HHI", tag, kind, count) + packed.ljust(4, b"\0"))
    return struct.pack(f"{order}H", len(tags)) + b"".join(entries) + bytes(4) + after
