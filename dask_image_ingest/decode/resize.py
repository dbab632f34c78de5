"""Resize decoded images on a CPU: bilinear with antialiasing, as Pillow's bilinear.

On a CPU, DALI's resize takes longer than the decode of a JPEG. This one writes the pixels straight
into the partition's buffer.
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
from numpy.typing import DTypeLike

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


def resize_geometry(height: int, width: int, size: tuple[int, ...], resize: str) -> ResizeGeometry:
    """Geometry for an image of this height and width, equal to DALI's on a GPU.

    ``size`` and ``resize`` are those of a `DecodeSpec`.
    """
    if resize == "stretch":
        return ResizeGeometry((size[0], size[1]), (size[0], size[1]), (0, 0))
    # In float32 as DALI: in float64, one size in 10,000 differs by a pixel.
    scale = _scale(np.float32(height), np.float32(width), size, resize)
    whole = _times(height, scale), _times(width, scale)
    if resize in ("shorter", "longer"):
        return ResizeGeometry(whole, whole, (0, 0))
    start = _half(whole[0] - size[0]), _half(whole[1] - size[1])
    return ResizeGeometry(whole, (size[0], size[1]), start)


def _scale(height: np.float32, width: np.float32, size: tuple[int, ...], resize: str) -> np.float32:
    if resize in ("shorter", "longer"):
        edge = min(height, width) if resize == "shorter" else max(height, width)
        return np.float32(size[0]) / edge
    scales = np.float32(size[0]) / height, np.float32(size[1]) / width
    return max(scales) if resize == "crop" else min(scales)


def _times(edge: int, scale: np.float32) -> int:
    return max(1, floor(np.float32(edge) * scale + np.float32(0.5)))


def _half(pixels: int) -> int:
    # Rounded away from zero, as DALI does.
    return (pixels + 1) // 2 if pixels >= 0 else -((1 - pixels) // 2)


# Bytes that are resized at once: a limit, since the library copies its input.
_BAND_BYTES = 2**23

_BILINEAR = ResizeAlg.convolution(FilterType.bilinear)
_CUBIC = ResizeAlg.convolution(FilterType.catmull_rom)

_PIXEL_TYPES: Final = {
    1: PixelType.U8,
    2: PixelType.U8x2,
    3: PixelType.U8x3,
    4: PixelType.U8x4,
}

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
    size, resize
        As in `DecodeSpec`.
    extent
        Extent of the image in the array, if it was decoded at a reduced scale.
    full : (int, int)
        Its height and width in a full decode, if it was decoded at a reduced scale.
    nearest
        Take the nearest pixel rather than a mean; then values may be of any type.
    mirrored
        Mirror the result left to right.
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
        mirrored: bool = False,
    ) -> None:
        self._image = np.asarray(image)
        height, width, channels = self._image.shape
        self._extent = extent or Extent(0, 0, height, width)
        full = full or (height, width)
        self._geometry = resize_geometry(full[0], full[1], size, resize)
        self._nearest = nearest
        self._mirrored = mirrored
        self.shape = (*self._geometry.shape, channels)

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
        if self._nearest:
            _copy(_nearest(self._image, whole, crop_start, target.shape), target)
        else:
            _resize(self._image, self._extent, whole, crop_start, target)
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
    _run(pixels, flat, CropBox(0, 0, width, height), _CUBIC)
    _run(flat, result, CropBox(0, 0, width, shape[0]), _CUBIC)
    return np.frombuffer(result.get_buffer(), np.uint8).reshape(*shape, channels)


class _Span(NamedTuple):
    """Source pixels, along one axis, of a part of the resized image."""

    first: int  # first source pixel under the filter
    stop: int  # one past the last
    start: float  # where the part begins, relative to ``first``
    length: float  # length of the part in source pixels


def _resize(
    image: np.ndarray,
    extent: Extent,
    whole: tuple[int, int],
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
    whole
        Height and width of the whole resized image.
    """
    height, width, channels = image.shape
    rows, columns = out.shape[:2]
    if (height, width) == whole and extent == Extent(0, 0, height, width):
        _copy(image[start[0] : start[0] + rows, start[1] : start[1] + columns], out)
        return
    if channels not in _PIXEL_TYPES:  # more than four: the output of a transform
        for one in range(channels):
            _resize(image[..., one : one + 1], extent, whole, start, out[..., one : one + 1])
        return
    across = _span(width, extent.left, extent.width / whole[1], start[1], columns)
    pixels_per_row = max((across.stop - across.first) * height / whole[0], columns)
    band = min(rows, max(1, int(_BAND_BYTES / (pixels_per_row * channels))))
    for row in range(0, rows, band):
        count = min(band, rows - row)
        down = _span(height, extent.top, extent.height / whole[0], start[0] + row, count)
        source = image[down.first : down.stop, across.first : across.stop]
        part = out[row : row + band]
        vertical_first = _vertical_first(image.shape, whole)
        _copy(_resized(source, down, across, part.shape, vertical_first), part)


def _vertical_first(shape: tuple[int, ...], whole: tuple[int, int]) -> bool:
    """True if the vertical pass comes first, as in the library, or if there is only one pass.

    The order is Pillow's. It matters, since each pass rounds: one value in six differs by 1.
    """
    shrunk = shape[0] - whole[0], shape[1] - whole[1]
    return 0 in shrunk or (shrunk[0] > 0 and shrunk[0] > 2 * shrunk[1])


def _resized(
    source: np.ndarray, down: _Span, across: _Span, shape: tuple[int, ...], vertical_first: bool
) -> np.ndarray:
    """Resize the spanned part of ``source`` to ``shape``."""
    height, width, channels = source.shape
    pixel_type = _PIXEL_TYPES[channels]
    # tobytes() of a part that is not contiguous would copy pixel by pixel.
    pixels = ImageData(width, height, pixel_type, np.ascontiguousarray(source).tobytes())
    result = ImageData(shape[1], shape[0], pixel_type)
    if vertical_first:
        _run(pixels, result, CropBox(across.start, down.start, across.length, down.length))
    else:
        narrowed = ImageData(shape[1], height, pixel_type)
        _run(pixels, narrowed, CropBox(across.start, 0, across.length, height))
        _run(narrowed, result, CropBox(0, down.start, shape[1], down.length))
    return np.frombuffer(result.get_buffer(), np.uint8).reshape(shape)


def _run(source: ImageData, out: ImageData, box: CropBox, algorithm: ResizeAlg = _BILINEAR) -> None:
    # One per thread: a resizer has a lock and its own buffers.
    resizer = getattr(_thread, "resizer", None)
    if resizer is None:
        resizer = _thread.resizer = Resizer()
    resizer.resize(source, out, ResizeOptions(algorithm, use_alpha=False, crop_box=box))


def _span(length: int, origin: float, scale: float, start: int, count: int) -> _Span:
    """Source pixels, of ``length``, for ``count`` resized pixels from ``start`` on.

    Resized pixel 0 begins at ``origin``, and each covers ``scale`` source pixels.
    """
    radius = max(scale, 1)
    first = max(0, floor(origin + (start + 0.5) * scale - radius))
    stop = min(length, ceil(origin + (start + count - 0.5) * scale + radius))
    begin = max(0.0, origin + start * scale - first)
    return _Span(first, stop, begin, min(count * scale, stop - first - begin))
