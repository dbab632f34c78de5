"""Resizing of decoded images on a CPU: bilinear, antialiased, as Pillow's bilinear.

DALI's own resize takes longer on a CPU than the decoding of a JPEG does. This one writes the pixels
into the partition's buffer, without another copy.
"""

from __future__ import annotations

import threading
from math import ceil, floor, prod
from typing import Any, Final, NamedTuple

import numpy as np
from cykooz_resizer import (
    CropBox,
    FilterType,
    ImageData,
    PixelType,
    ResizeAlg,
    ResizeOptions,
    Resizer,
)


class ResizeGeometry(NamedTuple):
    """Geometry of a resize: the scaled image and the part of it that is kept.

    Attributes
    ----------
    whole : (int, int)
        Height and width of the whole image once it is resized.
    shape : (int, int)
        Height and width of the result.
    start : (int, int)
        Row and column of the resized image at which the result begins; negative where the result is
        larger, and has black around the image.
    """

    whole: tuple[int, int]
    shape: tuple[int, int]
    start: tuple[int, int]


def resize_geometry(height: int, width: int, size: tuple[int, ...], resize: str) -> ResizeGeometry:
    """Geometry of an image of this height and width, to the pixel as DALI does on a GPU.

    ``size`` and ``resize`` are those of a `DecodeSpec`.
    """
    if resize == "stretch":
        return ResizeGeometry((size[0], size[1]), (size[0], size[1]), (0, 0))
    # In DALI's own precision, or the last pixel would be another one time in 10,000.
    scale = _scale(np.float32(height), np.float32(width), size, resize)
    whole = _times(height, scale), _times(width, scale)
    if resize in ("shorter", "longer"):
        return ResizeGeometry(whole, whole, (0, 0))
    before = [_half(have - want) for have, want in zip(whole, size, strict=True)]
    return ResizeGeometry(whole, (size[0], size[1]), (before[0], before[1]))


def _scale(height: np.float32, width: np.float32, size: tuple[int, ...], resize: str) -> np.float32:
    if resize in ("shorter", "longer"):
        edge = min(height, width) if resize == "shorter" else max(height, width)
        return np.float32(size[0]) / edge
    scales = np.float32(size[0]) / height, np.float32(size[1]) / width
    return max(scales) if resize == "crop" else min(scales)


def _times(edge: int, scale: np.float32) -> int:
    return max(1, floor(np.float32(edge) * scale + np.float32(0.5)))


def _half(pixels: int) -> int:
    # Half of an odd number is rounded away from the image's middle on both sides of zero.
    return (pixels + 1) // 2 if pixels >= 0 else -((1 - pixels) // 2)


# Bytes that are resized at once, since the library has copies of its own of what it reads.
_BAND_BYTES = 2**23

_BILINEAR = ResizeAlg.convolution(FilterType.bilinear)

_PIXEL_TYPES: Final = {
    1: PixelType.U8,
    2: PixelType.U8x2,
    3: PixelType.U8x3,
    4: PixelType.U8x4,
}

_thread = threading.local()


class Extent(NamedTuple):
    """Place in an array of an image that does not end with a whole pixel."""

    top: float
    left: float
    height: float
    width: float


