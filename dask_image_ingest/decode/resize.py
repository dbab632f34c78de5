"""Geometry of a resize, and the resize of decoded images on a CPU, antialiased as Pillow's.

On a CPU, DALI's resize takes longer than the decode of a JPEG. This one writes the pixels straight
into the partition's buffer.
"""

from __future__ import annotations

import threading
from math import ceil, floor, inf, prod
from typing import Any, Final, Literal, NamedTuple

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
from numpy.typing import DTypeLike
from PIL import Image

from dask_image_ingest.decode.buffers import as_bytes


class ResizeGeometry(NamedTuple):
    """Geometry of a resize: the scaled image, and its crop or padding.

    Attributes
    ----------
    whole : (int, int)
        Height and width of the whole scaled image.
    shape : (int, int)
        Height and width of the result.
    start : (int, int)
        Row and column of the scaled image at which the result begins; negative for black padding.
    """

    whole: tuple[int, int]
    shape: tuple[int, int]
    start: tuple[int, int]


def resize_geometry(
    height: int, width: int, size: tuple[int, ...], resize: str, crop_from: int | None = None
) -> ResizeGeometry:
    """Geometry for an image of this height and width: torchvision's, on a CPU and a GPU.

    Its ``Resize`` rounds the longer edge down, and its ``CenterCrop`` begins at the even one of two
    middle pixels. ``size``, ``resize`` and ``crop_from`` are those of a `DecodeSpec`.
    """
    if resize == "stretch":
        return ResizeGeometry((size[0], size[1]), (size[0], size[1]), (0, 0))
    rows, columns = size[0], size[-1]
    if crop_from is not None:
        rows = columns = crop_from
    # The edge that is scaled to its size, so that the other one is not smaller, or not larger.
    by_height = (rows * width >= columns * height) == (resize in ("crop", "shorter"))
    if by_height:
        whole = rows, max(1, rows * width // height)
    else:
        whole = max(1, columns * height // width), columns
    if resize in ("shorter", "longer"):
        return ResizeGeometry(whole, whole, (0, 0))
    start = _middle(whole[0] - size[0]), _middle(whole[1] - size[1])
    return ResizeGeometry(whole, (size[0], size[1]), start)


def _middle(excess: int) -> int:
    """Pixels to leave out before a crop, or negative, to pad before an image."""
    return round(excess / 2) if excess >= 0 else -(-excess // 2)


# Bytes that are resized at once: a limit, since the library copies its input.
_BAND_BYTES = 2**23

#: Filter of a resize, antialiased; those of Pillow and torchvision of these names.
Interpolation = Literal["bilinear", "bicubic", "lanczos"]


class _Filter(NamedTuple):
    algorithm: ResizeAlg
    resampling: Image.Resampling
    radius: int  # in pixels of the larger grid
    # Scale of the second pass below which the first one is Pillow's. The library rounds its weights
    # to 16 bits: one value in 500 differs by 1. If two of them have nearly all weight in the second
    # pass, as without much shrinking and in filters that sharpen, they add up to 2.
    exact_below: float


_FILTERS: Final = {
    "bilinear": _Filter(
        ResizeAlg.convolution(FilterType.bilinear), Image.Resampling.BILINEAR, 1, 4 / 3
    ),
    "bicubic": _Filter(
        ResizeAlg.convolution(FilterType.catmull_rom), Image.Resampling.BICUBIC, 2, inf
    ),
    "lanczos": _Filter(
        ResizeAlg.convolution(FilterType.lanczos3), Image.Resampling.LANCZOS, 3, inf
    ),
}

_PIXEL_TYPES: Final = {
    1: PixelType.U8,
    2: PixelType.U8x2,
    3: PixelType.U8x3,
    4: PixelType.U8x4,
}
# Modes of Pillow in which each channel is resized alone: not by alpha.
_MODES: Final = {1: "L", 2: "La", 3: "RGB", 4: "CMYK"}

_thread = threading.local()


class Extent(NamedTuple):
    """Position and size of an image inside an array, in fractions of a pixel."""

    top: float
    left: float
    height: float
    width: float


class ResizedImage:
    """Image that is resized when it is written to a buffer.

    Parameters
    ----------
    image : array of uint8, shape (height, width, channels)
        NumPy, or an array that NumPy can view without a copy.
    geometry
        The scaled image, and its crop or padding.
    interpolation
        A filter; or ``"nearest"`` for the nearest pixel, then values may be of any type.
    extent
        Extent of the image in the array, if it was decoded at a reduced scale.
    exact
        Whether no value differs from Pillow's by more than 1. Otherwise some in a million differ by
        2, which takes less time: a quarter of bicubic's.
    mirrored
        Mirror the result left to right.
    """

    def __init__(
        self,
        image: Any,
        geometry: ResizeGeometry,
        interpolation: Interpolation | Literal["nearest"] = "bilinear",
        *,
        extent: Extent | None = None,
        exact: bool = True,
        mirrored: bool = False,
    ) -> None:
        self._image = np.asarray(image)
        height, width, channels = self._image.shape
        self._extent = extent or Extent(0, 0, height, width)
        self._geometry = geometry
        self._filter = None if interpolation == "nearest" else _FILTERS[interpolation]
        self._exact = exact
        self._mirrored = mirrored
        self.shape = (*geometry.shape, channels)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the result's values."""
        return self._image.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        result = np.empty(self.shape, self.dtype)
        self.write(as_bytes(result))
        return result if dtype is None else result.astype(dtype, copy=False)

    def write(self, out: np.ndarray) -> None:
        """Write the result to ``out``, a flat uint8 array of `nbytes`."""
        if self.dtype != np.uint8:
            # Values of several bytes, which may begin at any byte of the buffer.
            out[:] = as_bytes(self._write_to(np.empty(self.shape, self.dtype)))
        else:
            self._write_to(out.reshape(self.shape))

    def _write_to(self, result: np.ndarray) -> np.ndarray:
        whole, start = self._geometry.whole, self._geometry.start
        # The part of the result inside its black padding.
        inner = tuple(
            slice(max(0, -begin), max(0, -begin) + min(scaled, length))
            for begin, scaled, length in zip(start, whole, self.shape, strict=False)
        )
        if result[inner].size < result.size:
            result[...] = 0
        crop_start = max(0, start[0]), max(0, start[1])
        target = result[inner][:, ::-1] if self._mirrored else result[inner]
        if self._filter is None:
            _copy(_nearest(self._image, whole, crop_start, target.shape), target)
        else:
            passes = _Passes.of(self._image.shape, whole, self._filter, self._exact)
            _resize(self._image, self._extent, passes, crop_start, target)
        return result


def _copy(pixels: np.ndarray, out: np.ndarray) -> None:
    """Copy an image; channel by channel if it is mirrored, for which NumPy takes a sixth."""
    if out.strides[1] > 0:
        out[...] = pixels
        return
    for channel in range(out.shape[2]):
        out[..., channel] = pixels[..., channel]


def _nearest(
    image: np.ndarray, whole: tuple[int, int], start: tuple[int, int], shape: tuple[int, ...]
) -> np.ndarray:
    """Part of the image, resized by nearest pixel, that begins at ``start``."""
    rows, columns = (
        ((start[axis] + np.arange(shape[axis]) + 0.5) * image.shape[axis] / whole[axis]).astype(int)
        for axis in (0, 1)
    )
    return image[rows[:, None], columns]


def resized_cubic(image: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """An image uint8 (height, width, 1 to 4), resized by the filter of Pillow's ``BICUBIC``.

    The vertical pass comes first, and each pass rounds.
    """
    height, width, channels = image.shape
    pixel_type = _PIXEL_TYPES[channels]
    pixels = ImageData(width, height, pixel_type, np.ascontiguousarray(image).tobytes())
    flat, result = (ImageData(columns, shape[0], pixel_type) for columns in (width, shape[1]))
    cubic = _FILTERS["bicubic"].algorithm
    _run(pixels, flat, CropBox(0, 0, width, height), cubic)
    _run(flat, result, CropBox(0, 0, width, shape[0]), cubic)
    return np.frombuffer(result.get_buffer(), np.uint8).reshape(*shape, channels)


class _Span(NamedTuple):
    """Source pixels, along one axis, of a part of the resized image."""

    first: int  # first source pixel under the filter
    stop: int  # one past the last
    start: float  # where the part begins, relative to ``first``
    length: float  # length of the part in source pixels


class _Passes(NamedTuple):
    """The two passes of a resize, one for each axis."""

    whole: tuple[int, int]  # height and width of the whole resized image
    filter: _Filter
    vertical_first: bool  # or if there is only one
    exact: bool  # the first one is Pillow's

    @classmethod
    def of(
        cls, shape: tuple[int, ...], whole: tuple[int, int], filter: _Filter, exact: bool
    ) -> _Passes:
        # Pillow's order matters, since each pass rounds: one value in six differs by 1.
        shrunk = shape[0] - whole[0], shape[1] - whole[1]
        if 0 in shrunk:
            return cls(whole, filter, True, False)
        vertical_first = shrunk[0] > 0 and shrunk[0] > 2 * shrunk[1]
        last = 1 if vertical_first else 0
        exact = exact and shape[last] / whole[last] < filter.exact_below
        return cls(whole, filter, vertical_first, exact)


def _resize(
    image: np.ndarray,
    extent: Extent,
    passes: _Passes,
    start: tuple[int, int],
    out: np.ndarray,
) -> None:
    """Write to ``out`` the part of the resized image that begins at ``start``.

    Parameters
    ----------
    image, out
        (height, width, channels); rows need not be contiguous.
    extent
        Extent of the image in its array.
    """
    height, width, channels = image.shape
    rows, columns = out.shape[:2]
    whole, radius = passes.whole, passes.filter.radius
    if (height, width) == whole and extent == Extent(0, 0, height, width):
        _copy(image[start[0] : start[0] + rows, start[1] : start[1] + columns], out)
        return
    if channels not in _PIXEL_TYPES:  # more than four: the output of a transform
        for one in range(channels):
            _resize(image[..., one : one + 1], extent, passes, start, out[..., one : one + 1])
        return
    if passes.exact:
        narrowed, extent = _first_pass(image, passes, start, (rows, columns))
        passes = passes._replace(vertical_first=True, exact=False)
        _resize(narrowed, extent, passes, start, out)
        return
    across = _span(width, extent.left, extent.width / whole[1], start[1], columns, radius)
    pixels_per_row = max((across.stop - across.first) * height / whole[0], columns)
    band = min(rows, max(1, int(_BAND_BYTES / (pixels_per_row * channels))))
    for row in range(0, rows, band):
        count = min(band, rows - row)
        first = start[0] + row
        down = _span(height, extent.top, extent.height / whole[0], first, count, radius)
        source = image[down.first : down.stop, across.first : across.stop]
        part = out[row : row + band]
        _copy(_resized(source, down, across, part.shape, passes), part)


def _first_pass(
    image: np.ndarray, passes: _Passes, start: tuple[int, int], shape: tuple[int, int]
) -> tuple[np.ndarray, Extent]:
    """The first pass by Pillow: what the second one needs for a part of this start and shape.

    All of the edge is resized, and cut afterwards. In a box, the weights have other errors, which
    round values that lie half way between two.
    """
    axis = 0 if passes.vertical_first else 1  # of this pass
    lines = image.swapaxes(0, 1) if axis == 0 else image
    (length, width, channels), across = lines.shape, passes.whole[axis]
    scale = length / passes.whole[1 - axis]
    span = _span(length, 0, scale, start[1 - axis], shape[1 - axis], passes.filter.radius)
    made = np.empty((span.stop - span.first, across, channels), np.uint8)
    mode, band = _MODES[channels], max(1, _BAND_BYTES // (width * channels))
    for first in range(span.first, span.stop, band):
        some = np.ascontiguousarray(lines[first : min(first + band, span.stop)])
        pixels = Image.frombuffer(mode, (width, len(some)), some, "raw", mode, 0, 1)
        resized = pixels.resize((across, len(some)), passes.filter.resampling)
        part = made[first - span.first :][: len(some)]
        part[...] = np.asarray(resized).reshape(part.shape)
    if axis == 0:
        return made.swapaxes(0, 1), Extent(0, -span.first, across, length)
    return made, Extent(-span.first, 0, length, across)


def _resized(
    source: np.ndarray, down: _Span, across: _Span, shape: tuple[int, ...], passes: _Passes
) -> np.ndarray:
    """Resize the spanned part of ``source`` to ``shape``."""
    height, width, channels = source.shape
    kind, algorithm = _PIXEL_TYPES[channels], passes.filter.algorithm
    # tobytes() of a part that is not contiguous would copy pixel by pixel.
    pixels = ImageData(width, height, kind, np.ascontiguousarray(source).tobytes())
    result = ImageData(shape[1], shape[0], kind)
    if passes.vertical_first:  # as in the library
        box = CropBox(across.start, down.start, across.length, down.length)
        _run(pixels, result, box, algorithm)
    else:
        narrowed = ImageData(shape[1], height, kind)
        _run(pixels, narrowed, CropBox(across.start, 0, across.length, height), algorithm)
        _run(narrowed, result, CropBox(0, down.start, shape[1], down.length), algorithm)
    return np.frombuffer(result.get_buffer(), np.uint8).reshape(shape)


def _run(source: ImageData, out: ImageData, box: CropBox, algorithm: ResizeAlg) -> None:
    # One per thread: a resizer has a lock and its own buffers.
    resizer = getattr(_thread, "resizer", None)
    if resizer is None:
        resizer = _thread.resizer = Resizer()
    resizer.resize(source, out, ResizeOptions(algorithm, use_alpha=False, crop_box=box))


def _span(length: int, origin: float, scale: float, start: int, count: int, radius: int) -> _Span:
    """Source pixels, of ``length``, for ``count`` resized pixels from ``start`` on.

    Resized pixel 0 begins at ``origin``, and each covers ``scale`` source pixels. ``radius`` is
    that of the filter, in pixels of the larger grid.
    """
    reach = radius * max(scale, 1)
    first = max(0, floor(origin + (start + 0.5) * scale - reach))
    stop = min(length, ceil(origin + (start + count - 0.5) * scale + reach))
    begin = max(0.0, origin + start * scale - first)
    return _Span(first, stop, begin, min(count * scale, stop - first - begin))
