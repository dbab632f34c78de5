"""Second look: whether two pictures are one, by thumbnails of 32 × 32 pixels.

A crop, a turn of a degree, a border or a text over the picture changes many bits of a perceptual
hash. Here one thumbnail is compared with crops of the other, at several scales and places, and the
pixels that fit worst, which text may cover, are left out. Pages and drawings get no second look:
forms and slides that differ in a few words are one thumbnail.

All functions of arrays work on NumPy and CuPy alike.
"""

from __future__ import annotations

import functools

import numpy as np
from dask import delayed

from dask_image_ingest.client import client_that_computes
from dask_image_ingest.computing import compute
from dask_image_ingest.curate.fingerprints import SIDE_OF_THUMBNAIL, VARIANTS
from dask_image_ingest.frames import BackendName, get_backend
from dask_image_ingest.typedefs import Array, ArrayModule

_SIDE = SIDE_OF_THUMBNAIL
_SCALES = (1.0, 0.965, 0.93, 0.895, 0.86)  # of the side, of crops
_PLACES = (0.0, 0.5, 1.0)  # of a crop, as shares of what is cut off

# Pairs whose best correlation is lower are not looked at with pixels left out.
_MIN_LIKELY = 0.4
_BEST = 3  # alignments that are looked at again
_KEPT = _SIDE * _SIDE * 3 // 4  # pixels that are not left out
_FITS = 2
_MIN_CORRELATION = 0.94
_PLAIN = 1e-3

# The ground of a page or a drawing: so many pixels that are white, or differ by so many levels.
_GROUND, _WHITE, _GROUND_LEVELS = _SIDE * _SIDE * 2 // 5 + 1, 230, 4

_PAIRS = 64  # compared at once: they fit a core's cache
_PAIRS_OF_TASK = 1024


def are_same(one: np.ndarray, other: np.ndarray, backend: BackendName) -> np.ndarray:
    """True for pairs of thumbnails, both uint8 (n, 32, 32), that show one picture: bool (n,).

    Compared by tasks, each of some pairs, with the arrays of the backend.
    """
    starts = range(0, len(one), _PAIRS_OF_TASK)
    pairs = [
        tuple(side[start : start + _PAIRS_OF_TASK] for side in (one, other)) for start in starts
    ]
    client = client_that_computes()
    if client is not None:
        # Not in the graph, which goes through the scheduler.
        pairs = client.scatter(pairs, hash=False)
    tasks = [delayed(_are_same)(some, backend) for some in pairs]
    return np.concatenate([np.zeros(0, bool), *compute(*tasks)])


def _are_same(pairs: tuple[np.ndarray, np.ndarray], backend: BackendName) -> np.ndarray:
    one, other = pairs
    library = get_backend(backend)
    on_device = library.numpy.asarray(one), library.numpy.asarray(other)
    found: np.ndarray = library.host(correlations(*on_device, library.numpy)) >= _MIN_CORRELATION
    return found & ~(_is_page(one) & _is_page(other))


def _is_page(thumbnails: np.ndarray) -> np.ndarray:
    """True for thumbnails, uint8 (n, 32, 32), two fifths of which are one ground: bool (n,)."""
    levels = np.sort(thumbnails.reshape(len(thumbnails), -1), axis=1, kind="stable")
    is_plain = levels[:, _GROUND - 1 :] - levels[:, : 1 - _GROUND] <= _GROUND_LEVELS
    is_page: np.ndarray = (levels[:, -_GROUND] >= _WHITE) | is_plain.any(axis=1)
    return is_page


def turned(thumbnails: np.ndarray, variant: str) -> np.ndarray:
    """Thumbnails (n, 32, 32) of the images mirrored or turned, by a name of `VARIANTS`."""
    down, across, swap = VARIANTS[variant]
    thumbnails = thumbnails[:, :: -1 if down else 1, :: -1 if across else 1]
    return thumbnails.swapaxes(1, 2) if swap else thumbnails


def correlations(one: Array, other: Array, xp: ArrayModule) -> Array:
    """The best correlation of pairs of thumbnails, uint8 (n, 32, 32): float32 (n,).

    Either thumbnail is compared with all crops of the other. For the best alignments the quarter of
    the pixels that differ most, once both have one mean and variance, is left out, then once more
    by the mean and variance of the others; the result is the correlation of those that are left.
    """
    parts = [xp.zeros(0, xp.float32)]
    for start in range(0, len(one), _PAIRS):
        some = slice(start, start + _PAIRS)
        parts.append(_correlations(one[some].astype("f4"), other[some].astype("f4"), xp))
    return xp.concatenate(parts)


