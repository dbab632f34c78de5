"""Signals of image quality that need no model, on NumPy and CuPy arrays alike."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from dask_image_ingest.curate.luma import area_taps, reduced_luma

__all__ = ["PIXEL_SIGNALS", "pixel_signals"]

PIXEL_SIGNALS = ("dark", "light", "blur", "entropy", "contrast", "grayscale")

# Of the longer side: a regular sample this large gives each histogram to about a percent.
_SAMPLED_SIDE = 128

# As cleanvision has it: edges are looked for in a picture of this size.
_BLUR_SIDE = 64

# Brightness as people see it, by Darel Rex Finley (the HSP colour model, 2006).
_BRIGHTNESS = (0.241, 0.691, 0.068)

# cleanvision: 1 - exp(-0.01 x), and what it leaves out of the histogram's share.
_SCALE = 0.01
_LEAST_SPREAD = 0.18


def pixel_signals(images: Any, xp: Any) -> dict[str, Any]:
    """Each of ``PIXEL_SIGNALS`` for images of one shape, float32 (n,).

    Parameters
    ----------
    images
        uint8 (n, height, width, channels), of 1 or 3 channels.
    xp
        NumPy or CuPy.
    """
    count, height, width, channels = images.shape
    step = -(-max(height, width) // _SAMPLED_SIDE)
    sample = images[:, ::step, ::step].reshape(count, -1, channels)
    brightness = _histograms(_brightness(sample, xp), xp)
    bands = _histograms(xp.moveaxis(sample, 2, 1).reshape(count * channels, -1), xp)
    spread = _histograms(_spread(sample, xp), xp)
    signals = {
        "dark": _percentile(brightness, 99, xp),
        "light": 1 - _percentile(brightness, 5, xp),
        "blur": _sharpness(images, xp),
        "entropy": _entropy(bands, xp).reshape(count, channels).mean(axis=1) + np.log2(channels),
        "contrast": _deviation(brightness, xp),
        "grayscale": 1 - _percentile(spread, 99, xp),
    }
    return {name: values.astype(xp.float32) for name, values in signals.items()}


def _brightness(sample: Any, xp: Any) -> Any:
    if sample.shape[2] == 1:
        return sample[..., 0]
    squares = sum(
        xp.square(sample[..., band].astype(xp.float32)) * xp.float32(weight)
        for band, weight in enumerate(_BRIGHTNESS)
    )
    return (xp.sqrt(squares) + 0.5).astype(xp.uint8)


def _spread(sample: Any, xp: Any) -> Any:
    """Largest less smallest channel of each pixel."""
    channels = [sample[..., channel] for channel in range(sample.shape[2])]
    # Over an axis of three, NumPy's max takes 15 times as long.
    return functools.reduce(xp.maximum, channels) - functools.reduce(xp.minimum, channels)


def _histograms(values: Any, xp: Any) -> Any:
    """How many of each row's values, uint8 (n, m), are at each level: (n, 256)."""
    count = len(values)
    # One call for all rows: on a GPU each waits for the device.
    levels = values + 256 * xp.arange(count)[:, None]
    return xp.bincount(levels.reshape(-1), minlength=256 * count).reshape(count, 256)


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


def _sharpness(images: Any, xp: Any) -> Any:
    """Score of blur as in cleanvision: low where few edges stand out and the histogram is even."""
    _, height, width, _ = images.shape
    ratio = max(height, width, _BLUR_SIDE) / _BLUR_SIDE
    rows = area_taps(height, max(int(height / ratio), 1), xp)
    columns = area_taps(width, max(int(width / ratio), 1), xp)
    gray = reduced_luma(images, rows, columns, xp)
    gray = (gray + 0.5).astype(xp.uint8)
    counts = _histograms(gray.reshape(len(gray), -1), xp)
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
