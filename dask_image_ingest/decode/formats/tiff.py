"""TIFF: read the directory of the first image, and write it anew with only the tags of its pixels.

Readers follow what other tags say, too: a description makes tifffile stack pages, and libtiff
refuses an image for a damaged comment. So they get a file whose directory has been checked.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from math import ceil
from typing import Final, Literal

import numpy as np

from dask_image_ingest.decode.formats.stored import MAX_PARTS, BadImage, StoredHeader
from dask_image_ingest.storage import LazyBytes

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_STRIP_OFFSETS, _ORIENTATION, _SAMPLES, _STRIP_ROWS, _STRIP_BYTES = 273, 274, 277, 278, 279
_PLANAR, _TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_BYTES = 284, 322, 323, 324, 325
_EXTRA_SAMPLES, _SAMPLE_FORMAT = 338, 339

# Tags of the header: small values.
_OF_HEADER: Final = frozenset(
    (_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _ORIENTATION, _SAMPLES, _STRIP_ROWS)
) | {_PLANAR, _TILE_WIDTH, _TILE_HEIGHT, _EXTRA_SAMPLES, _SAMPLE_FORMAT}
# Tags of pixels besides: where they are, fill order, fax options, predictor, palette, tables of
# JPEG, the old form of JPEG, and the coefficients of YCbCr.
_OF_PIXELS: Final = _OF_HEADER | {
    *(_STRIP_OFFSETS, _STRIP_BYTES, _TILE_OFFSETS, _TILE_BYTES),
    *(266, 292, 293, 317, 320, 347, *range(512, 522), *range(529, 533)),
}

_BIG_NUMBER: Final = b"\x2b"
# Formats by type number: bytes, shorts, longs, pairs of longs, bytes of any meaning.
_TYPES: Final = {1: "B", 3: "H", 4: "I", 5: "II", 7: "B"}
_BIG_TYPES: Final = _TYPES | {16: "Q"}
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
    """Layout of the samples in the first image of a TIFF.

    Attributes
    ----------
    tags
        Type and values by number.
    """

    order: Literal["<", ">"]
    tags: dict[int, tuple[int, tuple[int, ...]]]

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

    def with_tags_of_pixels(self, data: bytes, *, inverted: bool = True) -> bytes:
        """The file with another directory: only the tags that pixels depend on, of one image.

        A BigTIFF becomes a TIFF. Orientation is left to the caller, and with ``inverted=False`` 0
        is black.

        Raises
        ------
        BadImage
            If the directory names bytes that the file does not have.
        """
        tags = {tag: value for tag, value in self.tags.items() if tag != _ORIENTATION}
        if not inverted and not self.photometric:
            tags[_PHOTOMETRIC] = (3, (1,))
        if self.compression != _OLD_JPEG:
            tags |= self._pieces(len(data))
        try:
            at = len(data) + len(data) % 2
            head = (b"II*\0" if self.order == "<" else b"MM\0*") + struct.pack(f"{self.order}I", at)
            return head + data[8:].ljust(at - 8, b"\0") + _directory(self.order, tags, at)
        except struct.error:
            raise BadImage("corrupt", "an offset beyond 4 GB") from None

    def _pieces(self, size: int) -> dict[int, tuple[int, tuple[int, ...]]]:
        """Tags of offsets and sizes of the strips or tiles, checked to be in the file."""
        (height, width), samples = self.shape, self.samples
        tiled = _TILE_OFFSETS in self.tags
        if tiled:
            rows, columns = self._get(_TILE_HEIGHT, 0), self._get(_TILE_WIDTH, 0)
        else:
            rows, columns = min(self._get(_STRIP_ROWS, height), height), width
        if not rows or not columns:
            raise BadImage("corrupt", f"its pieces are {columns} x {rows}")
        count = ceil(height / rows) * ceil(width / columns) * (samples if self.planar else 1)
        where, lengths = (_TILE_OFFSETS, _TILE_BYTES) if tiled else (_STRIP_OFFSETS, _STRIP_BYTES)
        offsets, sizes = self.values(where)[:count], self.values(lengths)[:count]
        if self.compression == _UNCOMPRESSED and self.photometric != _YCBCR:
            # Many writers get the sizes wrong, and no reader needs them.
            bits = self.bits[0] if self.planar else sum(self.bits)
            whole = rows * ceil(columns * bits / 8)
            last = whole if tiled else (height - (ceil(height / rows) - 1) * rows) * whole // rows
            per_plane = ceil(height / rows) * ceil(width / columns)
            sizes = tuple(last if (n + 1) % per_plane == 0 else whole for n in range(count))
        elif count == 1 and offsets and not any(sizes):
            sizes = (max(0, size - offsets[0]),)
        if len(offsets) < count or len(sizes) < count:
            raise BadImage("corrupt", f"{min(len(offsets), len(sizes))} of {count} strips or tiles")
        for offset, length in zip(offsets, sizes, strict=True):
            if not length or offset + length > size:
                raise BadImage("truncated", f"{length} bytes of pixels at {offset} of {size}")
        return {where: (4, offsets), lengths: (4, sizes)}


def read_layout(data: LazyBytes, wanted: frozenset[int] = _OF_PIXELS) -> TiffLayout:
    """Layout of the first image of a TIFF or BigTIFF.

    Raises
    ------
    BadImage
        If its directory is truncated.
    """
    head = bytes(data[:16])
    order: Literal["<", ">"] = "<" if head[:2] == b"II" else ">"
    # Struct formats of the directory's offset, of its number of entries, and of their counts.
    big = _BIG_NUMBER in head[2:4]
    offset, number, word = ("8xQ", "Q", "Q") if big else ("4xI", "H", "I")
    inline, types = struct.calcsize(f"{order}{word}"), _BIG_TYPES if big else _TYPES
    tags: dict[int, tuple[int, tuple[int, ...]]] = {}
    try:
        (at,) = struct.unpack_from(order + offset, head)
        start = at + struct.calcsize(order + number)
        (count,) = struct.unpack(order + number, bytes(data[at:start]))
        entry = struct.Struct(f"{order}HH{word}{inline}s")
        entries = bytes(data[start : start + entry.size * min(count, MAX_PARTS)])
        for tag, kind, length, value in entry.iter_unpack(entries):
            if tag not in wanted or tag in tags or kind not in types or length > _MAX_VALUES:
                continue
            code = types[kind]
            values = struct.Struct(f"{order}{length * len(code)}{code[0]}")
            if values.size > inline:
                (at,) = struct.unpack(order + word, value)
                value = bytes(data[at : at + values.size])
            elif values.size == 4 and not any(value[:4]):
                value = value[-4:]  # some writers of big-endian BigTIFF put a long at the end
            tags[tag] = (kind, values.unpack(value[: values.size]))
    except struct.error:
        raise BadImage("truncated", "it ends inside its directory") from None
    return TiffLayout(order, tags)


def read_tiff_header(data: LazyBytes) -> StoredHeader:
    """Read the header of a TIFF: the tags of its first directory.

    Raises
    ------
    BadImage
    """
    layout = read_layout(data, _OF_HEADER)
    height, width = layout.shape
    if not width or not height:
        raise BadImage("corrupt", f"its size is {width} x {height}")
    orientation = (layout.values(_ORIENTATION) or (1,))[0]
    orientation = orientation if 1 <= orientation <= 8 else 1
    return StoredHeader(height, width, layout.samples, orientation, True, layout.header_error())


def read_samples(tiff: bytes) -> np.ndarray:
    """Samples (height, width, samples) of a file of `TiffLayout.with_tags_of_pixels`.

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
