"""Image columns: Arrow type, pandas dtype and array, and `DecodedImage` for one value."""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from dask.dataframe.extensions import make_array_nonempty
from PIL import Image

from dask_image_ingest.decode import VALUE_TYPES, Pixels, from_bytes, pixels_of
from dask_image_ingest.errors import OperandError
from dask_image_ingest.frames.arrow_types import bytes_of, is_byte_list, is_bytes
from dask_image_ingest.frames.nested_dtype import NamedDtype, NestedArray, arrow_of
from dask_image_ingest.frames.pixel_pool import MIN_SHARED_BYTES, pixel_memory
from dask_image_ingest.typedefs import Dtype

#: Decoded pixels of one row: row-major ``height x width x channels``. Each row has its own shape,
#: so that it survives any filter, merge, shuffle or file. Binary rather than a list of uint8, which
#: Arrow copies value by value. Values of one byte are uint8, of two uint16, of four float32,
#: little-endian, as are all machines that this runs on.
IMAGE = pa.struct(
    [
        pa.field("data", pa.large_binary()),
        pa.field("height", pa.int32()),
        pa.field("width", pa.int32()),
        pa.field("channels", pa.int32()),
    ]
)


def holds_images(type_: pa.DataType) -> bool:
    """True for the Arrow type of images, and for its variants.

    In cuDF, and in older files, ``data`` is a list of uint8.
    """
    if not pa.types.is_struct(type_) or type_.names != IMAGE.names:
        return False
    data, *edges = (field.type for field in type_)
    return all(edge == pa.int32() for edge in edges) and (is_bytes(data) or is_byte_list(data))


def as_images(array: pa.Array | pa.ChunkedArray) -> Any:
    """Convert an Arrow array or chunked array to ``IMAGE``, without a copy of the pixels."""
    if array.type.equals(IMAGE):
        return array
    if not holds_images(array.type):
        return array.cast(IMAGE)
    if isinstance(array, pa.ChunkedArray):
        return pa.chunked_array([as_images(chunk) for chunk in array.chunks], IMAGE)
    data, *edges = (array.field(name) for name in IMAGE.names)
    absent = pc.or_(array.is_null(), data.is_null())
    data = (bytes_of(data) if is_byte_list(data.type) else data).cast(pa.large_binary())
    return pa.StructArray.from_arrays([data, *edges], fields=list(IMAGE), mask=absent)


# Longer edge of an image in a notebook.
_THUMBNAIL = 256


