"""TIFF: read the directory of a page, and write a TIFF of a part of it for readers.

It has only the tags of its pixels, and only the strips or tiles of the part. Readers follow what
other tags say, too: a description makes tifffile stack pages, and libtiff refuses an image for a
damaged comment. So they get a file whose directory has been checked.
"""

from __future__ import annotations

import io
import itertools
import struct
import threading
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
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
from dask_image_ingest.decode.region import Part, Region
from dask_image_ingest.storage import SIGNATURE_BYTES, LazyBytes, Range, image_format, merge

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_STRIP_OFFSETS, _ORIENTATION, _SAMPLES, _STRIP_ROWS, _STRIP_BYTES = 273, 274, 277, 278, 279
_PLANAR, _TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_BYTES = 284, 322, 323, 324, 325
_KIND, _SUB_DIRECTORIES, _EXTRA_SAMPLES, _SAMPLE_FORMAT = 254, 330, 338, 339

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
# Names of compressions that are not read, or not by every build of Pillow.
_NAMES: Final = (
    dict.fromkeys((33003, 33004, 33005, 34712), "JPEG 2000")
    | dict.fromkeys((22610, 34934), "JPEG XR")
    | dict.fromkeys((50002, 52546), "JPEG XL")
    | {34887: "LERC", 34925: "LZMA", 34933: "PNG", 50000: "Zstandard", 50001: "WebP"}
)
# Pixels of a tile, unless the image has half as many.
_LARGEST_TILE: Final = 1 << 22