class ResizedImage:
    """An image that is resized when it is written to its place.

    Parameters
    ----------
    image : array of uint8, shape (height, width, channels)
        NumPy, or what NumPy can look at without a copy.
    size, resize
        As a `DecodeSpec` has them.
    extent
        Of a picture that was decoded at a reduced scale.
    full : (int, int)
        Height and width of such an image before it was reduced.
    nearest
        Take the nearest pixel in place of a mean.
    """

    def __init__(
        self,
        image: Any,
        size: tuple[int, ...],
        resize: str,
        extent: Extent | None = None,
        full: tuple[int, int] | None = None,
        *,
        nearest: bool = False,
    ) -> None:
        self._image = np.asarray(image)
        height, width, channels = self._image.shape
        self._extent = extent or Extent(0, 0, height, width)
        full = full or (height, width)
        self._geometry = resize_geometry(full[0], full[1], size, resize)
        self._nearest = nearest
        self.shape = (*self._geometry.shape, channels)

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return prod(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        made = np.empty(self.shape, np.uint8)
        self.write(made.reshape(-1))
        return made if dtype is None else made.astype(dtype, copy=False)

    def write(self, room: np.ndarray) -> None:
        """Write the pixels to a flat array of their number."""
        made = room.reshape(self.shape)
        whole, start = self._geometry.whole, self._geometry.start
        inner = tuple(
            slice(max(0, -begin), max(0, -begin) + min(have, want))
            for begin, have, want in zip(start, whole, self.shape, strict=False)
        )
        if made[inner].size < made.size:
            made[...] = 0
        begin = max(0, start[0]), max(0, start[1])
        if self._nearest:
            made[inner] = _nearest(self._image, whole, begin, made[inner].shape)
            return
        _resize(self._image, self._extent, whole, begin, made[inner])


def _nearest(
    image: np.ndarray, whole: tuple[int, int], start: tuple[int, int], shape: tuple[int, ...]
) -> np.ndarray:
    """The part of the resized image that begins at ``start``: of each pixel the nearest one."""
    rows, columns = (
        ((start[axis] + np.arange(shape[axis]) + 0.5) * image.shape[axis] / whole[axis]).astype(int)
        for axis in (0, 1)
    )
    return image[rows[:, None], columns]


class _Span(NamedTuple):
    """Source pixels of a part of a resized row or column."""

    first: int  # pixel
    last: int  # the one behind the last
    start: float  # where the part begins, from the first pixel on
    length: float  # of the part, in pixels of the source


def _resize(
    image: np.ndarray,
    extent: Extent,
    whole: tuple[int, int],
    start: tuple[int, int],
    made: np.ndarray,
) -> None:
    """Write the part of the resized image that begins at ``start`` and has the shape of ``made``.

    Parameters
    ----------
    image, made
        (height, width, channels); rows may lie apart.
    whole
        Height and width of the whole image, resized.
    """
    height, width, channels = image.shape
    rows, columns = made.shape[:2]
    if (height, width) == whole and extent == Extent(0, 0, height, width):
        made[...] = image[start[0] : start[0] + rows, start[1] : start[1] + columns]
        return
    if channels not in _PIXEL_TYPES:  # a transform has made it
        for one in range(channels):
            _resize(image[..., one : one + 1], extent, whole, start, made[..., one : one + 1])
        return
    across = _span(width, extent.left, extent.width / whole[1], start[1], columns)
    pixels = max((across.last - across.first) * height / whole[0], columns)
    band = min(rows, max(1, int(_BAND_BYTES / (pixels * channels))))
    for row in range(0, rows, band):
        many = min(band, rows - row)
        down = _span(height, extent.top, extent.height / whole[0], start[0] + row, many)
        source = image[down.first : down.last, across.first : across.last]
        part = made[row : row + band]
        part[...] = _resized(source, down, across, part.shape, _in_one(image.shape, whole))


def _in_one(shape: tuple[int, ...], whole: tuple[int, int]) -> bool:
    """True if columns are resized before rows, as the library does, or one of them alone.

    Each of the two passes rounds, so that their order shows: in every sixth value, by 1. This is
    Pillow's order.
    """
    lost = [have - left for have, left in zip(shape, whole, strict=False)]
    return 0 in lost or (lost[0] > 0 and lost[0] > 2 * lost[1])


def _resized(
    source: np.ndarray, down: _Span, across: _Span, shape: tuple[int, ...], in_one: bool
) -> np.ndarray:
    """Resize the given part of ``source`` to ``shape``."""
    height, width, channels = source.shape
    kind = _PIXEL_TYPES[channels]
    # Without the first copy, of a part, the second would go pixel by pixel.
    given = ImageData(width, height, kind, np.ascontiguousarray(source).tobytes())
    made = ImageData(shape[1], shape[0], kind)
    if in_one:
        _run(given, made, CropBox(across.start, down.start, across.length, down.length))
    else:
        narrowed = ImageData(shape[1], height, kind)
        _run(given, narrowed, CropBox(across.start, 0, across.length, height))
        _run(narrowed, made, CropBox(0, down.start, shape[1], down.length))
    return np.frombuffer(made.get_buffer(), np.uint8).reshape(shape)


def _run(source: ImageData, made: ImageData, box: CropBox) -> None:
    resizer = getattr(_thread, "resizer", None)
    if resizer is None:
        # It has a lock and memory of its own.
        resizer = _thread.resizer = Resizer()
    resizer.resize(source, made, ResizeOptions(_BILINEAR, use_alpha=False, crop_box=box))


def _span(length: int, origin: float, scale: float, start: int, count: int) -> _Span:
    """Source pixels, of ``length``, for ``count`` resized ones from ``start`` on.

    The first of all begins at ``origin``, and each is ``scale`` wide.
    """
    reach = max(scale, 1)
    first = max(0, floor(origin + (start + 0.5) * scale - reach))
    last = min(length, ceil(origin + (start + count - 0.5) * scale + reach))
    begin = max(0.0, origin + start * scale - first)
    return _Span(first, last, begin, min(count * scale, last - first - begin))