class DecodedImage:
    """One decoded image: an array (height, width, channels), shown as a picture in notebooks.

    The dtype is uint8; with ``mode="raw"`` also uint16 and float32, which are shown as grey, scaled
    from their minimum to their maximum.

    ``np.asarray(image)`` is a read-only view of the pixels. Two images are equal if their shapes,
    dtypes and pixels are; a comparison with an array is NumPy's, element by element.

    Parameters
    ----------
    pixels
        Array of shape (height, width, channels).
    """

    __slots__ = ("_pixels",)

    def __init__(self, pixels: np.ndarray) -> None:
        self._pixels = pixels.view()
        self._pixels.flags.writeable = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Height, width and channels."""
        return self._pixels.shape

    @property
    def dtype(self) -> np.dtype:
        """Type of the values: uint8, uint16 or float32."""
        return self._pixels.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions, always 3."""
        return self._pixels.ndim

    @property
    def size(self) -> int:
        """Number of values."""
        return self._pixels.size

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._pixels.nbytes

    def digest(self) -> bytes:
        """Hash of shape and pixels."""
        digest = hashlib.blake2b(np.array(self.shape, np.int64).tobytes(), digest_size=16)
        digest.update(np.ascontiguousarray(self._pixels).data)
        return digest.digest()

    def tobytes(self) -> bytes:
        """Copy of the pixels, row by row."""
        return self._pixels.tobytes()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        # For NumPy, Pillow and others. Not __array__, with which pandas would take one image for
        # many values in isna(). With explicit strides Pillow calls tobytes(); without, it would
        # look for a buffer, which this object is not.
        return self._pixels.__array_interface__ | {"strides": self._pixels.strides}

    def __getitem__(self, item: Any) -> Any:
        return self._pixels[item]

    # Not iterable, so that pandas does not take it for a list of rows.
    __iter__ = None

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, DecodedImage):
            return NotImplemented
        same = self.shape == other.shape and self.dtype == other.dtype
        return same and bool((self._pixels == other._pixels).all())

    def _no_order(self, other: object) -> Any:
        if not isinstance(other, DecodedImage):
            return NotImplemented
        raise OperandError("images have no order: sort by another column")

    __lt__ = __le__ = __gt__ = __ge__ = _no_order

    def __hash__(self) -> int:
        return hash(self.digest())

    def __reduce__(self) -> tuple[type[DecodedImage], tuple[np.ndarray]]:
        return DecodedImage, (np.ascontiguousarray(self._pixels),)

    def __repr__(self) -> str:
        return f"<image {'×'.join(map(str, self.shape))}>"

    def _repr_png_(self) -> bytes | None:
        return self.png(_THUMBNAIL)

    def png(self, edge: int) -> bytes | None:
        """PNG file of the image, at most ``edge`` pixels high and wide; None for 2 channels."""
        if self.shape[2] not in (1, 3, 4) or not self.size:
            return None
        pixels = as_uint8(self._pixels)
        thumbnail = Image.fromarray(pixels[:, :, 0] if self.shape[2] == 1 else pixels)
        thumbnail.thumbnail((edge, edge))
        file = io.BytesIO()
        thumbnail.save(file, "PNG")
        return file.getvalue()


def as_uint8(pixels: np.ndarray) -> np.ndarray:
    """Pixels as uint8: other dtypes are scaled, minimum to 0 and maximum to 255; NaN becomes 0."""
    if pixels.dtype == np.uint8:
        return pixels
    values = np.where(np.isfinite(pixels), pixels, np.nan).astype(np.float64)
    low, high = (np.nanmin(values), np.nanmax(values)) if np.isfinite(values).any() else (0, 0)
    scaled = (values - low) * (255 / (high - low or 1))
    return np.rint(np.nan_to_num(scaled)).astype(np.uint8)


def as_pixels(value: object) -> np.ndarray | None:
    """Pixels of a `DecodedImage`, an array, or a row of the Arrow struct; None for a null."""
    if isinstance(value, DecodedImage):
        return np.asarray(value)
    if isinstance(value, Mapping):
        return _from_struct(value)
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        array = np.asarray(value)
        if array.dtype in VALUE_TYPES.values() and array.ndim in (2, 3):
            return array if array.ndim == 3 else array[:, :, None]
        value = f"an array of {array.dtype} with the shape {array.shape}"
    elif pd.api.types.is_scalar(value) and pd.isna(value):
        return None
    raise OperandError(
        f"{value if isinstance(value, str) else repr(value)} is no image: an image column takes "
        "arrays (height, width) or (height, width, channels) of uint8, uint16 or float32, and None"
    )


def _from_struct(row: Mapping[str, Any]) -> np.ndarray:
    try:
        data, shape = row["data"], (row["height"], row["width"], row["channels"])
        flat = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.array(data, "uint8")
        return from_bytes(flat, shape)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise OperandError(
            "this dict is no image: it needs data, height, width and channels that fit each other"
        ) from None


# Most bytes that are pickled, as a factor of the array's own, to avoid a copy.
_PICKLED_EXCESS = 1.01

# Bytes of a chunk for Arrow. It writes up to 1,024 rows of a chunk to parquet at once, which must
# stay below 2 GB.
_CHUNK_BYTES = 1 << 26

# Mean size from which images are taken row by row: for small ones, Arrow's loop is faster.
_LARGE_IMAGE = 1 << 16


