"""PDQ, the perceptual hash of ThreatExchange, on NumPy and CuPy arrays alike.

Follows the published algorithm (Facebook, "The TMK+PDQF Video-Hashing Algorithm and the PDQ
Image-Hashing Algorithm", 2019). Its two box-filter passes and the subsampling to 64 × 64 pixels are
linear and separable: here they are one filter for each axis.

The reference implementation shrinks larger images to 512 × 512, but does not enlarge smaller ones.
Here every image is resized to 512 × 512, by area means or bilinearly. So an image and its copy at
half or twice the size have nearly the same hash.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_image_ingest.curate.pixels.luma import Taps, area_weights, make_taps, reduced_luma

_SIDE = 64
_LENGTH = 512
_FREQUENCIES = 16

# Names as in Pillow's Transpose, rotations counter-clockwise. Each: reverse rows, reverse columns,
# then swap both axes.
VARIANTS = {
    "mirrored": (False, True, False),
    "flipped": (True, False, False),
    "rotated180": (True, True, False),
    "transposed": (False, False, True),
    "rotated90": (False, True, True),
    "rotated270": (True, False, True),
    "transversed": (True, True, True),
}


def pdq(groups: Sequence[Any], xp: Any, variants: tuple[str, ...] = ()) -> tuple[list[Any], Any]:
    """Hashes of images, and their quality.

    Parameters
    ----------
    groups
        Images of one shape each, uint8 (n, height, width, channels), of 1 or 3 channels.
    xp
        NumPy or CuPy.
    variants
        Names of ``VARIANTS`` to hash, too.

    Returns
    -------
    hashes : list of array, shape (n, 32), uint8
        Of the images, then of each variant: the bytes of the 64 hexadecimal digits.
    quality : array, shape (n,), uint8
        0 to 100, by the gradients of the 64 × 64 pixels.
    """
    small = xp.concatenate([_reduced(images, (False, False), xp) for images in groups])
    hashes = [_hash(small, xp)]
    for name in variants:
        # Reduce again: the subsampling is not symmetric, so that flipping signs of the frequencies,
        # as the reference does, would be some bits off.
        *reverse, swap = VARIANTS[name]
        turned = xp.concatenate([_reduced(images, reverse, xp) for images in groups])
        hashes.append(_hash(xp.swapaxes(turned, 1, 2) if swap else turned, xp))
    return hashes, _quality(small, xp)


def _reduced(images: Any, reverse: Sequence[bool], xp: Any) -> Any:
    """Luma (n, 64, 64) of images of one shape, with rows or columns reversed."""
    filters = []
    for length, is_reversed in zip(images.shape[1:3], reverse, strict=True):
        taps = _subsampled_boxes(length, xp)
        filters.append(taps.reverse(length) if is_reversed else taps)
    rows, columns = filters
    return reduced_luma(images, rows, columns, xp)


def _hash(small: Any, xp: Any) -> Any:
    """Hash (n, 32): whether each of the 256 lowest frequencies, but DC, exceeds their median."""
    transform = _cosines(xp)
    flat = (transform @ small @ transform.T).reshape(len(small), -1)
    # The reference's median of 256 values is the lower of the two in the middle.
    median = xp.partition(flat, 127, axis=1)[:, 127:128]
    bits = (flat > median)[:, ::-1]
    return xp.packbits(bits.reshape(-1)).reshape(len(flat), 32)  # CuPy's packbits has no axis=


def _quality(small: Any, xp: Any) -> Any:
    """Quality, 0 to 100: the sum of absolute gradients, in whole percents of the range, over 90."""
    gradients = sum(
        xp.abs(xp.trunc(xp.diff(small, axis=axis) * (100 / 255))).sum(axis=(1, 2))
        for axis in (1, 2)
    )
    return xp.minimum(gradients // 90, 100).astype(xp.uint8)


@functools.lru_cache(maxsize=1)
def _cosines(xp: Any) -> Any:
    """Lowest frequencies of the DCT-II, without the constant term: (16, 64)."""
    frequency = np.arange(1, _FREQUENCIES + 1)[:, None]
    position = 2 * np.arange(_SIDE) + 1
    return xp.asarray(np.sqrt(2 / _SIDE) * np.cos(np.pi / 2 / _SIDE * frequency * position), "f4")


@functools.lru_cache(maxsize=1024)
def _subsampled_boxes(length: int, xp: Any) -> Taps:
    """Resize an axis to 512, filter it by a box twice, and take 64 of the pixels: one filter."""
    weights = np.zeros((_LENGTH, _SIDE))
    sampled = ((np.arange(_SIDE) + 0.5) * _LENGTH / _SIDE).astype(int)
    weights[sampled, np.arange(_SIDE)] = 1
    for _ in range(2):
        weights = _spread(weights, _LENGTH // (2 * _SIDE))
    weights = weights.T @ (area_weights if length > _LENGTH else _bilinear)(length, _LENGTH)
    # Rounding of the cumulative sums leaves tiny weights where there should be zeros.
    return make_taps(np.where(weights > 1e-9, weights, 0), xp)


def _bilinear(length: int, longer: int) -> np.ndarray:
    """Bilinear enlargement as a matrix (longer, length)."""
    position = (np.arange(longer) + 0.5) * (length / longer) - 0.5
    first = np.floor(position).astype(int)
    weights = np.zeros((longer, length))
    for pixel, share in ((first, 1 - (position - first)), (first + 1, position - first)):
        np.add.at(weights, (np.arange(longer), pixel.clip(0, length - 1)), share)
    return weights


def _spread(weights: np.ndarray, window: int) -> np.ndarray:
    """Transpose of a box filter: weights (length, 64) of its results → weights of its inputs."""
    pixels = np.arange(len(weights))
    stop = pixels + (window + 2) // 2
    start = np.maximum(stop - window, 0)
    stop = np.minimum(stop, len(weights))
    share = weights / (stop - start)[:, None]
    total = np.concatenate([np.zeros((1, _SIDE)), share.cumsum(axis=0)])
    # The results that a pixel contributes to are consecutive.
    first = np.searchsorted(stop, pixels, "right")
    last = np.searchsorted(start, pixels, "right")
    return total[last] - total[first]
