"""Signals of sharpness and detail: ``blur``, ``sharpness`` and ``detail`` of ``measure_quality``.

In: groups of images of one shape each. Out: a number for each image, from NumPy and CuPy alike.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_image_ingest.curate.luma import (
    Taps,
    area_taps,
    cubic_taps,
    histograms,
    luma,
    reduced_luma,
)
from dask_image_ingest.decode import resized_cubic

# The golden ratio, and its counterpart in two dimensions: multiples of their inverses, modulo 1,
# fill a line and a square evenly, and have no period.
_GOLDEN = (5**0.5 - 1) / 2
_PLASTIC = 1.324717957244746

# Longer side of the thumbnails in which blur is measured, as in cleanvision.
_BLUR_SIDE = 64

# cleanvision's scores are 1 - exp(-0.01 x); that of the histogram counts only above 0.18.
_BLUR_SCALE = 0.01
_MIN_SPREAD = 0.18

# Longer side at which sharpness is measured; smaller images are not enlarged.
_SHARPNESS_SIDE = 512

# Bands of rows in which sharpness is measured.
_BANDS = 8
_BAND = 8

# Side of a block of JPEG. Detail looks at this many strips of neighbouring blocks: alone, each row
# of a block would be one more access to far memory.
_BLOCK = 8
_STRIPS = 64
_STRIP = 4

# Differences of a hard edge and of any edge, in levels. If there are fewer soft edges for each hard
# one, an image is a drawing, a chart or a page of text.
_EDGES = (48, 2)
_MOST_SOFT = 5

# A frequency of a block counts as present beyond so many levels.
_PRESENT = 2

# Scale of roots and cosines, which are rounded to integers: sums are exact in float64 in any order,
# so that one image has one result in any batch.
_SCALE = 2**10


def blur(groups: Sequence[Any], xp: Any) -> Any:
    """Score of blur as in cleanvision: low if edges are weak and the histogram is even."""
    thumbnails = [_thumbnails(images, xp) for images in groups]
    # Images of one aspect ratio have thumbnails of one shape, which are computed together.
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for number, gray in enumerate(thumbnails):
        by_shape.setdefault(gray.shape[1:], []).append(number)
    scores: list[Any] = [None] * len(thumbnails)
    for numbers in by_shape.values():
        together = xp.concatenate([thumbnails[number] for number in numbers])
        ends = np.cumsum([len(thumbnails[number]) for number in numbers])
        parts = xp.split(_blur_of_thumbnails(together, xp), ends[:-1].tolist())
        for number, part in zip(numbers, parts, strict=True):
            scores[number] = part
    return xp.concatenate(scores)


def _thumbnails(images: Any, xp: Any) -> Any:
    """Luma of images of one shape at no more than 64 × 64, uint8 (n, height, width)."""
    _, height, width, _ = images.shape
    ratio = max(height, width, _BLUR_SIDE) / _BLUR_SIDE
    shape = max(int(height / ratio), 1), max(int(width / ratio), 1)
    if xp is np:
        return luma(np.stack([resized_cubic(image, shape) for image in images]), np)
    narrow = cubic_taps(height, shape[0], xp).reduce_rows(images, xp)
    small = cubic_taps(width, shape[1], xp).reduce_rows(xp.swapaxes(narrow, 1, 2), xp)
    return luma(xp.swapaxes(small, 1, 2), xp)


def _blur_of_thumbnails(gray: Any, xp: Any) -> Any:
    count = len(gray)
    counts = histograms(gray.reshape(count, -1), xp.arange(count)[:, None] * 256, count, xp)
    edges = 1 - xp.exp(-_BLUR_SCALE * _edges(gray, xp).reshape(count, -1).std(axis=1))
    spread = 1 - xp.exp(-_BLUR_SCALE * counts.std(axis=1))
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


def sharpness(groups: Sequence[Any], xp: Any) -> Any:
    """Variance of the Laplacian of the luma at no more than 512 × 512: float32 (n,).

    It is measured in bands of adjacent rows.
    """
    return xp.concatenate([_laplacian_variance(images, xp) for images in groups])


def _laplacian_variance(images: Any, xp: Any) -> Any:
    _, height, width, _ = images.shape
    ratio = max(height, width, _SHARPNESS_SIDE) / _SHARPNESS_SIDE
    rows = max(int(height / ratio), 1)
    if min(rows, int(width / ratio)) < 3:
        return xp.zeros(len(images), xp.float32)
    banded, inner = _banded_taps(height, rows, xp)
    gray = reduced_luma(images, banded, area_taps(width, int(width / ratio), xp), xp)
    middle = gray[:, 1:-1, 1:-1]
    edges = 4 * middle - gray[:, :-2, 1:-1] - gray[:, 2:, 1:-1]
    edges = edges - gray[:, 1:-1, :-2] - gray[:, 1:-1, 2:]
    return edges[:, inner].reshape(len(images), -1).var(axis=1, dtype=xp.float64)


@functools.lru_cache(maxsize=1024)
def _banded_taps(height: int, rows: int, xp: Any) -> tuple[Taps, Any]:
    """Area means for bands of the ``rows``, and which of their inner rows have both neighbours."""
    taps = area_taps(height, rows, xp)
    if rows <= _BANDS * _BAND:
        return taps, xp.arange(rows - 2)
    number = np.arange(_BANDS)
    start = ((number + number * _GOLDEN % 1) / _BANDS * (rows - _BAND + 1)).astype(int)
    chosen = np.unique(start[:, None] + np.arange(_BAND))
    inner = np.flatnonzero(chosen[2:] - chosen[:-2] == 2)
    chosen = xp.asarray(chosen)
    return Taps(taps.pixels[chosen], taps.weights[chosen]), xp.asarray(inner)


def detail(groups: Sequence[Any], xp: Any) -> Any:
    """Detail of each pixel: (g + 0.01) (s + 0.001)^0.1, float64 (n,); 0 for graphics.

    g is the square of the mean of √(|d| - 1), d the difference in levels of two neighbouring pixels
    (0 for |d| < 1); s is the share of frequencies beyond 2 levels; both of the luma, in blocks of 8
    × 8 pixels as JPEG has them. The root counts faint texture, which an encoder drops first, and
    makes an enlarged image have g as much smaller as it has more pixels a side, or less. Graphics
    are images with many hard edges among few soft ones, such as pages of text: an encoder adds to
    their faint gradients.
    """
    return xp.concatenate([_detail(images, xp) for images in groups])


def _detail(images: Any, xp: Any) -> Any:
    blocks = luma(_blocks(images, xp), xp)
    count = len(blocks)
    blocks = blocks.reshape(count, _BLOCK, -1, _BLOCK)  # (n, row, block, column)
    steps = xp.concatenate(
        [
            (xp.maximum(before, after) - xp.minimum(before, after)).reshape(count, -1)
            for before, after in (
                (blocks[..., :-1], blocks[..., 1:]),
                (blocks[:, :-1], blocks[:, 1:]),
            )
        ],
        axis=1,
    )
    counts = histograms(steps, xp.arange(count)[:, None] * 256, count, xp)
    change = (counts @ _roots(xp) / (steps.shape[1] * _SCALE)) ** 2
    hard, soft = (counts[:, least:].sum(axis=1) for least in _EDGES)
    present = xp.stack([_is_present(image, xp).reshape(-1) for image in blocks])
    share = present.mean(axis=1, dtype=xp.float64)
    return xp.where(hard * _MOST_SOFT > soft, 0, (change + 0.01) * (share + 0.001) ** 0.1)


def _is_present(blocks: Any, xp: Any) -> Any:
    """Frequencies of blocks (8, blocks, 8), but the mean, that are beyond the limit."""
    cosines = _cosines(xp)
    # A product for each image, and of few rows: a large one would start the threads of BLAS.
    across = blocks.reshape(-1, _BLOCK).astype(xp.float64) @ cosines
    down = cosines.T @ across.reshape(_BLOCK, -1)
    is_present = (xp.abs(down) > _PRESENT * _SCALE**2).reshape(_BLOCK, -1, _BLOCK)
    is_present[0, :, 0] = False
    return is_present


def _blocks(images: Any, xp: Any) -> Any:
    """Some blocks of images of one shape, spread evenly: uint8 (n, 8, blocks × 8, channels)."""
    count, height, width, channels = images.shape
    strip = _BLOCK * max(min(width // _BLOCK, _STRIP), 1)
    if width < _BLOCK:
        images = images[:, :, xp.asarray(np.minimum(np.arange(_BLOCK), width - 1))]
    rows, left = _strip_places(height, width // strip)
    strips = images[:, :, : images.shape[2] // strip * strip]
    strips = strips.reshape(count, height, -1, strip, channels)
    taken = strips[:, xp.asarray(rows), xp.asarray(left)]
    return taken.reshape(count, _BLOCK, -1, channels)


@functools.lru_cache(maxsize=1024)
def _strip_places(height: int, across: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of each strip, (8, strips), and its number from the left, (strips,)."""
    down, across = max(height // _BLOCK, 1), max(across, 1)
    if down * across <= _STRIPS:
        top, left = np.divmod(np.arange(down * across), across)
    else:
        number = np.arange(_STRIPS)
        top = ((0.5 + number / _PLASTIC) % 1 * down).astype(int)
        left = ((0.5 + number / _PLASTIC**2) % 1 * across).astype(int)
    # An image of fewer than 8 rows repeats its last.
    rows = np.minimum(top * _BLOCK + np.arange(_BLOCK)[:, None], height - 1)
    return rows, left


@functools.lru_cache(maxsize=1)
def _roots(xp: Any) -> Any:
    """√(d - 1), times `_SCALE`, as integers, of each difference d of uint8 values."""
    return xp.asarray(np.round(np.sqrt(np.maximum(np.arange(256) - 1, 0)) * _SCALE), xp.int64)


@functools.lru_cache(maxsize=1)
def _cosines(xp: Any) -> Any:
    """The DCT-II of 8 pixels, times `_SCALE`, as integers: (pixel, frequency)."""
    frequency = np.arange(_BLOCK)[None]
    position = 2 * np.arange(_BLOCK)[:, None] + 1
    cosines = np.cos(np.pi / (2 * _BLOCK) * frequency * position) * np.sqrt(2 / _BLOCK)
    cosines[:, 0] /= np.sqrt(2)
    return xp.asarray(np.round(cosines * _SCALE))
