"""Images of a partition: encoded, with the identity of each, and decoded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from dask_image_ingest.decode.formats import Header
from dask_image_ingest.decode.region import Part
from dask_image_ingest.typedefs import Array, ArrayModule, ImageBatch

#: Type of a pixel's value by its size in bytes: a column stores the size only.
VALUE_TYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.float32),
}


class Origin(NamedTuple):
    """Identity of an image, for random numbers and error messages.

    Attributes
    ----------
    shard : str
        URL of its shard or file; empty if there is none.
    number : int
        Number of its sample in the shard. If that is not known, the offset of its bytes, or else a
        hash of the sample's key or of the bytes.
    name : str
        Name in error messages.
    draw : int
        Which random numbers of the sample, uint64: 0 for those of a read, another for each epoch
        of a training and each repetition of a sample in it.
    """

    shard: str
    number: int
    name: str
    draw: int = 0


def unknown(row: int) -> Origin:
    """Origin of an image without a shard."""
    return Origin("", row, f"image {row}")


def _nothing() -> None:
    """Prefetch nothing."""


@dataclass(frozen=True, slots=True)
class EncodedImages:
    """The encoded images of some rows.

    Attributes
    ----------
    headers : sequence of Header
        One for each row; rows with an error have no image to decode.
    read : callable
        Function from a row to its encoded bytes.
    origin : callable
        Function from a row to its origin, which seeds random operators and names the image in
        errors and in the crash log.
    what : str
        Names these images in errors.
    prefetch : callable
        Called before the first image is read, once it is known that the pixels fit into memory.
    pictures : array of int64, shape (rows,), or None
        Rows with equal numbers have the same pixels; None if all differ.
    source : hashable, or None
        Columns of equal sources have the same images in the same rows; None if that is not known.
    parts : sequence of Part or None, or None
        The part of its picture that each row's image is, to which its header then applies; None for
        the whole picture. None instead of a sequence if all are whole.
    """

    headers: Sequence[Header]
    read: Callable[[int], Any]
    origin: Callable[[int], Origin] = unknown
    what: str = "images"
    prefetch: Callable[[], None] = _nothing
    pictures: np.ndarray | None = None
    source: Hashable | None = None
    parts: Sequence[Part | None] | None = None

    def __len__(self) -> int:
        return len(self.headers)

    def part(self, row: int) -> Part | None:
        """The part of its picture that a row's image is; None for the whole picture."""
        return None if self.parts is None else self.parts[row]

    def take(self, rows: np.ndarray) -> EncodedImages:
        """The images of the given rows, in that order."""
        numbers = rows.tolist()
        return replace(
            self,
            headers=[self.headers[number] for number in numbers],
            read=lambda row: self.read(numbers[row]),
            origin=lambda row: self.origin(numbers[row]),
            pictures=None if self.pictures is None else self.pictures[rows],
            parts=None if self.parts is None else [self.parts[number] for number in numbers],
        )


class PixelBuffer(Protocol):
    """Flat buffer to which decoded images are appended."""

    def append(self, images: ImageBatch) -> None:
        """Append a batch: a DALI tensor list, or a list of arrays or DALI tensors.

        Each image has the shape (height, width, channels). On a CPU it may be a `ResizedImage`.
        """

    def finish(self) -> Array:
        """All bytes as one array."""


def shapes_of(images: ImageBatch) -> np.ndarray:
    """Shapes of a batch as in `PixelBuffer.append`: int32 (images, 3)."""
    shapes = map(shape_of, images) if isinstance(images, list) else images.shape()
    return np.array(list(shapes), np.int32).reshape(-1, 3)


def shape_of(image: Any) -> tuple[int, ...]:
    """Height, width and channels of an array or a DALI tensor."""
    return image.shape() if callable(image.shape) else image.shape


def host_images(images: Any) -> Any:
    """A batch, or an image of one: a copy in host memory of what DALI has on a GPU."""
    return images.as_cpu() if hasattr(images, "as_cpu") else images


@dataclass(frozen=True)
class Pixels:
    """The decoded images of a partition.

    Attributes
    ----------
    flat : CuPy or NumPy array of uint8, shape (sum of all images' bytes,)
        The images one after the other.
    shapes : numpy array of int32, shape (rows, 3)
        Height, width, channels; all zero for a row without an image.
    errors : list of str or None
        Reason why a row has no image: None if it has one, "" if none was expected.
    itemsizes : numpy array of int64, shape (rows,), or None
        Bytes of one value in each image, which implies its type (`VALUE_TYPES`); None if all are 1.
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
        """Pixels of the given rows, in that order; no copy if only empty rows are dropped."""
        sizes = self.sizes
        flat = self.flat
        non_empty = rows[sizes[rows] > 0]
        if not np.array_equal(non_empty, np.flatnonzero(sizes)):
            starts = np.cumsum(sizes) - sizes
            images = [flat[starts[row] : starts[row] + sizes[row]] for row in non_empty.tolist()]
            flat = np.concatenate(images) if images else flat[:0]
        itemsizes = None if self.itemsizes is None else self.itemsizes[rows]
        errors = [self.errors[row] for row in rows.tolist()]
        return Pixels(flat, self.shapes[rows], errors, itemsizes)


def pixels_of(
    images: Sequence[Array | None], errors: Sequence[str | None], numpy: ArrayModule
) -> Pixels:
    """Copy arrays (height, width, channels), None for a missing image, to one `Pixels`.

    ``numpy`` is the images' array module, NumPy or CuPy.
    """
    present = [image for image in images if image is not None]
    shapes = [(0, 0, 0) if image is None else image.shape for image in images]
    itemsizes = [1 if image is None else image.dtype.itemsize for image in images]
    return Pixels(
        numpy.concatenate([as_bytes(image, numpy) for image in present])
        if present
        else numpy.empty(0, "u1"),
        np.array(shapes, np.int32).reshape(-1, 3),
        list(errors),
        None if set(itemsizes) <= {1} else np.array(itemsizes, np.int64),
    )


def as_bytes(image: Array, numpy: ArrayModule = np) -> Array:
    """View an array as flat uint8; a copy only if it is not contiguous."""
    return numpy.ascontiguousarray(image).reshape(-1).view(np.uint8)


def from_bytes(data: Array, shape: Sequence[int]) -> Array:
    """View flat uint8 as an image of ``shape``; a copy only if the bytes are not aligned.

    Raises
    ------
    ValueError
        If the number of bytes fits no value type.
    """
    values = prod(shape)
    if len(data) == values:
        return data.reshape(shape)
    dtype = VALUE_TYPES.get(len(data) // max(values, 1))
    if dtype is None or len(data) != values * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no image of the shape {tuple(shape)}")
    interface = getattr(data, "__cuda_array_interface__", None) or data.__array_interface__
    # Unaligned if an image before it has an odd number of bytes: a GPU can't read such values.
    data = data.copy() if interface["data"][0] % dtype.itemsize else data
    return data.view(dtype).reshape(shape)
