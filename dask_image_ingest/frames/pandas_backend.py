"""The pandas backend: Arrow and NumPy memory on the host."""

from __future__ import annotations

import ctypes
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa

from dask_image_ingest.client import worker_memory
from dask_image_ingest.decode import Pixels, ResizedImage, as_bytes, decode_pool, decode_threads
from dask_image_ingest.frames.arrow_types import (
    has_type,
    is_list,
    is_text,
    regular,
    row_values,
    tensor_type,
)
from dask_image_ingest.frames.backend import Backend, NewColumn
from dask_image_ingest.frames.image_dtype import (
    IMAGE,
    ImageArray,
    ImageDtype,
    image_array,
    is_image_dtype,
)
from dask_image_ingest.frames.nested_dtype import (
    TensorColumn,
    TensorDtype,
    list_values,
    nested_dtype,
    one_chunk,
    tensor_array,
)
from dask_image_ingest.frames.pixel_pool import pixel_memory
from dask_image_ingest.frames.reference_dtype import REFERENCE, ReferenceDtype, is_reference_dtype
from dask_image_ingest.typedefs import Array, Dtype, ImageBatch


def _assigned(frame: pd.DataFrame, columns: Mapping[Any, Any]) -> pd.DataFrame:
    """``frame.assign`` for column names of any type."""
    result = frame.copy(deep=False)
    for name, values in columns.items():
        result[name] = values
    return result


def stack_views(arrays: Sequence[Array], backend: Backend) -> Array:
    """Stack images to (n, height, width, channels), or return a list if shapes or dtypes differ.

    If they are adjacent in one buffer, the result is a view of it; otherwise a copy.
    """
    first = arrays[0]
    if any(array.shape != first.shape or array.dtype != first.dtype for array in arrays):
        return list(arrays)
    if _are_adjacent(arrays):
        return backend.numpy.lib.stride_tricks.as_strided(
            first, (len(arrays), *first.shape), (first.nbytes, *first.strides)
        )
    return backend.numpy.stack(arrays)


def flat_views(arrays: Sequence[Array], backend: Backend) -> Iterator[Any]:
    """Flat views, one for each run of images that are adjacent in one buffer."""
    start = 0
    for end in range(1, len(arrays) + 1):
        if end == len(arrays) or not _are_adjacent(arrays[end - 1 : end + 1]):
            flat = arrays[start].reshape(-1)
            size = sum(array.size for array in arrays[start:end])
            yield backend.numpy.lib.stride_tricks.as_strided(flat, (size,), flat.strides)
            start = end


def _are_adjacent(arrays: Sequence[Array]) -> bool:
    # Compare owners too: of two neighbouring buffers, one could be freed before the other.
    buffer = _buffer(arrays[0])
    if buffer is None or any(_buffer(array) is not buffer for array in arrays):
        return False
    end = _address(arrays[0])
    for array in arrays:
        if _address(array) != end:
            return False
        end += array.nbytes
    return True


def _buffer(array: Any) -> Any:
    """Owner of a view's memory; None if the array owns it itself."""
    if hasattr(array, "__cuda_array_interface__"):
        return array.data.mem
    return array.base


def _address(array: Array) -> int:
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])


def _restored_frame(table: pa.Table, meta: pd.DataFrame) -> pd.DataFrame:
    """Restore the columns of ``meta`` from a stored table."""
    metadata = json.loads(table.schema.metadata[b"pandas"])
    descriptions = {column["field_name"]: column for column in metadata["columns"]}
    if metadata["creator"]["library"] == "cudf":  # its dtype names don't apply
        descriptions = {n: column | {"numpy_type": None} for n, column in descriptions.items()}
    columns = {
        name: _restored(table.column(name), descriptions[name], meta[name].dtype)
        for name in meta.columns
    }
    frame = pd.DataFrame(columns, index=_index(table, metadata, descriptions, meta.index))
    return frame if len(meta.columns) else frame.set_axis(meta.columns, axis=1)


def index_columns(schema: pa.Schema) -> list[str]:
    """Columns of a stored table that are its frame's index; empty if the index is a range."""
    index = json.loads(schema.metadata[b"pandas"])["index_columns"]
    return [name for name in index if isinstance(name, str)]


def _index(
    table: pa.Table, metadata: Mapping[str, Any], descriptions: Mapping[str, Any], meta: pd.Index
) -> pd.Index:
    (index,) = metadata["index_columns"]
    if isinstance(index, dict):
        return pd.RangeIndex(index["start"], index["stop"], index["step"], name=meta.name)
    values = _restored(table.column(index), descriptions[index], meta.dtype)
    return pd.Index(values, name=meta.name)


