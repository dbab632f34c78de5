"""TIFF: read the stored samples, whatever they mean.

Pillow interprets samples as colours: it inverts grey in which 0 is white, drops extra samples,
divides by alpha, and has no mode for three floats. So the samples are read as a grey TIFF that is
``samples`` times as wide: the same data behind another directory.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from dask_image_ingest.decode.formats.stored import MAX_PARTS, BadImage
from dask_image_ingest.storage import LazyBytes

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_STRIP_OFFSETS, _ORIENTATION, _SAMPLES, _STRIP_BYTES = 273, 274, 277, 279
_PLANAR, _PREDICTOR, _TILE_WIDTH, _TILE_OFFSETS, _TILE_BYTES = 284, 317, 322, 324, 325
_EXTRA_SAMPLES, _SAMPLE_FORMAT = 338, 339

# Tags copied to the grey TIFF; by number: fill order, rows per strip, fax options, tile height.
_COPIED: Final = (_WIDTH, _HEIGHT, _COMPRESSION, 266, 278, 292, 293, _TILE_WIDTH, 323)
_PIECES: Final = (_STRIP_OFFSETS, _STRIP_BYTES, _TILE_OFFSETS, _TILE_BYTES)
_READ: Final = frozenset(
    (*_COPIED, *_PIECES, _BITS, _PHOTOMETRIC, _ORIENTATION, _SAMPLES, _PLANAR, _PREDICTOR)
) | {_EXTRA_SAMPLES, _SAMPLE_FORMAT}

_BIG_NUMBER: Final = b"\x2b"
# Formats by type number: bytes, shorts, longs.
_TYPES: Final = {1: "B", 3: "H", 4: "I"}
_BIG_TYPES: Final = _TYPES | {16: "Q"}
# Most values of a tag, so that a crafted file can't stall a worker.
_MAX_VALUES: Final = 1 << 20

_UNSIGNED, _SIGNED, _FLOATS = 1, 2, 3
# Grey (0 is white, 0 is black), RGB, palette. Stored values of other colour spaces are of no use.
_SUPPORTED_PHOTOMETRIC: Final = (0, 1, 2, 3)
_JPEG: Final = (6, 7)
_HORIZONTAL: Final = 2
# Compressions with a predictor: LZW, deflate (two numbers), LZMA, Zstandard.
_WITH_PREDICTOR: Final = (5, 8, 32946, 34925, 50000)

_MAX_SAMPLES: Final = 4


@dataclass(frozen=True)
class TiffLayout:
    """Layout of the samples in the first image of a TIFF."""

    order: Literal["<", ">"]
    tags: dict[int, tuple[int, ...]]

    def _get(self, tag: int, default: int) -> int:
        return (self.tags.get(tag) or (default,))[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width, before orientation."""
        return self._get(_HEIGHT, 0), self._get(_WIDTH, 0)

    @property
    def orientation(self) -> int:
        """As in EXIF, 1 to 8."""
        orientation = self._get(_ORIENTATION, 1)
        return orientation if 1 <= orientation <= 8 else 1

    @property
    def samples(self) -> int:
        """Samples per pixel."""
        return self._get(_SAMPLES, 1)

    @property
    def bits(self) -> int:
        """Bits per sample."""
        return self._get(_BITS, 1)

    @property
    def is_jpeg(self) -> bool:
        """True for JPEG compression, whose samples exist only after a decode."""
        return self._get(_COMPRESSION, 1) in _JPEG

    @property
    def is_signed(self) -> bool:
        """True for signed integers."""
        return self._get(_SAMPLE_FORMAT, 1) == _SIGNED

    @property
    def is_float(self) -> bool:
        """True for floats."""
        return self._get(_SAMPLE_FORMAT, 1) == _FLOATS

    @property
    def planar(self) -> bool:
        """True if each sample is stored in its own plane."""
        return self.samples > 1 and self._get(_PLANAR, 1) == 2

    @property
    def has_alpha(self) -> bool:
        """True if the last sample is alpha."""
        return self.tags.get(_EXTRA_SAMPLES, ())[-1:] in ((1,), (2,))

    def unreadable(self) -> str | None:
        """Reason why the stored samples can't be read; None if they can."""
        kind, bits = self._get(_SAMPLE_FORMAT, 1), self.bits
        one_kind = all(len(set(self.tags.get(tag, (1,)))) == 1 for tag in (_BITS, _SAMPLE_FORMAT))
        names = {_UNSIGNED: "unsigned", _SIGNED: "signed", _FLOATS: "floating-point"}
        supported = {_UNSIGNED: (8, 16, 32), _SIGNED: (8, 16, 32), _FLOATS: (32,)}
        if self.samples == 1:
            supported[_UNSIGNED] = (1, 2, 4, 8, 12, 16, 32)
        if not one_kind or bits not in supported.get(kind, ()):
            return f"{names.get(kind, 'unknown')} samples of {bits} bits"
        if not 1 <= self.samples <= _MAX_SAMPLES:
            return f"{self.samples} samples of a pixel, more than {_MAX_SAMPLES}"
        if self._get(_PHOTOMETRIC, 0) not in _SUPPORTED_PHOTOMETRIC:
            return "samples that are neither grey, RGB nor indices of a palette"
        if self._undoes_predictor and self._get(_PREDICTOR, 1) != _HORIZONTAL:
            return f"several samples of a pixel with the predictor {self._get(_PREDICTOR, 1)}"
        return None

    @property
    def _undoes_predictor(self) -> bool:
        """True if `joined` must undo the predictor.

        In the wide grey TIFF, libtiff would take differences between unlike samples.
        """
        has_predictor = (
            self._get(_COMPRESSION, 1) in _WITH_PREDICTOR and self._get(_PREDICTOR, 1) != 1
        )
        return has_predictor and self.samples > 1 and not self.planar

    def grey_parts(self, data: bytes) -> list[bytes]:
        """Grey TIFFs with the same samples: one per plane, or one with the samples side by side.

        Raises
        ------
        BadImage
        """
        planes = self.samples if self.planar else 1
        return [self._grey(data, plane, planes) for plane in range(planes)]

    def _grey(self, data: bytes, plane: int, planes: int) -> bytes:
        tags = {tag: self.tags[tag] for tag in _COPIED if tag in self.tags}
        for tag in (_WIDTH, _TILE_WIDTH):
            if tag in tags:
                tags[tag] = (tags[tag][0] * self.samples // planes,)
        tags |= {_BITS: (self.bits,), _PHOTOMETRIC: (1,), _SAMPLES: (1,)}
        tags[_SAMPLE_FORMAT] = (self._get(_SAMPLE_FORMAT, 1),)
        if not self._undoes_predictor:
            tags[_PREDICTOR] = (self._get(_PREDICTOR, 1),)
        for tag in _PIECES:
            if tag in self.tags:
                count = len(self.tags[tag]) // planes
                tags[tag] = self.tags[tag][plane * count : (plane + 1) * count]
        try:
            # The new directory goes before the old file, so that a truncated file still is.
            size = len(_directory(self.order, tags))
            for tag in (_STRIP_OFFSETS, _TILE_OFFSETS):
                if tag in tags:
                    tags[tag] = tuple(offset + size for offset in tags[tag])
            return _directory(self.order, tags) + data
        except struct.error:
            raise BadImage("corrupt", "an offset beyond 4 GB") from None

    def joined(self, parts: list[np.ndarray]) -> np.ndarray:
        """Image (height, width, samples) from the decoded `grey_parts`, before orientation."""
        if self.planar:
            return np.stack(parts, axis=2)
        image = parts[0].astype(parts[0].dtype.newbyteorder("="))
        image = image.reshape(*self.shape, self.samples)
        if self._undoes_predictor:
            # Differences are of integers, for floats too, and start anew in each tile.
            integers = image.view(f"u{image.dtype.itemsize}")
            tile = self._get(_TILE_WIDTH, 0) or self.shape[1]
            for start in range(0, self.shape[1], tile):
                part = integers[:, start : start + tile]
                np.cumsum(part, axis=1, dtype=part.dtype, out=part)
        return image


def read_layout(data: LazyBytes) -> TiffLayout:
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
    tags: dict[int, tuple[int, ...]] = {}
    try:
        (at,) = struct.unpack_from(order + offset, head)
        start = at + struct.calcsize(order + number)
        (count,) = struct.unpack(order + number, bytes(data[at:start]))
        entry = struct.Struct(f"{order}HH{word}{inline}s")
        entries = bytes(data[start : start + entry.size * min(count, MAX_PARTS)])
        for tag, kind, length, value in entry.iter_unpack(entries):
            if tag not in _READ or tag in tags or kind not in types or length > _MAX_VALUES:
                continue
            values = struct.Struct(f"{order}{length}{types[kind]}")
            if values.size > inline:
                (at,) = struct.unpack(order + word, value)
                value = bytes(data[at : at + values.size])
            tags[tag] = values.unpack(value[: values.size])
    except struct.error:
        raise BadImage("truncated", "it ends inside its directory") from None
    return TiffLayout(order, tags)


def _directory(order: str, tags: dict[int, tuple[int, ...]]) -> bytes:
    """Header and directory of a TIFF, all of whose tags are longs."""
    entries, long_values = [], b""
    end_of_entries = 8 + 2 + 12 * len(tags) + 4
    for tag, values in sorted(tags.items()):
        packed = struct.pack(f"{order}{len(values)}I", *values)
        if len(values) != 1:
            offset = struct.pack(f"{order}I", end_of_entries + len(long_values))
            long_values, packed = long_values + packed, offset
        entries.append(struct.pack(f"{order}HHI", tag, 4, len(values)) + packed)
    head = b"II*\0" if order == "<" else b"MM\0*"
    head += struct.pack(f"{order}IH", 8, len(tags))
    return b"".join([head, *entries, bytes(4), long_values])
