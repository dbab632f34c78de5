"""PDQ, the perceptual hash of ThreatExchange, on NumPy and CuPy arrays alike.

Written after the published algorithm (Facebook, "The TMK+PDQF Video-Hashing Algorithm and the PDQ
Image-Hashing Algorithm", 2019). Its two passes of box filters and the choice of 64 × 64 pixels are
linear and separable: here they are one filter for each axis.

The reference's program brings a file of more pixels to 512 × 512 and takes a smaller one as it is.
Here every picture is brought to 512 × 512 by the same filter: by means of areas, or bilinearly
where it is smaller. So a picture and the same at half or twice the size have nearly one hash.
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

# An image that is mirrored or turned, by the names of Pillow's Transpose, rotations being
# counter-clockwise: whether rows are reversed, then columns, and then both axes swapped.
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
        Names of ``VARIANTS``, whose hashes are wanted too.

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
        # The places are not symmetric: signs of frequencies alone would be bits apart.
        *backwards, swapped = VARIANTS[name]
        turned = xp.concatenate([_reduced(images, backwards, xp) for images in groups])
        hashes.append(_hash(xp.swapaxes(turned, 1, 2) if swapped else turned, xp))
    return hashes, _quality(small, xp)


def _reduced(images: Any, backwards: Sequence[bool], xp: Any) -> Any:
    """Luma (n, 64, 64) of images of one shape, of which rows or columns run backwards."""
    taps = (_sampled_boxes(length, xp) for length in images.shape[1:3])
    rows, columns = (
        each.reverse(length) if reverse else each
        for each, length, reverse in zip(taps, images.shape[1:3], backwards, strict=True)
    )
    return reduced_luma(images, rows, columns, xp)


def _hash(small: Any, xp: Any) -> Any:
    """One bit for each of the 256 lowest frequencies, but the mean: above their median."""
    transform = _cosines(xp)
    flat = (transform @ small @ transform.T).reshape(len(small), -1)
    # The reference's median of 256 values is the lower of the two in the middle.
    median = xp.partition(flat, 127, axis=1)[:, 127:128]
    bits = (flat > median)[:, ::-1]
    return xp.packbits(bits.reshape(-1)).reshape(len(flat), 32)  # CuPy packs along no axis


def _quality(small: Any, xp: Any) -> Any:
    """Sum of the gradients, in whole hundredths of the range, of which 9,000 are 100."""
    gradients = sum(
        xp.abs(xp.trunc(xp.diff(small, axis=axis) * (100 / 255))).sum(axis=(1, 2))
        for axis in (1, 2)
    )
    return xp.minimum(gradients // 90, 100).astype(xp.uint8)


@functools.lru_cache(maxsize=1)
def _cosines(xp: Any) -> Any:
    """(16, 64): the DCT-II without its constant term."""
    frequency = np.arange(1, _FREQUENCIES + 1)[:, None]
    place = 2 * np.arange(_SIDE) + 1
    return xp.asarray(np.sqrt(2 / _SIDE) * np.cos(np.pi / 2 / _SIDE * frequency * place), "f4")


@functools.lru_cache(maxsize=1024)
def _sampled_boxes(length: int, xp: Any) -> Taps:
    """Two box filters one after the other, at 64 places along an axis that is brought to 512."""
    weights = np.zeros((_LENGTH, _SIDE))
    places = ((np.arange(_SIDE) + 0.5) * _LENGTH / _SIDE).astype(int)
    weights[places, np.arange(_SIDE)] = 1
    for _ in range(2):
        weights = _spread(weights, _LENGTH // (2 * _SIDE))
    weights = weights.T @ (area_weights if length > _LENGTH else _bilinear)(length, _LENGTH)
    return make_taps(np.where(weights > 1e-9, weights, 0), xp)  # differences of sums


def _bilinear(length: int, longer: int) -> np.ndarray:
    """Weights of an enlargement: (longer, length)."""
    place = (np.arange(longer) + 0.5) * (length / longer) - 0.5
    first = np.floor(place).astype(int)
    weights = np.zeros((longer, length))
    for pixel, share in ((first, 1 - (place - first)), (first + 1, place - first)):
        np.add.at(weights, (np.arange(longer), pixel.clip(0, length - 1)), share)
    return weights


def _spread(weights: np.ndarray, window: int) -> np.ndarray:
    """Weights (length, 64) of a box filter's results, as weights of what it is applied to."""
    pixels = np.arange(len(weights))
    stop = pixels + (window + 2) // 2
    start = np.maximum(stop - window, 0)
    stop = np.minimum(stop, len(weights))
    share = weights / (stop - start)[:, None]
    total = np.concatenate([np.zeros((1, _SIDE)), share.cumsum(axis=0)])
    # The results that a pixel has a part in lie side by side.
    first = np.searchsorted(stop, pixels, "right")
    last = np.searchsorted(start, pixels, "right")
    return total[last] - total[first]