def _restored(column: pa.ChunkedArray, description: dict[str, Any], meta: Dtype) -> Any:
    """Values of a stored column in their original dtype; ``meta`` is the expected one."""
    if description["pandas_type"] == "categorical" and description["metadata"]:
        return _categories(column.to_pandas(), description["metadata"]["ordered"], meta)
    dtype = meta
    if description["numpy_type"] in (None, str(meta)):
        type_ = meta.pyarrow_dtype if isinstance(meta, pd.ArrowDtype) else pa.null()
        if has_type(type_, pa.types.is_dictionary):
            column = pa.chunked_array([_encoded(chunk, type_) for chunk in column.chunks], type_)
    elif isinstance(meta, pd.ArrowDtype) and pa.types.is_decimal(column.type):
        dtype = pd.ArrowDtype(column.type)  # the description says "object"
    elif isinstance(meta, pd.DatetimeTZDtype) and pa.types.is_timestamp(column.type):
        pass  # the description has no time zone, and of old versions of pyarrow another unit
    else:
        # A function returned another dtype than its meta. Arrow's if pandas has no such name.
        with suppress(TypeError, ValueError, NotImplementedError):
            dtype = pd.api.types.pandas_dtype(description["numpy_type"])
    if hasattr(dtype, "__from_arrow__"):
        return dtype.__from_arrow__(column)
    values = column.to_pandas()
    if isinstance(values.dtype, pd.DatetimeTZDtype) and isinstance(dtype, np.dtype):
        dtype = pd.DatetimeTZDtype(np.datetime_data(dtype)[0], values.dtype.tz)
    return (values.astype(dtype) if dtype.kind in "iufbmM" else values).array