@pd.api.extensions.register_extension_dtype
class ImageDtype(NamedDtype):
    """Decoded images: Arrow ``struct<data: large_binary, height, width, channels: int32>``."""

    # Class of one value.
    type = DecodedImage

    def __init__(self, type_: pa.DataType = IMAGE) -> None:
        super().__init__(IMAGE)

    @property
    def name(self) -> str:
        """Name that pandas can parse."""
        return "image"

    @classmethod
    def _type_of(cls, name: str) -> pa.DataType | None:
        return IMAGE if name == "image" else None

    @property
    def numpy_dtype(self) -> np.dtype:
        """NumPy's dtype for such a column."""
        return np.dtype(object)

    def holds(self, type_: pa.DataType) -> bool:
        """True for columns that can be converted to this dtype."""
        return holds_images(type_)


class ImageArray(NestedArray):
    """A column of decoded images over Arrow memory."""

    _noun = "images"
    _hint = "for their pixels call .images.arrays() or .images.stack()"

    def __init__(self, values: pa.Array | pa.ChunkedArray) -> None:
        super().__init__(as_images(values))
        self._dtype = ImageDtype()

    def views(self) -> list[np.ndarray | None]:
        """Views of the images; None for a missing image."""
        return [view for chunk in self._pa_array.chunks for view in image_views(chunk)]

    def __getitem__(self, item: Any) -> Any:
        if pd.api.types.is_bool_dtype(getattr(item, "dtype", None)):
            item = np.flatnonzero(pd.api.indexers.check_array_indexer(self, item))
        return super().__getitem__(item)

    def take(
        self,
        indices: Sequence[int] | np.ndarray,
        allow_fill: bool = False,
        fill_value: object = None,
    ) -> ImageArray:
        """Rows by position. Pixels of large images are copied to the pool, which is shared."""
        is_small = self.nbytes <= max(MIN_SHARED_BYTES, len(self) * _LARGE_IMAGE)
        fills_null = pd.api.types.is_scalar(fill_value) and pd.isna(fill_value)
        if is_small or not fills_null:
            return super().take(indices, allow_fill, fill_value)
        # pandas checks the positions, and makes them null or non-negative.
        numbers = pd.array(np.arange(len(self)), dtype="int64[pyarrow]")
        rows = numbers.take(indices, allow_fill).__arrow_array__().combine_chunks()
        return ImageArray(_take_images(self._pa_array, rows))

    @classmethod
    def _to_arrow(cls, values: Iterable[Any], dtype: Dtype | None) -> pa.Array | pa.ChunkedArray:
        array = arrow_of(values, IMAGE, as_images)
        return image_structs([as_pixels(value) for value in values]) if array is None else array

    def _is_one(self, value: object) -> bool:
        is_image = isinstance(value, np.ndarray) and value.dtype != object and value.ndim in (2, 3)
        return is_image or super()._is_one(value)

    def _cast_pointwise_result(self, values: Sequence[Any]) -> Any:
        if any(isinstance(value, DecodedImage) for value in values):
            return self._from_sequence(values)
        return super()._cast_pointwise_result(values)

    def _objects(self) -> Iterator[DecodedImage | None]:
        return (None if view is None else DecodedImage(view) for view in self.views())

    def _bytes(self) -> Iterator[bytes | None]:
        return (None if image is None else image.digest() for image in self._objects())

    def __arrow_array__(self, type: pa.DataType | None = None) -> pa.ChunkedArray:
        """The column in chunks of bounded size, without a copy."""
        chunks = [part for chunk in self._pa_array.chunks for part in _split_chunk(chunk)]
        return pa.chunked_array(chunks, IMAGE)

    def __reduce__(self) -> tuple[type[ImageArray], tuple[pa.Array | pa.ChunkedArray]]:
        # pandas' own combines the chunks, which copies even a single one. That is needed only for
        # slices, which would be pickled with the whole array behind them.
        array = self._pa_array
        pickled_bytes = sum(chunk.get_total_buffer_size() for chunk in array.chunks)
        is_whole = pickled_bytes <= array.nbytes * _PICKLED_EXCESS
        return ImageArray, (array if is_whole else array.combine_chunks(),)

    def _formatter(self, boxed: bool = False) -> Callable[[Any], str]:
        return str