# The tag of a kind of page, 1 for a smaller copy, and the number of pages in which another than
# the first is looked for, besides its copies.
_OF_KIND: Final = frozenset([_KIND])
_FEW: Final = 32

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
    def orientation(self) -> int:
        """EXIF's number, 1 to 8."""
        orientation = self._get(_ORIENTATION, 1)
        return orientation if 1 <= orientation <= 8 else 1

    @property
    def upright_shape(self) -> tuple[int, int]:
        """Height and width, after orientation."""
        return self.shape[::-1] if self.orientation in SWAPPED else self.shape

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
    def unsupported(self) -> str:
        """Why this compression can't be read, with its name and number."""
        name = _NAMES.get(self.compression, "")
        return f"a TIFF compressed by {name or 'an unknown method'} ({self.compression})"

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
            return self.unsupported
        return None

    def header(self) -> StoredHeader:
        """The header of the page; `BadImage` if it has no pixels."""
        (height, width), tile = self.shape, (self._get(_TILE_HEIGHT, 0), self._get(_TILE_WIDTH, 0))
        if not width or not height:
            raise BadImage("corrupt", f"its size is {width} x {height}")
        error = None
        if tile[0] * tile[1] > max(_LARGEST_TILE, 2 * height * width):
            error = f"too-large: a tile of {tile[1]} x {tile[0]} in an image of {width} x {height}"
        return StoredHeader(height, width, self.samples, self.orientation, True, error)

    def cut(self, data: LazyBytes, region: Region | None) -> TiffCut:
        """The strips or tiles that an upright region meets; None for all."""
        height, width = self.shape
        part = whole = Region(0, 0, height, width)
        if region is not None:
            part = region.stored(self.upright_shape, self.orientation)
        if part.inside((height, width)) != part:
            raise BadImage("corrupt", "its pixels are not of the size in its header")
        if self.compression == _OLD_JPEG:  # its parts lie where only tags of its own say
            arrays = self.arrays.items()
            tags = {tag: self._numbered(data, tag, range(count)) for tag, (_, count, _) in arrays}
            return TiffCut(whole, part, tags, [(8, len(data))])
        tiled = _TILE_OFFSETS in self.arrays
        if tiled:
            high, wide = self._get(_TILE_HEIGHT, 0), self._get(_TILE_WIDTH, 0)
        else:
            high, wide = min(self._get(_STRIP_ROWS, height), height), width
        if not high or not wide:
            raise BadImage("corrupt", f"its pieces are {wide} x {high}")
        down = range(part.top // high, ceil((part.top + part.height) / high))
        across = range(part.left // wide, ceil((part.left + part.width) / wide))
        per_row, per_plane = ceil(width / wide), ceil(height / high) * ceil(width / wide)
        where, lengths = (_TILE_OFFSETS, _TILE_BYTES) if tiled else (_STRIP_OFFSETS, _STRIP_BYTES)
        planes = range(self.samples if self.planar else 1)
        self._refuse_fewer(where, len(planes) * len(down) * len(across))
        places = itertools.product(planes, down, across)
        numbers = [plane * per_plane + row * per_row + column for plane, row, column in places]
        offsets = self._numbered(data, where, numbers)
        top, left = down.start * high, across.start * wide
        held = Region(top, left, high * len(down), wide * len(across)).inside(self.shape)
        if self.compression == _UNCOMPRESSED and self.photometric != _YCBCR:
            # Many writers get the sizes wrong, and no reader needs them.
            row_bytes = ceil(wide * (self.bits[0] if self.planar else sum(self.bits)) / 8)
            if not tiled and len(down) == 1:  # one strip may be all of a large image
                offsets = [offset + (part.top - top) * row_bytes for offset in offsets]
                high, held = part.height, Region(part.top, 0, part.height, width)
            sizes = [high * row_bytes] * len(numbers)
            for last in range(len(down) - 1, 0 if tiled else len(numbers), len(down)):
                sizes[last] = (held.height - (len(down) - 1) * high) * row_bytes
        else:
            sizes = self._numbered(data, lengths, numbers)
            if per_plane == len(numbers) == 1 and not any(sizes):
                sizes = [max(0, len(data) - offsets[0])]
        for offset, length in zip(offsets, sizes, strict=True):
            if not length or offset + length > len(data):
                raise BadImage("truncated", f"{length} bytes of pixels at {offset} of {len(data)}")
        ranges = merge((at, at + size) for at, size in zip(offsets, sizes, strict=True))
        return TiffCut(held, part, {where: offsets, lengths: sizes}, ranges)

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
        if wanted > (count := self.arrays.get(tag, (0, 0, 0))[1]):
            raise BadImage("corrupt", f"{count} of {wanted} strips or tiles")

    def written(self, data: LazyBytes, part: TiffCut, *, inverted: bool = True) -> bytes:
        """A TIFF of a part, whose directory has only the tags that its pixels depend on.

        A BigTIFF becomes a TIFF. Orientation is left to the caller, and with ``inverted=False`` 0
        is black.
        """
        tags = {tag: value for tag, value in self.tags.items() if tag != _ORIENTATION}
        if not inverted and not self.photometric:
            tags[_PHOTOMETRIC] = (3, (1,))
        starts = [start for start, _ in part.ranges]
        ends = list(itertools.accumulate((stop - start for start, stop in part.ranges), initial=8))
        for tag, values in part.tags.items():
            if tag in (_STRIP_OFFSETS, _TILE_OFFSETS):
                numbers = [bisect_right(starts, offset) - 1 for offset in values]
                moves = [ends[number] - starts[number] for number in numbers]
                values = list(map(sum, zip(values, moves, strict=True)))
            tags[tag] = (4, tuple(values))
        rows, columns = part.held[2:4]
        strip = min(self._get(_STRIP_ROWS, rows), rows)
        tags |= {_HEIGHT: (4, (rows,)), _WIDTH: (4, (columns,))}
        tags |= {_STRIP_ROWS: (4, (strip,))} if _STRIP_OFFSETS in part.tags else {}
        stored = memoryview(data) if isinstance(data, bytes) else data
        pieces = [stored[start:stop] for start, stop in part.ranges]
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
    held, part
        Stored pixels of these strips or tiles, and of the part.
    tags
        Offsets and sizes of the strips or tiles, by tag.
    ranges
        The bytes of the file that hold them, sorted.
    """

    held: Region
    part: Region
    tags: dict[int, list[int]]
    ranges: list[Range]


class OpenTiff:
    """A TIFF that is read by slices of ``content``: bytes, or a shard that has it at ``offset``.

    What it reads raises `BadImage` if directories are damaged, or lead out of the file.
    """

    def __init__(self, content: LazyBytes, offset: int = 0, size: int | None = None) -> None:
        self.content, self._offset = content, offset
        #: What keeps the shard open.
        self.lease: object = None
        self._size = len(content) if size is None else size
        head = bytes(self[:16])
        self._order: Literal["<", ">"] = "<" if head[:2] == b"II" else ">"
        self._is_big = _BIG_NUMBER in head[2:4]
        (self._first,) = _unpacked(f"{self._order}{'8xQ' if self._is_big else '4xI'}", head)
        # Directories that were found so far, and the next one that no SubIFDs name.
        self._found, self._seen, self._next = list[int](), set[int](), self._first
        self._lock = threading.Lock()
        self._layouts: dict[tuple[int, frozenset[int]], TiffLayout] = {}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> bytes | bytearray | memoryview:
        start, stop, _ = part.indices(self._size)
        return self.content[self._offset + start : self._offset + max(start, stop)]

    def shapes(self) -> list[tuple[int, int]]:
        """Height and width of each page, upright; 0 of a page that names none."""
        return [self._layout(at, _OF_HEADER).upright_shape for at in self._directories(MAX_PARTS)]

    def has_several_pages(self) -> bool:
        """True if there is another page than the first, besides smaller copies of it."""
        with suppress(BadImage):
            pages = (self._layout(at, _OF_KIND) for at in self._directories(_FEW)[1:])
            return any(not sum(page.values(_KIND)) & 1 for page in pages)
        return False

    def ranges(self, part: Part) -> list[Range]:
        """Bytes of ``content`` that the decode of a part reads; none if it fails."""
        with suppress(BadImage):
            cut = read_layout(self, page=part.page).cut(self, part.region.inside(part.shape))
            return [(self._offset + start, self._offset + stop) for start, stop in cut.ranges]
        return []

    def layout(self, page: int, wanted: frozenset[int]) -> TiffLayout:
        """Layout of a page, with those tags that are wanted; see `read_layout`."""
        layout = self._layouts.get((page, wanted))
        if layout is None:
            found = self._directories(page + 1) if page else [self._first]
            if not 0 <= page < len(found):
                raise no_page(page, len(found))
            layout = self._layouts[page, wanted] = self._layout(found[page], wanted)
        return layout

    def _directories(self, wanted: int) -> list[int]:
        """Offsets of the first directories: of each page, and after it those of its SubIFDs."""
        with self._lock:
            while self._next and len(self._found) < wanted:
                if self._next in self._seen:
                    raise BadImage("corrupt", f"its directories lead back to byte {self._next}")
                self._seen.add(self._next)
                entries, end = self._entries(self._next)
                self._found.append(self._next)
                for tag, kind, count, value in entries:
                    if tag == _SUB_DIRECTORIES and kind in _OFFSETS and count <= MAX_PARTS:
                        offsets = f"{self._order}{count}{_OFFSETS[kind]}"
                        below = dict.fromkeys(_unpacked(offsets, self._value(offsets, value)))
                        # Their own links may lead from one to the other.
                        self._found += [at for at in below if at not in self._seen]
                self._next = self._word(self[end : end + 8])
        return self._found

    def _layout(self, at: int, wanted: frozenset[int]) -> TiffLayout:
        types = _BIG_TYPES if self._is_big else _TYPES
        tags: dict[int, tuple[int, tuple[int, ...]]] = {}
        arrays: dict[int, tuple[int, int, int]] = {}
        entries, end = self._entries(at)
        for number, (tag, kind, count, value) in enumerate(entries):
            known = tag in tags or tag in arrays
            if tag not in wanted or known or kind not in types or count > _MAX_VALUES:
                continue
            inline, code = len(value), types[kind]
            values = f"{self._order}{count * len(code)}{code[0]}"
            size = struct.calcsize(values)
            # Some writers of big-endian BigTIFF put a long at the end.
            shift = inline - 4 if size == 4 and not any(value[:4]) else 0
            if tag in _ARRAYS:
                here = end - (len(entries) - number - 1) * (4 + 2 * inline) - inline + shift
                arrays[tag] = kind, count, self._word(value) if size > inline else here
            else:
                tags[tag] = kind, _unpacked(values, self._value(values, value)[shift:])
        return TiffLayout(self._order, tags, arrays)

    def _entries(self, at: int) -> tuple[list[tuple[int, int, int, bytes]], int]:
        """Entries (tag, type, count, value or its offset) of a directory, and where they end."""
        start = at + (8 if self._is_big else 2)
        (count,) = _unpacked(f"{self._order}{'Q' if self._is_big else 'H'}", self[at:start])
        if count > MAX_PARTS:
            raise BadImage("corrupt", f"a directory of {count:,} tags")
        entry = struct.Struct(f"{self._order}{'HHQ8s' if self._is_big else 'HHI4s'}")
        end = start + entry.size * count
        entries = bytes(self[start:end])
        if len(entries) < end - start:
            raise BadImage("truncated", _IN_DIRECTORY)
        return list(entry.iter_unpack(entries)), end

    def _word(self, data: LazyBytes) -> int:
        """An offset in the file."""
        return _unpacked(f"{self._order}{'Q' if self._is_big else 'I'}", data)[0]

    def _value(self, format: str, entry: bytes) -> bytes:
        """The bytes of a tag's values: its entry's, or those at the offset in there."""
        if (size := struct.calcsize(format)) <= len(entry):
            return entry
        return bytes(self[(at := self._word(entry)) : at + size])


def _unpacked(format: str, data: LazyBytes) -> tuple[int, ...]:
    values = struct.Struct(format)
    try:
        return values.unpack(bytes(data[: values.size]))
    except struct.error:
        raise BadImage("truncated", _IN_DIRECTORY) from None


_IN_DIRECTORY: Final = "it ends inside its directory"


def read_layout(data: LazyBytes, wanted: frozenset[int] = _OF_PIXELS, page: int = 0) -> TiffLayout:
    """Layout of a page of a TIFF or BigTIFF.

    After each page come the directories that its SubIFDs name: levels of a pyramid, usually.
    `BadImage` is raised if its directory is truncated, or there is no such page.
    """
    return as_open_tiff(data).layout(page, wanted)


def read_tiff_header(data: LazyBytes, page: int = 0) -> StoredHeader:
    """Read the header of a page of a TIFF: the tags of its directory; may raise `BadImage`."""
    return read_layout(data, _OF_HEADER, page).header()


def is_tiff(data: LazyBytes) -> bool:
    """True if the first bytes are those of a TIFF."""
    return image_format(bytes(data[:SIGNATURE_BYTES])) == "tiff"


def as_open_tiff(data: LazyBytes) -> OpenTiff:
    """The same bytes as an `OpenTiff`; `BadImage` if they are too few."""
    return data if isinstance(data, OpenTiff) else OpenTiff(data)


def held_by(data: LazyBytes, part: Part) -> Region | None:
    """Stored pixels of the strips or tiles that a part meets; None if they can't be found."""
    with suppress(BadImage):
        layout = read_layout(data, page=part.page)
        return layout.cut(data, part.region.inside(part.shape)).held
    return None


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
