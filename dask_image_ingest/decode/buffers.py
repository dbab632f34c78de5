"""Decoded pixels of a partition: their buffer, and where each image comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np


class Origin(NamedTuple):
    """Identity of an image, for its random numbers and its errors.

    Attributes
    ----------
    shard : str
        URL of its shard.
    number : int
        Of its sample in the shard; after a late decode the place of its bytes there.
    name : str
        What errors call it.
    """

    shard: str
    number: int
    name: str


def unknown(row: int) -> Origin:
    """The origin of an image of which no more is known."""
    return Origin("", row, f"image {row}")


class PixelBuffer(Protocol):
    """One flat buffer that takes decoded images one behind the other."""

    def append(self, images: Any) -> None:
        """Take a batch: a DALI tensor list whole, or a list of arrays or DALI tensors.

        Each image is of shape (height, width, channels). On a CPU it may be a `ResizedImage`.
        """

    def finish(self) -> Any:
        """The bytes taken, as one array."""


@dataclass(frozen=True)
class Pixels:
    """The decoded images of a partition.

    Attributes
    ----------
    flat : array of uint8, shape (sum of all images' bytes,)
        CuPy or NumPy, image behind image.
    shapes : numpy array of int32, shape (rows, 3)
        Height, width, channels; all zero for a row without an image.
    errors : list of str or None
        For each row why it has no image; empty where it has none and none was expected.
    """

    flat: Any
    shapes: np.ndarray
    errors: list[str | None]

    def take(self, rows: np.ndarray) -> Pixels:
        """The pixels of the given rows, in their order; no copy where only empty rows go."""
        sizes = self.shapes.astype(np.int64).prod(axis=1)
        flat = self.flat
        there = rows[sizes[rows] > 0]
        if not np.array_equal(there, np.flatnonzero(sizes)):
            starts = np.cumsum(sizes) - sizes
            images = [flat[starts[row] : starts[row] + sizes[row]] for row in there.tolist()]
            flat = np.concatenate(images) if images else flat[:0]
        return Pixels(flat, self.shapes[rows], [self.errors[row] for row in rows.tolist()])
