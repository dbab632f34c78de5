"""Signals of image quality that need no model, on NumPy and CuPy arrays alike."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_image_ingest.curate.pixels.luma import area_taps, reduced_luma

PIXEL_SIGNALS = ("dark", "light", "blur", "entropy", "contrast", "grayscale")

# Of the longer side: a regular sample this large gives each histogram to about a percent.
_SAMPLED_SIDE = 128

# As cleanvision has it: edges are looked for in a picture of this size.
_BLUR_SIDE = 64

# Along each axis, for each pixel of that picture: of nine in the area, the mean is 0.004 off.
_BLUR_SAMPLES = 3

# Brightness as people see it, by Darel Rex Finley (the HSP colour model, 2006).
_BRIGHTNESS = (0.241, 0.691, 0.068)

# cleanvision: 1 - exp(-0.01 x), and what it leaves out of the histogram's share.
_SCALE = 0.01
_LEAST_SPREAD = 0.18


def pixel_signals(groups: Sequence[Any], xp: Any) -> dict[str, Any]:
    """Each of ``PIXEL_SIGNALS`` for images, float32 (n,).

    Parameters
    ----------
    groups
        Images of one shape each, uint8 (n, height, width, channels), all of 1 or all of 3 channels.
    xp
        NumPy or CuPy.
    """
    # Pixels of all images in one array, with the number of each one's image: few calls for many.
    count, channels = sum(map(len, groups)), groups[0].shape[3]
    samples = [
        _sampled(images, -(-max(images.shape[1:3]) // _SAMPLED_SIDE), xp) for images in groups
    ]
    pixels = xp.concatenate([sample.reshape(-1, channels) for sample in samples])
    of = np.repeat(
        np.arange(count),
        np.repeat([sample.shape[1] * sample.shape[2] for sample in samples], [*map(len, samples)]),
    )
    first = xp.asarray(of * 256)
    bands = [pixels[:, channel] for channel in range(channels)]
    brightness = _histograms(_brightness(bands, xp), first, count, xp)
    spread = _histograms(_spread(bands, xp), first, count, xp)
    entropies = [_entropy(_histograms(band, first, count, xp), xp) for band in bands]
    signals = {
        "dark": _percentile(brightness, 99, xp),
        "light": 1 - _percentile(brightness, 5, xp),
        "blur": _sharpness(groups, xp),
        "entropy": sum(entropies) / channels + np.log2(channels),
        "contrast": _deviation(brightness, xp),
        "grayscale": 1 - _percentile(spread, 99, xp),
    }
    return {name: values.astype(xp.float32) for name, values in signals.items()}


def _sampled(images: Any, step: int, xp: Any) -> Any:
    """Every so many-th row and column."""
    if xp is np and images.flags.c_contiguous:
        # A pixel is one item: NumPy copies three channels one by one in twice the time.
        channels = images.shape[3]
        pixels = images.view(f"V{channels}")[:, ::step, ::step]
        return np.ascontiguousarray(pixels).view(np.uint8)
    return images[:, ::step, ::step]


def _brightness(bands: Sequence[Any], xp: Any) -> Any:
    if len(bands) == 1:
        return bands[0]
    squares = sum(
        xp.square(band.astype(xp.float32)) * xp.float32(weight)
        for band, weight in zip(bands, _BRIGHTNESS, strict=True)
    )
    return (xp.sqrt(squares) + 0.5).astype(xp.uint8)


def _spread(bands: Sequence[Any], xp: Any) -> Any:
    """Largest less smallest channel of each pixel."""
    # Over an axis of three, NumPy's max takes 15 times as long.
    return functools.reduce(xp.maximum, bands) - functools.reduce(xp.minimum, bands)


def _histograms(values: Any, first: Any, count: int, xp: Any) -> Any:
    """The histogram of each image's values, uint8: (count, 256).

    ``first`` is 256 times the number of each value's image.
    """
    return xp.bincount((values + first).reshape(-1), minlength=256 * count).reshape(count, 256)


def _percentile(counts: Any, percent: int, xp: Any) -> Any:
    """The lowest level, 0 to 1, that at least ``percent`` of the values don't exceed."""
    below = xp.cumsum(counts, axis=1)
    return (below * 100 < percent * below[:, -1:]).sum(axis=1) / 255


def _entropy(counts: Any, xp: Any) -> Any:
    """Bits of Shannon's entropy of each histogram."""
    share = counts / counts.sum(axis=1, keepdims=True)
    return -(share * xp.log2(xp.where(share > 0, share, 1))).sum(axis=1)


def _deviation(counts: Any, xp: Any) -> Any:
    """Standard deviation of the levels, 0 to 1, of each histogram."""
    share = counts / counts.sum(axis=1, keepdims=True)
    levels = xp.arange(256) / 255
    mean = share @ levels
    return xp.sqrt((share * (levels - mean[:, None]) ** 2).sum(axis=1))


def _sharpness(groups: Sequence[Any], xp: Any) -> Any:
    """Score of blur as in cleanvision: low where few edges stand out and the histogram is even."""
    small = [_small(images, xp) for images in groups]
    # Photographs of one aspect are of one shape by now.
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, gray in enumerate(small):
        alike.setdefault(gray.shape[1:], []).append(number)
    scores: list[Any] = [None] * len(small)
    for numbers in alike.values():
        made = _sharpness_of_small(xp.concatenate([small[number] for number in numbers]), xp)
        ends = np.cumsum([len(small[number]) for number in numbers])
        for number, score in zip(numbers, xp.split(made, ends[:-1].tolist()), strict=True):
            scores[number] = score
    return xp.concatenate(scores)


def _small(images: Any, xp: Any) -> Any:
    """Luma of images of one shape at no more than 64 × 64, uint8 (n, height, width)."""
    images = _sampled(images, max(max(images.shape[1:3]) // (_BLUR_SIDE * _BLUR_SAMPLES), 1), xp)
    _, height, width, _ = images.shape
    ratio = max(height, width, _BLUR_SIDE) / _BLUR_SIDE
    rows = area_taps(height, max(int(height / ratio), 1), xp)
    columns = area_taps(width, max(int(width / ratio), 1), xp)
    return (reduced_luma(images, rows, columns, xp) + 0.5).astype(xp.uint8)


def _sharpness_of_small(gray: Any, xp: Any) -> Any:
    values = gray.reshape(len(gray), -1)
    first = xp.arange(len(gray))[:, None] * 256
    counts = _histograms(values, first, len(gray), xp)
    edges = 1 - xp.exp(-_SCALE * _edges(gray, xp).reshape(len(gray), -1).std(axis=1))
    spread = 1 - xp.exp(-_SCALE * counts.std(axis=1))
    return xp.minimum(edges + xp.where(spread > _LEAST_SPREAD, spread, 0), 1)


def _edges(gray: Any, xp: Any) -> Any:
    """Pillow's ``FIND_EDGES``: 8 times each pixel less its neighbours, 0 to 255; borders as is."""
    edges = gray.astype(xp.float32)
    if min(gray.shape[1:]) < 3:
        return edges
    rows = edges[:, :-2] + edges[:, 1:-1] + edges[:, 2:]
    around = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
    edges[:, 1:-1, 1:-1] = xp.clip(9 * edges[:, 1:-1, 1:-1] - around, 0, 255)
    return edges
