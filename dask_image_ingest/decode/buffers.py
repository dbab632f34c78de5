"""Decoded pixels of a partition: their buffer, and where each image comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

#: Types of a pixel's value by their size in bytes, which is all that a column stores.
VALUE_TYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.float32),
}


class Origin(NamedTuple):
    """Identity of an image, for its random numbers and its errors.

    Attributes
    ----------
    shard : str
        URL of its shard or file; empty where there is none.
    number : int
        Of its sample in the shard; where only its bytes are known, their offset in the shard, or
        else a hash of the sample's key or of the bytes.
    name : str
        What errors call it.
    """

    shard: str
    number: int
    name: str


def unknown(row: int) -> Origin:
    """The origin of an image without a shard."""
    return Origin("", row, f"image {row}")


class PixelBuffer(Protocol):
    """Flat buffer to which decoded images are appended."""

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
    itemsizes : numpy array of int64, shape (rows,), or None
        Bytes of a value of each image, and so its type (`VALUE_TYPES`); None for 1.
    """

    flat: Any
    shapes: np.ndarray
    errors: list[str | None]
    itemsizes: np.ndarray | None = None

    @property
    def sizes(self) -> np.ndarray:
        """Bytes of each image: int64 (rows,)."""
        values = self.shapes.astype(np.int64).prod(axis=1)
        return values if self.itemsizes is None else values * self.itemsizes

    def take(self, rows: np.ndarray) -> Pixels:
        """The pixels of the given rows, in their order; no copy where only empty rows go."""
        sizes = self.sizes
        flat = self.flat
        there = rows[sizes[rows] > 0]
        if not np.array_equal(there, np.flatnonzero(sizes)):
            starts = np.cumsum(sizes) - sizes
            images = [flat[starts[row] : starts[row] + sizes[row]] for row in there.tolist()]
            flat = np.concatenate(images) if images else flat[:0]
        itemsizes = None if self.itemsizes is None else self.itemsizes[rows]
        errors = [self.errors[row] for row in rows.tolist()]
        return Pixels(flat, self.shapes[rows], errors, itemsizes)


def pixels_of(images: Sequence[Any], errors: Sequence[str | None], numpy: Any) -> Pixels:
    """Images (height, width, channels), None where there is none, as pixels: a copy.

    ``numpy`` is the library of the images.
    """
    there = [image for image in images if image is not None]
    shapes = [(0, 0, 0) if image is None else image.shape for image in images]
    itemsizes = [1 if image is None else image.dtype.itemsize for image in images]
    return Pixels(
        numpy.concatenate([as_bytes(i, numpy) for i in there]) if there else numpy.empty(0, "u1"),
        np.array(shapes, np.int32).reshape(-1, 3),
        list(errors),
        None if set(itemsizes) <= {1} else np.array(itemsizes, np.int64),
    )


def as_bytes(image: Any, numpy: Any = np) -> Any:
    """The values of an array as a flat array of bytes, without a copy if it is contiguous."""
    return numpy.ascontiguousarray(image).reshape(-1).view(np.uint8)


def from_bytes(data: Any, shape: Sequence[int]) -> Any:
    """An image of its bytes, a flat array; without a copy unless their place forbids it.

    Raises
    ------
    ValueError
        If there are not as many as values of a known type need.
    """
    values = prod(shape)
    if len(data) == values:
        return data.reshape(shape)
    dtype = VALUE_TYPES.get(len(data) // max(values, 1))
    if dtype is None or len(data) != values * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no image of the shape {tuple(shape)}")
    interface = getattr(data, "__cuda_array_interface__", None) or data.__array_interface__
    # Behind an image of an odd number of bytes; a GPU can't read such values.
    data = data.copy() if interface["data"][0] % dtype.itemsize else data
    return data.view(dtype).reshape(shape)