ImageDtype.array_class = ImageArray


def is_image_dtype(dtype: object) -> bool:
    """True for `ImageDtype`, and for the plain Arrow struct that parquet may be read as."""
    return isinstance(dtype, pd.ArrowDtype) and holds_images(dtype.pyarrow_dtype)


def image_views(images: pa.StructArray) -> list[np.ndarray | None]:
    """Views of the images of an Arrow array; None for a missing image."""
    data = images.field("data")
    flat, offsets = _flat(data), _offsets(data)
    shapes = zip(
        *(images.field(name).to_pylist() for name in ("height", "width", "channels")), strict=True
    )
    present = images.is_valid().to_pylist()
    return [
        from_bytes(flat[start:end], shape) if is_present else None
        for start, end, shape, is_present in zip(
            offsets[:-1], offsets[1:], shapes, present, strict=True
        )
    ]


def image_structs(images: list[np.ndarray | None]) -> pa.StructArray:
    """Copy images to one Arrow array."""
    errors = ["no image" if image is None else None for image in images]
    return image_array(pixels_of(images, errors, np))


def image_array(pixels: Pixels) -> pa.StructArray:
    """Arrow array of a partition's images, without a copy of the pixels."""
    edges = [pa.array(pixels.shapes[:, axis]) for axis in range(3)]
    missing = np.array([error is not None for error in pixels.errors], bool)
    return _image_array(pixels.flat, pixels.sizes, edges, pa.array(missing))


def _image_array(
    flat: np.ndarray, sizes: np.ndarray, edges: list[pa.Array], missing: pa.Array
) -> pa.StructArray:
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(flat)]
    data = pa.Array.from_buffers(pa.large_binary(), len(sizes), buffers)
    return pa.StructArray.from_arrays([data, *edges], fields=list(IMAGE), mask=missing)


def _take_images(images: pa.ChunkedArray, rows: pa.Array) -> pa.StructArray:
    """Copy rows, null for a null, to one array in memory of the pool."""
    slices: list[np.ndarray] = []
    for chunk in images.chunks:
        data = chunk.field("data")
        flat = _flat(data)
        slices += [flat[start:end] for start, end in itertools.pairwise(_offsets(data).tolist())]
    slices.append(np.empty(0, np.uint8))
    taken = [slices[row] for row in rows.fill_null(len(images)).to_pylist()]
    sizes = np.array([len(pixels) for pixels in taken], np.int64)
    flat = pixel_memory.take(int(sizes.sum()))[: sizes.sum()]
    np.concatenate([*taken, slices[-1]], out=flat)
    edges = [pc.struct_field(images, name).take(rows).combine_chunks() for name in IMAGE.names[1:]]
    return _image_array(flat, sizes, edges, edges[0].is_null())


def _flat(data: pa.LargeBinaryArray) -> np.ndarray:
    return np.frombuffer(data.buffers()[2] or b"", np.uint8)


def _offsets(data: pa.LargeBinaryArray) -> np.ndarray:
    """Arrow's offsets of the rows, int64 (rows + 1,)."""
    offsets = np.frombuffer(data.buffers()[1] or bytes(8), np.int64)
    return offsets[data.offset : data.offset + len(data) + 1]


def _split_chunk(images: pa.StructArray) -> list[pa.StructArray]:
    """Slices of at most about ``_CHUNK_BYTES``; of an empty chunk, itself."""
    offsets = _offsets(images.field("data"))
    cuts = 1 + np.flatnonzero(np.diff((offsets[:-1] - offsets[0]) // _CHUNK_BYTES))
    edges = [0, *cuts.tolist(), len(images)]
    return [images.slice(start, end - start) for start, end in itertools.pairwise(edges)]


@make_array_nonempty.register(ImageDtype)
def _two_images(dtype: ImageDtype) -> ImageArray:
    return ImageArray(pa.chunked_array([image_structs([np.zeros((1, 1, 3), np.uint8)] * 2)]))
