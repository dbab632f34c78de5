"""How large an image becomes, and which part of it is kept."""

from __future__ import annotations

from math import floor
from typing import NamedTuple

import numpy as np

__all__ = ["Fit", "fit"]


class Fit(NamedTuple):
    """How an image is brought to the size that was asked for.

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


def fit(height: int, width: int, size: tuple[int, ...], resize: str) -> Fit:
    """Fit an image of this height and width, to the pixel as DALI does on a GPU.

    ``size`` and ``resize`` are those of a `Decoding`.
    """
    if resize == "stretch":
        return Fit((size[0], size[1]), (size[0], size[1]), (0, 0))
    # In DALI's own precision, or the last pixel would be another one time in 10,000.
    scale = _scale(np.float32(height), np.float32(width), size, resize)
    whole = _times(height, scale), _times(width, scale)
    if resize in ("shorter", "longer"):
        return Fit(whole, whole, (0, 0))
    before = [_half(have - want) for have, want in zip(whole, size, strict=True)]
    return Fit(whole, (size[0], size[1]), (before[0], before[1]))


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