def _correlations(one: Array, other: Array, xp: ArrayModule) -> Array:
    every = xp.ones((1, 1, 1), xp.float32)
    whole = [_fitted(t.reshape(len(t), 1, -1), every, xp) for t in (one, other)]
    crops = [_crops(thumbnails.reshape(one.shape), xp) for thumbnails in whole]
    # (n, alignments): the first with crops of the second, then the second with crops of the first.
    of_all = xp.concatenate([_products(crops[1 - way], whole[way], xp) for way in (0, 1)], axis=1)
    number = crops[0].shape[1]
    likely = xp.flatnonzero(of_all.max(axis=1) >= _MIN_LIKELY)
    result = xp.zeros(len(one), xp.float32)
    if not len(likely):
        return result
    alignments = xp.argsort(-of_all[likely], axis=1)[:, :_BEST]
    pair, crop, is_second = likely[:, None], alignments % number, alignments >= number
    fixed = xp.where(is_second[..., None], whole[1][pair, 0], whole[0][pair, 0])
    moved = xp.where(is_second[..., None], crops[0][pair, crop], crops[1][pair, crop])
    fitted = fixed, _fitted(moved, every, xp)
    for _ in range(_FITS):
        residuals = xp.abs(fitted[0] - fitted[1])
        limit = xp.partition(residuals, _KEPT - 1, axis=2)[..., _KEPT - 1 : _KEPT]
        weights = (residuals <= limit).astype(xp.float32)
        fitted = _fitted(fixed, weights, xp), _fitted(moved, weights, xp)
    result[likely] = (fitted[0] * fitted[1] * weights).sum(axis=2).max(axis=1)
    return result


def _products(crops: Array, whole: Array, xp: ArrayModule) -> Array:
    """Correlations of crops (n, crops, 1024) with `_fitted` thumbnails (n, 1, 1024): (n, crops)."""
    squares = xp.einsum("ncp,ncp->nc", crops, crops) - crops.sum(axis=2) ** 2 / crops.shape[2]
    length = xp.sqrt(xp.maximum(squares, _PLAIN**2))
    return (crops @ whole.swapaxes(1, 2))[..., 0] / length


def _fitted(values: Array, weights: Array, xp: ArrayModule) -> Array:
    """Values (n, crops, 1024), of which those with a weight of 1 have mean 0 and length 1."""
    count = xp.broadcast_to(weights, values.shape).sum(axis=2, keepdims=True)
    values = values - (values * weights).sum(axis=2, keepdims=True) / count
    length = xp.sqrt((values * values * weights).sum(axis=2, keepdims=True))
    return values / xp.maximum(length, _PLAIN)  # what is plain correlates with nothing


def _crops(thumbnails: Array, xp: ArrayModule) -> Array:
    """All crops of thumbnails (n, 32, 32), enlarged to these: (n, crops, 1024)."""
    count, made = len(thumbnails), []
    for matrices in _crop_weights(xp):
        places = len(matrices)
        # One product for each axis: (places * 32, 32) @ (32, n * 32).
        rows = matrices.reshape(-1, _SIDE) @ thumbnails.transpose(1, 0, 2).reshape(_SIDE, -1)
        both = rows.reshape(-1, _SIDE) @ matrices.reshape(-1, _SIDE).T
        both = both.reshape(places, _SIDE, count, places, _SIDE).transpose(2, 0, 3, 1, 4)
        made.append(both.reshape(count, -1, _SIDE * _SIDE))
    return xp.concatenate(made, axis=1)


@functools.lru_cache(maxsize=2)
def _crop_weights(xp: ArrayModule) -> list[Array]:
    """For each scale the crops of an axis, enlarged to its length: (places, 32, 32)."""
    scales = []
    for scale in _SCALES:
        places = [place * _SIDE * (1 - scale) for place in (_PLACES if scale < 1 else (0.0,))]
        centers = (np.arange(_SIDE) + 0.5) * scale - 0.5
        position = (np.array(places)[:, None] + centers).clip(0, _SIDE - 1)
        distances = np.abs(position[..., None] - np.arange(_SIDE))
        scales.append(xp.asarray(np.maximum(1 - distances, 0), xp.float32))
    return scales
