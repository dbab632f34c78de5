"""Regions of upright images, and the parts of pictures that rows of a frame ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dask_image_ingest.decode.formats.stored import SWAPPED


class Region(NamedTuple):
    """Part of an upright image, in pixels; that of a part may reach beyond the image."""

    top: int
    left: int
    height: int
    width: int
    mirrored: bool = False

    @classmethod
    def whole(cls, image: np.ndarray, mirrored: bool = False) -> Region:
        """All of an array (height, width, channels)."""
        return cls(0, 0, image.shape[0], image.shape[1], mirrored)

    @classmethod
    def around(cls, regions: Sequence[Region]) -> Region:
        """The smallest region that has all of these."""
        top, left = min(one.top for one in regions), min(one.left for one in regions)
        bottom = max(one.top + one.height for one in regions)
        right = max(one.left + one.width for one in regions)
        return cls(top, left, bottom - top, right - left)

    def of(self, image: np.ndarray) -> np.ndarray:
        """Cut it out of an array (height, width, channels), not mirrored; black outside of that.

        A view, unless the region reaches beyond the image.
        """
        (top, left), shape = self[:2], self[2:4]
        view = image[max(0, top) : max(0, top + shape[0]), max(0, left) : max(0, left + shape[1])]
        if min(top, left) >= 0 and view.shape[:2] == shape:
            return view
        padded = np.zeros((*shape, *image.shape[2:]), image.dtype)
        down, across = max(0, -top), max(0, -left)
        padded[down : down + view.shape[0], across : across + view.shape[1]] = view
        return padded

    def inside(self, shape: tuple[int, int]) -> Region:
        """The part of it in an image of this height and width; a pixel of the edge if none is."""
        top, left = (min(max(0, at), edge - 1) for at, edge in zip(self[:2], shape, strict=True))
        bottom, right = min(self.top + self.height, shape[0]), min(self.left + self.width, shape[1])
        return Region(top, left, max(1, bottom - top), max(1, right - left), self.mirrored)

    def shifted(self, down: int, across: int) -> Region:
        """The region so many pixels further."""
        return self._replace(top=self.top + down, left=self.left + across)

    def stored(self, shape: tuple[int, int], orientation: int) -> Region:
        """The region before EXIF orientation, of an image of this height and width after it."""
        top, left, height, width = self[:4]
        if orientation in (3, 4, 7, 8):
            top = shape[0] - top - height
        if orientation in (2, 3, 6, 7):
            left = shape[1] - left - width
        if orientation in SWAPPED:
            return Region(left, top, width, height)
        return Region(top, left, height, width)


class Part(NamedTuple):
    """Part of a picture that is the image of a row.

    Attributes
    ----------
    picture : int
        Number of the picture, equal for all parts that are cut from one.
    page : int
        Number of its page, from 0.
    shape : (int, int)
        Height and width of the upright page.
    region
        The part in pixels of that page; black where it reaches beyond.
    """

    picture: int
    page: int
    shape: tuple[int, int]
    region: Region
