"""Luma, reduced to a few pixels, on NumPy and CuPy arrays alike."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

# ITU-R BT.601, as in JPEG, Pillow's mode L and PDQ.
_WEIGHTS = (0.299, 0.587, 0.114)

# The same in whole 256ths, by which pixels have one luma whatever they are computed with.
_WHOLE_WEIGHTS = (77, 150, 29)


def luma(pixels: Any, xp: Any) -> Any:
    """Luma of pixels uint8 (..., 1 or 3), rounded down: uint8 (...)."""
    if pixels.shape[-1] == 1:
        return pixels[..., 0]
    total = sum(
        pixels[..., channel].astype(xp.uint16) * xp.uint16(weight)
        for channel, weight in enumerate(_WHOLE_WEIGHTS)
    )
    return (total >> 8).astype(xp.uint8)


def histograms(values: Any, offsets: Any, count: int, xp: Any) -> Any:
    """Histograms (count, 256) of uint8 values; ``offsets``: 256 times each value's image number."""
    return xp.bincount((values + offsets).reshape(-1), minlength=256 * count).reshape(count, 256)


class Taps(NamedTuple):
    """A sparse linear filter along an axis: the old pixels that make each new one.

    A dense matrix product would mostly multiply zeros, on threads of BLAS that compete with those
    that decode.
    """

    pixels: Any  # (new, taps), int64
    weights: Any  # (new, taps), float32

    def reverse(self, length: int) -> Taps:
        """The same filter for the reversed axis, which has ``length`` pixels."""
        return Taps(length - 1 - self.pixels, self.weights)

    def reduce_rows(self, images: Any, xp: Any) -> Any:
        """Filter rows of images (n, height, width, channels), uint8 as they are."""
        return xp.clip(_filtered_rows(images, self) + 0.5, 0, 255).astype(xp.uint8)


def make_taps(matrix: np.ndarray, xp: Any) -> Taps:
    """The taps of a filter given as a matrix (new, old)."""
    is_used = matrix != 0
    start = is_used.argmax(axis=1)
    stop = matrix.shape[1] - is_used[:, ::-1].argmax(axis=1)
    pixels = start[:, None] + np.arange((stop - start).max())
    inside = pixels < matrix.shape[1]
    pixels = np.minimum(pixels, matrix.shape[1] - 1)
    weights = np.where(inside, np.take_along_axis(matrix, pixels, axis=1), 0)
    return Taps(xp.asarray(pixels), xp.asarray(weights, xp.float32))


def reduced_luma(images: Any, rows: Taps, columns: Taps, xp: Any) -> Any:
    """Luma of images, filtered along both axes: float32 (n, new rows, new columns), 0 to 255.

    Parameters
    ----------
    images
        uint8 (n, height, width, channels), of 1 or 3 channels.
    rows, columns
        The filters.
    xp
        NumPy or CuPy.
    """
    return reduced_columns(luma_of_reduced_rows(images, rows, xp), columns, xp)


def luma_of_reduced_rows(images: Any, rows: Taps, xp: Any) -> Any:
    """The first half of `reduced_luma`: float32 (n, new rows, width)."""
    # Rows first, on uint8 and with all channels at once: fewer pixels are converted to floats.
    reduced = _filtered_rows(images, rows)
    if images.shape[-1] == 1:
        return reduced[..., 0]
    return reduced @ xp.asarray(_WEIGHTS, xp.float32)


def reduced_columns(gray: Any, columns: Taps, xp: Any) -> Any:
    """The second half of `reduced_luma`: (n, rows, width) → (n, rows, new columns)."""
    return xp.swapaxes(_filtered(xp.swapaxes(gray, 1, 2), columns), 1, 2)


def _filtered_rows(images: Any, taps: Taps) -> Any:
    """Filter rows: uint8 (n, height, width, channels) → float32 (n, new, width, channels)."""
    count, height, width, channels = images.shape
    reduced = _filtered(images.reshape(count, height, width * channels), taps)
    return reduced.reshape(count, -1, width, channels)


def _filtered(values: Any, taps: Taps) -> Any:
    """Filter along axis 1: (n, old, length) → (n, new, length)."""
    result = values[:, taps.pixels[:, 0]] * taps.weights[:, :1]
    for tap in range(1, taps.pixels.shape[1]):
        result += values[:, taps.pixels[:, tap]] * taps.weights[:, tap : tap + 1]
    return result


@functools.lru_cache(maxsize=1024)
def area_taps(length: int, shorter: int, xp: Any) -> Taps:
    """Area-mean downsampling of an axis from ``length`` to ``shorter`` pixels."""
    return make_taps(area_weights(length, shorter), xp)


def area_weights(length: int, shorter: int) -> np.ndarray:
    """Area-mean downsampling as a matrix (shorter, length)."""
    edges = np.linspace(0, length, shorter + 1)
    pixels = np.arange(length)
    start = np.maximum(edges[:-1, None], pixels)
    stop = np.minimum(edges[1:, None], pixels + 1)
    weights: np.ndarray = np.maximum(stop - start, 0) * (shorter / length)
    return weights


@functools.lru_cache(maxsize=1024)
def cubic_taps(length: int, shorter: int, xp: Any) -> Taps:
    """Downsampling of an axis by Catmull-Rom splines, as Pillow's ``BICUBIC``."""
    scale = length / shorter
    centers = (np.arange(shorter)[:, None] + 0.5) * scale
    x = np.abs((np.arange(length) + 0.5 - centers) / scale)
    near, far = (1.5 * x - 2.5) * x**2 + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = np.where(x < 1, near, np.where(x < 2, far, 0))
    return make_taps(weights / weights.sum(axis=1, keepdims=True), xp)
