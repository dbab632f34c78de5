"""The pandas dtype of decoded images: Arrow structs under a name that pandas finds again.

pandas names an Arrow struct by its fields and can't read that name back, which dask's shuffle
between workers and ``read_parquet`` both ask of it. A dtype with a name can be found, and whoever
unpickles a frame of it imports this module, so that it always is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
from dask.dataframe.extensions import make_array_nonempty

from dask_image_ingest.frames.image_type import IMAGE, as_images, holds_images
from dask_image_ingest.frames.image_value import DecodedImage, as_pixels
from dask_image_ingest.frames.nested_array import NestedArray, arrow_of

# Inside ImageDtype, "type" is something else.
_Class: TypeAlias = type

# Of an array's own bytes, what may be pickled with it to spare a copy.
_PICKLED_MORE = 1.01

# Bytes of what Arrow is given in one piece: a parquet file is written piece by piece, up to 1,024
# rows of each at once, and these must not take 2 GB.
_PIECE = 1 << 26


@pd.api.extensions.register_extension_dtype
class ImageDtype(pd.ArrowDtype):
    """Decoded images: Arrow ``struct<data: large_binary, height, width, channels: int32>``."""

    def __init__(self) -> None:
        super().__init__(IMAGE)

    @property
    def name(self) -> str:
        """How pandas finds this dtype again."""
        return "image"

    # What a row is outside of the column.
    type = DecodedImage

    @property
    def numpy_dtype(self) -> np.dtype:
        """What NumPy can hold of it."""
        return np.dtype(object)

    @classmethod
    def construct_from_string(cls, string: str) -> ImageDtype:
        """The dtype by its name."""
        if string != "image":
            raise TypeError(f"Cannot construct an ImageDtype from {string!r}")
        return cls()

    def construct_array_type(self) -> _Class:
        """The class of columns of this dtype."""
        return ImageArray

    def _get_common_dtype(self, dtypes: list[Any]) -> ImageDtype | None:
        return self if all(is_image_dtype(dtype) for dtype in dtypes) else None

    def __from_arrow__(self, array: pa.Array | pa.ChunkedArray) -> ImageArray:
        return ImageArray(array)

    def __reduce__(self) -> tuple[_Class, tuple[()]]:
        return ImageDtype, ()


class ImageArray(NestedArray):
    """A column of decoded images over Arrow memory."""

    _what = "images"
    _instead = "for their pixels call .images.arrays() or .images.stack()"

    def __init__(self, values: pa.Array | pa.ChunkedArray) -> None:
        super().__init__(as_images(values))
        self._dtype = ImageDtype()

    def views(self) -> list[np.ndarray | None]:
        """The pixels of each image, without a copy; None where there is none."""
        return [view for chunk in self._pa_array.chunks for view in image_views(chunk)]

    @classmethod
    def _to_arrow(cls, values: Iterable[Any], dtype: Any) -> pa.Array | pa.ChunkedArray:
        array = arrow_of(values, IMAGE, as_images)
        return image_structs([as_pixels(value) for value in values]) if array is None else array

    def _is_one(self, value: Any) -> bool:
        pixels = isinstance(value, np.ndarray) and value.dtype != object and value.ndim in (2, 3)
        return pixels or super()._is_one(value)

    def _cast_pointwise_result(self, values: Any) -> Any:
        if any(isinstance(value, DecodedImage) for value in values):
            return self._from_sequence(values)
        return super()._cast_pointwise_result(values)

    def _explode(self) -> Any:
        return self.copy(), np.ones(len(self), np.uint64)

    def _objects(self) -> Iterator[DecodedImage | None]:
        return (None if view is None else DecodedImage(view) for view in self.views())

    def _bytes(self) -> Iterator[bytes | None]:
        return (None if image is None else image.digest() for image in self._objects())

    def __arrow_array__(self, type: pa.DataType | None = None) -> pa.ChunkedArray:
        """The column for Arrow, in pieces of bounded size that are not copied."""
        pieces = [piece for chunk in self._pa_array.chunks for piece in _pieces(chunk)]
        return pa.chunked_array(pieces, IMAGE)

    def __reduce__(self) -> tuple[type[ImageArray], tuple[pa.Array | pa.ChunkedArray]]:
        # pandas combines the chunks, which copies the pixels even of one. Only parts of larger
        # arrays need that: each would be pickled with all of its array.
        array = self._pa_array
        pickled = sum(chunk.get_total_buffer_size() for chunk in array.chunks)
        whole = pickled <= array.nbytes * _PICKLED_MORE
        return ImageArray, (array if whole else array.combine_chunks(),)

    def _formatter(self, boxed: bool = False) -> Callable[[Any], str]:
        return str


def is_image_dtype(dtype: Any) -> bool:
    """Whether a column of this pandas dtype holds decoded images."""
    # A parquet file read with dtype_backend="pyarrow" has the plain Arrow struct.
    return isinstance(dtype, pd.ArrowDtype) and holds_images(dtype.pyarrow_dtype)


def image_views(images: pa.StructArray) -> list[np.ndarray | None]:
    """The pixels of each image of an Arrow array, without a copy; None where there is none."""
    data = images.field("data")
    flat = np.frombuffer(data.buffers()[2] or b"", np.uint8)
    starts = _places(data)
    shapes = zip(
        *(images.field(name).to_pylist() for name in ("height", "width", "channels")), strict=True
    )
    present = images.is_valid().to_pylist()
    return [
        flat[start:end].reshape(shape) if there else None
        for start, end, shape, there in zip(starts[:-1], starts[1:], shapes, present, strict=True)
    ]


def image_structs(images: list[np.ndarray | None]) -> pa.StructArray:
    """Images as one Arrow array, which has a copy of their pixels."""
    shapes = np.array([(0, 0, 0) if i is None else i.shape for i in images], np.int32)
    there = [image.reshape(-1) for image in images if image is not None]
    flat = np.concatenate(there) if there else np.empty(0, np.uint8)
    absent = np.array([image is None for image in images], bool)
    return image_array(flat, shapes.reshape(-1, 3), absent)


def image_array(flat: Any, shapes: np.ndarray, absent: np.ndarray) -> pa.StructArray:
    """Images whose pixels lie one after the other in ``flat`` as one Arrow array, not copied."""
    ends = np.cumsum(shapes.astype(np.int64).prod(axis=1))
    offsets = np.concatenate([np.zeros(1, np.int64), ends])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(flat)]
    data = pa.Array.from_buffers(pa.large_binary(), len(shapes), buffers)
    children = [data, *(pa.array(shapes[:, axis]) for axis in range(3))]
    return pa.StructArray.from_arrays(children, fields=list(IMAGE), mask=pa.array(absent))


def _places(data: pa.LargeBinaryArray) -> np.ndarray:
    """Where each row begins in an array's bytes, and where the last one ends."""
    offsets = data.buffers()[1]
    places = np.frombuffer(offsets or bytes(8), np.int64)
    return places[data.offset : data.offset + len(data) + 1]


def _pieces(images: pa.StructArray) -> list[pa.StructArray]:
    """Consecutive parts, each of about ``_PIECE`` bytes at most; one that is empty of no rows."""
    places = _places(images.field("data"))
    cuts = 1 + np.flatnonzero(np.diff((places[:-1] - places[0]) // _PIECE))
    edges = [0, *cuts.tolist(), len(images)]
    return [images.slice(start, end - start) for start, end in itertools.pairwise(edges)]


@make_array_nonempty.register(ImageDtype)
def _two_images(dtype: ImageDtype) -> ImageArray:
    return ImageArray(pa.chunked_array([image_structs([np.zeros((1, 1, 3), np.uint8)] * 2)]))
