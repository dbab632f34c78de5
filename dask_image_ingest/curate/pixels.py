"""Pixels for signals and fingerprints: batches of images of any shapes, and their luma.

All functions of arrays work on NumPy and CuPy alike.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend, BackendName, backend_of, get_backend
from dask_image_ingest.ops import apply_batch_map, make_batch_map
from dask_image_ingest.typedefs import AnyFrame, Array, ArrayModule

# Copies of so many full-size images fit into memory beside a partition.
_BATCH_SIZE = 32

# On the host: images that fit in the CPU's caches, where sums of rows take a third of the time.
GROUP_SIZE = 4

# ITU-R BT.601, as in JPEG, Pillow's mode L and PDQ.
_WEIGHTS = (0.299, 0.587, 0.114)

# The same in whole 256ths, by which pixels have one luma whatever they are computed with.
_WHOLE_WEIGHTS = (77, 150, 29)


def map_images(
    frame: AnyFrame,
    function: Callable[..., Any],
    outputs: Mapping[str, str],
    batch_size: int,
    image: str | None = None,
    **of_function: Any,
) -> AnyFrame:
    """Add or replace columns that a function makes of an image column; keep all others.

    ``image`` is the column, if the frame has several; ``of_function`` are fields of
    `BatchFunction`.
    """
    inputs = [(frame.images if image is None else frame.images[image]).column]
    columns = list(frame.columns)
    return apply_batch_map(
        frame,
        make_batch_map(function, outputs, batch_size, inputs, True, columns, **of_function),
    )


def in_batches(
    frame: AnyFrame,
    called_by: str,
    function: Callable[..., Mapping[str, Any]],
    outputs: Mapping[str, str],
    **options: Any,
) -> AnyFrame:
    """Add or replace columns ``outputs``, which ``function`` computes from the images; keep these.

    ``called_by`` is the public function, for errors.
    ``function(groups, backend, **options)`` takes a list of groups of images of one shape, uint8
    (n, height, width, channels), all of 1 or all of 3 channels. It returns an array or a list for
    each output: a value for each image, in order.
    """
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    by_channels = functools.partial(
        _by_channels, function=function, backend=backend_of(meta).name, options=options
    )
    return map_images(
        frame, by_channels, outputs, _BATCH_SIZE, called_by=called_by, named=function, writes=False
    )


def _by_channels(
    images: Array | list[Array],
    function: Callable[..., Mapping[str, Any]],
    backend: BackendName,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Call ``function`` once for each run of groups with the same number of channels."""
    library = get_backend(backend)
    if isinstance(images, list):
        groups = [image[None] for image in images]
    elif library.numpy is np:
        groups = [images[start : start + GROUP_SIZE] for start in range(0, len(images), GROUP_SIZE)]
    else:
        groups = [images]
    for group in groups:
        if group.dtype != np.uint8 or group.shape[3] not in (1, 3):
            raise ArgumentError(
                f"an image has {group.shape[3]} channels of {group.dtype}: curate takes images of "
                "1 or 3 channels of uint8, as mode='RGB' and mode='L' give them"
            )
    runs = itertools.groupby(groups, lambda group: group.shape[3])
    results = [function(list(run), library, **options) for _, run in runs]
    return {
        name: _concatenate([result[name] for result in results], library) for name in results[0]
    }


def _concatenate(parts: list[Array] | list[list[Any]], backend: Backend) -> Any:
    if isinstance(parts[0], list):
        return [value for part in parts for value in part]
    return backend.numpy.concatenate(parts)


def luma(pixels: Array, xp: ArrayModule) -> Array:
    """Luma of pixels uint8 (..., 1 or 3), rounded down: uint8 (...)."""
    if pixels.shape[-1] == 1:
        return pixels[..., 0]
    total = sum(
        pixels[..., channel].astype(xp.uint16) * xp.uint16(weight)
        for channel, weight in enumerate(_WHOLE_WEIGHTS)
    )
    return (total >> 8).astype(xp.uint8)


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

    def reduce_rows(self, images: Array, xp: ArrayModule) -> Array:
        """Filter rows of images (n, height, width, channels), uint8 as they are."""
        return xp.clip(_filtered_rows(images, self) + 0.5, 0, 255).astype(xp.uint8)


def make_taps(matrix: np.ndarray, xp: ArrayModule) -> Taps:
    """The taps of a filter given as a matrix (new, old)."""
    is_used = matrix != 0
    start = is_used.argmax(axis=1)
    stop = matrix.shape[1] - is_used[:, ::-1].argmax(axis=1)
    pixels = start[:, None] + np.arange((stop - start).max())
    inside = pixels < matrix.shape[1]
    pixels = np.minimum(pixels, matrix.shape[1] - 1)
    weights = np.where(inside, np.take_along_axis(matrix, pixels, axis=1), 0)
    return Taps(xp.asarray(pixels), xp.asarray(weights, xp.float32))


def luma_of_reduced_rows(images: Array, rows: Taps, xp: ArrayModule) -> Array:
    """Luma of images (n, height, width, 1 or 3), filtered along rows: float32 (n, new, width)."""
    # Rows first, on uint8 and with all channels at once: fewer pixels are converted to floats.
    reduced = _filtered_rows(images, rows)
    if images.shape[-1] == 1:
        return reduced[..., 0]
    return reduced @ xp.asarray(_WEIGHTS, xp.float32)


def reduced_columns(gray: Array, columns: Taps, xp: ArrayModule) -> Array:
    """Filter along columns: (n, rows, width) → (n, rows, new)."""
    return xp.swapaxes(_filtered(xp.swapaxes(gray, 1, 2), columns), 1, 2)


def _filtered_rows(images: Array, taps: Taps) -> Array:
    """Filter rows: uint8 (n, height, width, channels) → float32 (n, new, width, channels)."""
    count, height, width, channels = images.shape
    reduced = _filtered(images.reshape(count, height, width * channels), taps)
    return reduced.reshape(count, -1, width, channels)


def _filtered(values: Array, taps: Taps) -> Array:
    """Filter along axis 1: (n, old, length) → (n, new, length)."""
    result = values[:, taps.pixels[:, 0]] * taps.weights[:, :1]
    for tap in range(1, taps.pixels.shape[1]):
        result += values[:, taps.pixels[:, tap]] * taps.weights[:, tap : tap + 1]
    return result


@functools.lru_cache(maxsize=1024)
def area_taps(length: int, shorter: int, xp: ArrayModule) -> Taps:
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
def cubic_taps(length: int, shorter: int, xp: ArrayModule) -> Taps:
    """Downsampling of an axis by Catmull-Rom splines, as Pillow's ``BICUBIC``."""
    scale = length / shorter
    centers = (np.arange(shorter)[:, None] + 0.5) * scale
    x = np.abs((np.arange(length) + 0.5 - centers) / scale)
    near, far = (1.5 * x - 2.5) * x**2 + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = np.where(x < 1, near, np.where(x < 2, far, 0))
    return make_taps(weights / weights.sum(axis=1, keepdims=True), xp)
