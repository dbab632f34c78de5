"""Place of an image's pixels in its decoded image: where its boxes and points come to lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dask_image_ingest.decode.region import Region
from dask_image_ingest.decode.resize import ResizeGeometry


class Placement(NamedTuple):
    """Spatial operations of one decode: the region, its resize, and the flip of the result.

    Attributes
    ----------
    shape : (int, int)
        Height and width of the upright image.
    region
        Part of it that is decoded.
    geometry
        Resize of the region, and its crop or padding. The result is mirrored if ``region`` is.
    """

    shape: tuple[int, int]
    region: Region
    geometry: ResizeGeometry


class Placements:
    """Placements of some images as arrays of (across, down), float64 (n, 2).

    Attributes
    ----------
    source, shape
        Width and height of the upright images, and of the decoded ones.
    mirrored
        Whether an image is mirrored left to right, bool (n,).
    """

    def __init__(self, placements: Sequence[Placement]) -> None:
        numbers = np.array(
            [
                (*p.shape, *p.region, *p.geometry.whole, *p.geometry.shape, *p.geometry.start)
                for p in placements
            ],
            np.float64,
        ).reshape(-1, 13)
        pairs = numbers[:, [1, 0, 3, 2, 5, 4, 8, 7, 10, 9, 12, 11]].reshape(-1, 6, 2)
        self.source, corner, region, whole, self.shape, start = pairs.transpose(1, 0, 2)
        self.mirrored = numbers[:, 6] > 0
        self._scale = whole / region
        self._shift = -corner * self._scale - start

    def move(self, points: np.ndarray, rows: np.ndarray, last: int) -> np.ndarray:
        """Points of decoded images for points (k, 2) of upright images, x and y in pixels.

        ``rows`` (k,) are the numbers of their images. The mirror image of x is the width less x and
        ``last``: 1 if a point is the pixel of that number, 0 if it is a place between pixels.
        """
        moved = points * self._scale[rows] + self._shift[rows]
        x = moved[:, 0]
        moved[:, 0] = np.where(self.mirrored[rows], self.shape[rows, 0] - last - x, x)
        return moved