def _encoded(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """An array of a type with dictionaries; parquet keeps those of strings, else the values."""
    if array.type == type_:
        return array
    if pa.types.is_dictionary(type_):
        encoded = array.cast(type_.value_type).dictionary_encode()
        indices = encoded.indices.cast(type_.index_type)
        return pa.DictionaryArray.from_arrays(indices, encoded.dictionary, ordered=type_.ordered)
    if pa.types.is_struct(type_):
        fields = [_encoded(array.field(number), field.type) for number, field in enumerate(type_)]
        return pa.StructArray.from_arrays(fields, fields=list(type_), mask=array.is_null())
    items = _encoded(array.values, type_.field(0).type)
    own = array.buffers()[: 1 if pa.types.is_fixed_size_list(type_) else 2]
    return pa.Array.from_buffers(type_, len(array), own, offset=array.offset, children=[items])


def _categories(values: pd.Series, ordered: bool, meta: Dtype) -> Any:
    # Parquet keeps only the categories that occur, and numeric categories as plain numbers.
    result = pd.Categorical(values, ordered=None if values.dtype == "category" else ordered)
    fits = isinstance(meta, pd.CategoricalDtype) and set(result.categories) <= set(meta.categories)
    return result.astype(meta) if fits else result


# Share of a worker's memory for a partition: operations may copy it twice, and a worker holds
# several.
_PARTITION_SHARE = 1 / 16

# Most bytes of encoded images that a task reads at once; beyond, it reads them one by one.
_MAX_ENCODED = 2**28

# Where a worker begins to spill (distributed.worker.memory.target).
_SPILL_SHARE = 0.6


def encoded_memory(nbytes: int) -> np.ndarray | None:
    """Memory for a partition's encoded images, from the pool of pixels; None if too large."""
    too_large = nbytes > min(_MAX_ENCODED, worker_memory() * _PARTITION_SHARE)
    return None if too_large else pixel_memory.take(nbytes)


class HostPixels:
    """`PixelBuffer` in host memory; images are copied or resized straight into it."""

    def __init__(self, nbytes: int) -> None:
        self._flat = pixel_memory.take(nbytes)
        self._end = 0

    def append(self, images: ImageBatch) -> None:
        """Append a batch: a DALI tensor list, or a list of arrays, DALI tensors, `ResizedImage`."""
        if not len(images):
            return
        threads = decode_threads()
        if threads == 1 and not isinstance(images, list):
            out = self._reserve(sum(map(math.prod, images.shape())))
            images.copy_to_external(ctypes.c_void_p(out.ctypes.data))
            return
        sources = [i if isinstance(i, ResizedImage) else np.asarray(i) for i in images]
        ends = np.cumsum([source.nbytes for source in sources])
        out = self._reserve(int(ends[-1]))
        # Copy with all decode threads; DALI's own copy uses one.
        queue = deque(zip(sources, np.split(out, ends[:-1]), strict=True))
        helpers = [decode_pool().submit(_write, queue) for _ in range(threads - 1)]
        _write(queue)
        for helper in helpers:
            # Don't wait for a helper that has not started because its thread is busy decoding.
            if not helper.cancel():
                helper.result()

    def finish(self) -> np.ndarray:
        """All bytes as one array."""
        return self._flat[: self._end]

    def _reserve(self, nbytes: int) -> np.ndarray:
        start, self._end = self._end, self._end + nbytes
        if self._end > len(self._flat):
            # More than estimated from the headers, for example after a transform that enlarges.
            larger = pixel_memory.take(max(self._end, len(self._flat) * 3 // 2))
            larger[:start] = self._flat[:start]
            self._flat = larger
        return self._flat[start : self._end]


def _write(queue: deque[tuple[np.ndarray | ResizedImage, np.ndarray]]) -> None:
    """Write images to their destinations until the queue is empty."""
    while True:
        try:
            source, destination = queue.popleft()
        except IndexError:
            return
        if isinstance(source, ResizedImage):
            source.write(destination)
        elif source.flags.c_contiguous:
            destination[:] = as_bytes(source)
        else:  # a slice of a picture
            destination.view(source.dtype).reshape(source.shape)[...] = source


class PandasBackend:
    """Backend whose partitions are pandas dataframes of Arrow types, with pixels on the host."""

    name: Literal["pandas"] = "pandas"
    device: Literal["cpu"] = "cpu"
    numpy = np

    @property
    def largest_partition(self) -> int:
        """Bytes that a worker holds before it spills: a larger partition could not be computed."""
        return int(worker_memory() * _SPILL_SHARE)

    def holds(self, type_: pa.DataType) -> bool:
        return True

    def thread_setup(self) -> Callable[[], None]:
        return lambda: None

    def pixel_buffer(self, nbytes: int) -> HostPixels:
        return HostPixels(nbytes)

    def frame(self, table: pa.Table, index: np.ndarray, pixels: Pixels | None) -> pd.DataFrame:
        frame = table.to_pandas(types_mapper=pandas_type)
        frame.index = _pandas_index(index)
        if pixels is not None:
            frame["image"] = pd.Series(_image_array(pixels), index=frame.index)
        return frame

    def to_arrow(self, frame: pd.DataFrame) -> pa.Table:
        return pa.Table.from_pandas(frame, preserve_index=False)

    def to_storage(self, frame: pd.DataFrame) -> pa.Table:
        return pa.Table.from_pandas(frame)

    def from_storage(self, table: pa.Table, meta: pd.DataFrame) -> pd.DataFrame:
        return _restored_frame(table, meta)

    def with_images(
        self, frame: pd.DataFrame, pixels: Pixels, image: str, error: str | None
    ) -> pd.DataFrame:
        errors = {} if error is None else {error: _error_array(pixels.errors)}
        return _assigned(frame, errors | {image: _image_array(pixels)})

    def with_references(
        self,
        frame: pd.DataFrame,
        references: pa.Array | pa.ChunkedArray,
        image: str,
        error: str | None,
    ) -> pd.DataFrame:
        errors = {} if error is None else {error: _error_array([None] * len(frame))}
        return _assigned(frame, errors | {image: ReferenceDtype().__from_arrow__(references)})

    def is_references(self, dtype: Dtype) -> bool:
        return is_reference_dtype(dtype)

    def meta(self, types: Mapping[str, pa.DataType]) -> pd.DataFrame:
        columns = {name: pd.array([], dtype=pandas_type(type_)) for name, type_ in types.items()}
        return pd.DataFrame(columns, index=pd.Index([], dtype="int64"))

    def is_images(self, dtype: Dtype) -> bool:
        return is_image_dtype(dtype)

    def arrays(self, images: pd.Series) -> list[np.ndarray | None]:
        column = images.array
        return (column if isinstance(column, ImageArray) else ImageArray(pa.array(column))).views()

    def with_columns(
        self, frame: pd.DataFrame, columns: Mapping[str, NewColumn], rows: Sequence[int]
    ) -> pd.DataFrame:
        positions = None  # of each row's value; null for rows without one
        if len(rows) < len(frame):
            positions = np.full(len(frame), -1, np.int64)
            positions[rows] = np.arange(len(rows))
        arrays = {}
        for name, (values, type_) in columns.items():
            array = _arrow(values, type_)
            array = array if positions is None else _taken(array, positions)
            arrays[name] = pandas_type(type_).__from_arrow__(array)
        return _assigned(frame, arrays)

    def values(self, series: pd.Series) -> np.ndarray | None:
        dtype = series.dtype
        if isinstance(series.array, TensorColumn):
            return series.array.numbers()
        if tensors := _tensor_dtype(dtype):
            return tensors.__from_arrow__(pa.array(series)).numbers()
        if isinstance(dtype, pd.ArrowDtype) and is_list(dtype.pyarrow_dtype):
            return list_values(pa.chunked_array(pa.array(series, from_pandas=True)))
        if pd.api.types.is_float_dtype(dtype):
            return series.to_numpy(_numpy_type(dtype), na_value=np.nan)
        if pd.api.types.is_integer_dtype(dtype) or pd.api.types.is_bool_dtype(dtype):
            return None if series.hasnans else series.to_numpy(_numpy_type(dtype))
        return series.to_numpy(object, na_value=None)

    def has_rows(self, dtype: Dtype) -> bool:
        if pd.api.types.is_object_dtype(dtype) and not isinstance(dtype, pd.ArrowDtype):
            return True
        is_nested = isinstance(dtype, pd.ArrowDtype) and pa.types.is_nested(dtype.pyarrow_dtype)
        return is_nested and _tensor_dtype(dtype) is None and not is_reference_dtype(dtype)

    def rows(self, series: pd.Series) -> list[Any]:
        if series.dtype == object:
            return [_object_row(value) for value in series]
        return row_values(one_chunk(pa.array(series, from_pandas=True)))

    def normalized(
        self, images: Sequence[np.ndarray], scale: np.ndarray, shift: np.ndarray
    ) -> np.ndarray:
        height, width, channels = images[0].shape
        batch = np.empty((len(images), channels, height, width), np.float32)
        scale, shift = scale[:, None, None], shift[:, None, None]
        # Image by image, so that each stays in the CPU's cache.
        for image, out in zip(images, batch, strict=True):
            np.multiply(np.ascontiguousarray(image.transpose(2, 0, 1)), scale, out=out)
            out += shift
        return batch

    def count_levels(self, images: Sequence[np.ndarray]) -> np.ndarray:
        counts = np.zeros((images[0].shape[2], 256), np.int64)
        for array in images:
            for channel, levels in enumerate(counts):
                levels += np.bincount(array[:, :, channel].reshape(-1), minlength=256)
        return counts

    def host(self, array: np.ndarray) -> np.ndarray:
        return array

    def partition_memory(self) -> int:
        """A sixteenth of a worker's memory."""
        return int(worker_memory() * _PARTITION_SHARE)


def pandas_type(type_: pa.DataType) -> pd.api.extensions.ExtensionDtype:
    """Pandas dtype for an Arrow type: Dask's for strings, this package's, or Arrow's."""
    if type_ is IMAGE:
        return ImageDtype()
    if type_.equals(REFERENCE):
        return ReferenceDtype()
    if (tensors := tensor_type(type_)) is not None:
        return TensorDtype(tensors)
    if pa.types.is_nested(type_):
        return nested_dtype(type_)
    return pd.StringDtype("pyarrow") if is_text(type_) else pd.ArrowDtype(type_)


def _tensor_dtype(dtype: Dtype) -> TensorDtype | None:
    """`TensorDtype` for its own columns, and for those of Arrow's types; None for others."""
    type_ = tensor_type(dtype.pyarrow_dtype) if isinstance(dtype, pd.ArrowDtype) else None
    return None if type_ is None else TensorDtype(type_)


def _object_row(value: object) -> Any:
    """A Python object of a column; a list of lists of parquet is an array of arrays."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        return regular([_object_row(item) for item in value])
    return None if value is None or value is pd.NA else value


def _taken(values: pa.Array | pa.ChunkedArray, positions: np.ndarray) -> Any:
    """Values at ``positions``; null at those below 0."""
    if isinstance(values, pa.Array):
        return values.take(pa.array(positions, mask=positions < 0))
    # Arrow would make one chunk of them first, which their 32-bit offsets do not allow.
    follows = np.where(positions[:-1] < 0, positions[1:] < 0, np.diff(positions) == 1)
    chunks: list[pa.Array] = []
    for run in np.split(positions, np.flatnonzero(~follows) + 1):
        if run[0] < 0:
            chunks.append(pa.nulls(len(run), values.type))
        else:
            chunks += values.slice(run[0], len(run)).chunks
    return pa.chunked_array(chunks, values.type)


def _arrow(values: Any, type_: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if tensors := tensor_type(type_):
        return tensor_array(np.asarray(values), tensors)
    if not pa.types.is_list(type_):
        return pa.array(values, type_, from_pandas=True)  # NaN is null
    count, length = values.shape
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), type_.value_type)
    return pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * length, flat, type=type_)


def _numpy_type(dtype: Dtype) -> Any:
    return dtype.numpy_dtype if isinstance(dtype, pd.api.extensions.ExtensionDtype) else dtype


def _pandas_index(index: np.ndarray) -> pd.Index:
    # A range, as most partitions have, takes no memory.
    if len(index) and index[-1] - index[0] == len(index) - 1:
        return pd.RangeIndex(int(index[0]), int(index[-1]) + 1)
    return pd.Index(index)


def _error_array(errors: Sequence[str | None]) -> Any:
    return pd.array([error or None for error in errors], dtype=pandas_type(pa.string()))


def _image_array(pixels: Pixels) -> ImageArray:
    return ImageArray(image_array(pixels))
