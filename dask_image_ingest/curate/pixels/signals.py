"""Signals of image quality that need no model, on NumPy and CuPy arrays alike."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_image_ingest.curate.pixels.luma import area_taps, reduced_luma

PIXEL_SIGNALS = ("dark", "light", "blur", "entropy", "contrast", "grayscale")

# Longer side of the regular grid of pixels for histograms, which are then exact to about a percent.
_SAMPLED_SIDE = 128

# Longer side of the thumbnails in which edges are measured, as in cleanvision.
_BLUR_SIDE = 64

# Pixels along each axis that a thumbnail's pixel is the mean of: with nine in all it is 0.004 off.
_BLUR_SAMPLES = 3

# Weights of perceived brightness (Darel Rex Finley's HSP colour model, 2006).
_BRIGHTNESS = (0.241, 0.691, 0.068)

# cleanvision's scores are 1 - exp(-0.01 x); that of the histogram counts only above 0.18.
_SCALE = 0.01
_MIN_SPREAD = 0.18


def pixel_signals(groups: Sequence[Any], xp: Any) -> dict[str, Any]:
    """Compute each of ``PIXEL_SIGNALS``, float32 (n,).

    Parameters
    ----------
    groups
        Images of one shape each, uint8 (n, height, width, channels), all of 1 or all of 3 channels.
    xp
        NumPy or CuPy.
    """
    # All images are computed in one array of pixels, with the number of each pixel's image: array
    # calls for each image would take longer than their work.
    count, channels = sum(map(len, groups)), groups[0].shape[3]
    samples = [
        _subsample(images, -(-max(images.shape[1:3]) // _SAMPLED_SIDE), xp) for images in groups
    ]
    pixels = xp.concatenate([sample.reshape(-1, channels) for sample in samples])
    image_numbers = np.repeat(
        np.arange(count),
        np.repeat([sample.shape[1] * sample.shape[2] for sample in samples], [*map(len, samples)]),
    )
    offsets = xp.asarray(image_numbers * 256)
    bands = [pixels[:, channel] for channel in range(channels)]
    brightness = _histograms(_brightness(bands, xp), offsets, count, xp)
    spread = _histograms(_spread(bands, xp), offsets, count, xp)
    entropies = [_entropy(_histograms(band, offsets, count, xp), xp) for band in bands]
    signals = {
        "dark": _percentile(brightness, 99, xp),
        "light": 1 - _percentile(brightness, 5, xp),
        "blur": _sharpness(groups, xp),
        "entropy": sum(entropies) / channels + np.log2(channels),
        "contrast": _deviation(brightness, xp),
        "grayscale": 1 - _percentile(spread, 99, xp),
    }
    return {name: values.astype(xp.float32) for name, values in signals.items()}


def _subsample(images: Any, step: int, xp: Any) -> Any:
    """Every ``step``-th row and column."""
    if xp is np and images.flags.c_contiguous:
        # View each pixel as one item: copying three channels one by one takes twice the time.
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
    """Largest minus smallest channel of each pixel."""
    # NumPy's max over an axis of three takes 15 times as long.
    return functools.reduce(xp.maximum, bands) - functools.reduce(xp.minimum, bands)


def _histograms(values: Any, offsets: Any, count: int, xp: Any) -> Any:
    """Histograms (count, 256) of uint8 values; ``offsets``: 256 times each value's image number."""
    return xp.bincount((values + offsets).reshape(-1), minlength=256 * count).reshape(count, 256)


def _percentile(counts: Any, percent: int, xp: Any) -> Any:
    """Percentile of each histogram, 0 to 1: the lowest level with ``percent`` at or below it."""
    below = xp.cumsum(counts, axis=1)
    return (below * 100 < percent * below[:, -1:]).sum(axis=1) / 255


def _entropy(counts: Any, xp: Any) -> Any:
    """Shannon entropy of each histogram, in bits."""
    share = counts / counts.sum(axis=1, keepdims=True)
    return -(share * xp.log2(xp.where(share > 0, share, 1))).sum(axis=1)


def _deviation(counts: Any, xp: Any) -> Any:
    """Standard deviation of the levels, 0 to 1, of each histogram."""
    share = counts / counts.sum(axis=1, keepdims=True)
    levels = xp.arange(256) / 255
    mean = share @ levels
    return xp.sqrt((share * (levels - mean[:, None]) ** 2).sum(axis=1))


def _sharpness(groups: Sequence[Any], xp: Any) -> Any:
    """Sharpness, cleanvision's score of blur: low if edges are weak and the histogram is even."""
    thumbnails = [_thumbnails(images, xp) for images in groups]
    # Images of one aspect ratio have thumbnails of one shape, which are computed together.
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for number, gray in enumerate(thumbnails):
        by_shape.setdefault(gray.shape[1:], []).append(number)
    scores: list[Any] = [None] * len(thumbnails)
    for numbers in by_shape.values():
        together = xp.concatenate([thumbnails[number] for number in numbers])
        ends = np.cumsum([len(thumbnails[number]) for number in numbers])
        parts = xp.split(_thumbnail_sharpness(together, xp), ends[:-1].tolist())
        for number, part in zip(numbers, parts, strict=True):
            scores[number] = part
    return xp.concatenate(scores)


def _thumbnails(images: Any, xp: Any) -> Any:
    """Luma of images of one shape at no more than 64 × 64, uint8 (n, height, width)."""
    images = _subsample(images, max(max(images.shape[1:3]) // (_BLUR_SIDE * _BLUR_SAMPLES), 1), xp)
    _, height, width, _ = images.shape
    ratio = max(height, width, _BLUR_SIDE) / _BLUR_SIDE
    rows = area_taps(height, max(int(height / ratio), 1), xp)
    columns = area_taps(width, max(int(width / ratio), 1), xp)
    return (reduced_luma(images, rows, columns, xp) + 0.5).astype(xp.uint8)


def _thumbnail_sharpness(gray: Any, xp: Any) -> Any:
    values = gray.reshape(len(gray), -1)
    offsets = xp.arange(len(gray))[:, None] * 256
    counts = _histograms(values, offsets, len(gray), xp)
    edges = 1 - xp.exp(-_SCALE * _edges(gray, xp).reshape(len(gray), -1).std(axis=1))
    spread = 1 - xp.exp(-_SCALE * counts.std(axis=1))
    return xp.minimum(edges + xp.where(spread > _MIN_SPREAD, spread, 0), 1)


def _edges(gray: Any, xp: Any) -> Any:
    """Pillow's ``FIND_EDGES``: 8 × pixel - its neighbours, 0 to 255; the border is unchanged."""
    edges = gray.astype(xp.float32)
    if min(gray.shape[1:]) < 3:
        return edges
    rows = edges[:, :-2] + edges[:, 1:-1] + edges[:, 2:]
    sums = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]  # 3 × 3, the pixel included: 9 × it
    edges[:, 1:-1, 1:-1] = xp.clip(9 * edges[:, 1:-1, 1:-1] - sums, 0, 255)
    return edges
