"""``channel_stats``: exact mean and deviation of each channel, in one pass, by histograms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of

_LEVELS = np.arange(256)
_STATISTICS = {"mean": "float64", "std": "float64", "min": "int64", "max": "int64"}


def count_levels(frame: Any, image: str) -> pd.DataFrame:
    """Histograms of a partition's pixel values: a row of 256 counts for each channel.

    Integer counts add up exactly, for any number and order of partitions, and all statistics follow
    from them.
    """
    backend = backend_of(frame)
    by_channels: dict[int, list[Any]] = {}
    for array in backend.arrays(frame[image]):
        if array is not None and array.dtype != np.uint8:
            raise ArgumentError(
                f"channel_stats counts values of uint8, and an image is of {array.dtype}: compute "
                "statistics of each image with map_batches, and combine them"
            )
        if array is not None:
            by_channels.setdefault(array.shape[2], []).append(array)
    parts = [pd.DataFrame(backend.count_levels(images)) for images in by_channels.values()]
    counts = pd.concat(parts) if parts else pd.DataFrame(np.empty((0, 256), np.int64))
    counts.index = counts.index.astype("int64").rename("channel")
    return add_levels(counts)


def add_levels(counts: pd.DataFrame) -> pd.DataFrame:
    """Add up the histograms of several partitions."""
    return counts.groupby(level=0).sum()


def statistics(counts: pd.DataFrame) -> pd.DataFrame:
    """Statistics of each channel: ``mean``, ``std``, ``min``, ``max`` and number of ``pixels``."""
    rows = {channel: _statistics(row.to_numpy()) for channel, row in add_levels(counts).iterrows()}
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=[*_STATISTICS, "pixels"]).astype(
        {**_STATISTICS, "pixels": "int64"}
    )
    frame.index = frame.index.astype("int64").rename("channel")
    return frame


def _statistics(counts: np.ndarray) -> tuple[float, float, int, int, int]:
    pixels = int(counts.sum())
    mean = float(counts @ _LEVELS) / pixels
    # Centred, since E[x²] - E[x]² loses precision.
    variance = float(counts @ (_LEVELS - mean) ** 2) / pixels
    present = np.flatnonzero(counts)
    return mean, variance**0.5, int(present[0]), int(present[-1]), pixels
