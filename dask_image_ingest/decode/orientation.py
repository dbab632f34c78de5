"""EXIF orientation: stored pixels → the picture as it should be seen."""

from __future__ import annotations

import numpy as np

from dask_image_ingest.decode.formats import SWAPPED

__all__ = ["upright"]


def upright(stored: np.ndarray, orientation: int) -> np.ndarray:
    """Apply an EXIF orientation, 1 to 8, to an array (height, width, channels): a view."""
    if orientation in SWAPPED:
        stored = stored.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        stored = stored[:, ::-1]
    if orientation in (3, 4, 7, 8):
        stored = stored[::-1]
    return stored
