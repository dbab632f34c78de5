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
from distributed import get_worker
from distributed.system import MEMORY_LIMIT

from dask_image_ingest.decode import Pixels, ResizedImage, as_bytes, decode_pool, decode_threads
from dask_image_ingest.frames.arrow_types import is_list, is_text
from dask_image_ingest.frames.backend import Backend, NewColumn, workers
from dask_image_ingest.frames.image_dtype import (
    IMAGE,
    ImageArray,
    ImageDtype,
    image_array,
    is_image_dtype,
)
from dask_image_ingest.frames.nested_dtype import list_values, nested_dtype
from dask_image_ingest.frames.pixel_pool import pixel_memory
from dask_image_ingest.frames.reference_dtype import REFERENCE, ReferenceDtype, is_reference_dtype


def assigned(frame: Any, columns: Mapping[Any, Any]) -> Any:
    """``frame`` with these columns, as ``assign`` gives it, which takes only names of strings."""
    made = frame.copy(deep=False)
    for name, values in columns.items():
        made[name] = values
    return made


def joined(arrays: Sequence[Any], backend: Backend) -> Any:
    """Images as one array (n, height, width, channels), or as a list where shapes or types differ.

    Images that lie side by side in one buffer are not copied; the result keeps the buffer.
    """
    first = arrays[0]
    if any(array.shape != first.shape or array.dtype != first.dtype for array in arrays):
        return list(arrays)
    if _side_by_side(arrays):
        return backend.numpy.lib.stride_tricks.as_strided(
            first, (len(arrays), *first.shape), (first.nbytes, *first.strides)
        )
    return backend.numpy.stack(arrays)


def runs(arrays: Sequence[Any], backend: Backend) -> Iterator[Any]:
    """Images as few flat arrays: one of all that lie side by side in one buffer, without a copy."""
    start = 0
    for end in range(1, len(arrays) + 1):
        if end == len(arrays) or not _side_by_side(arrays[end - 1 : end + 1]):
            flat = arrays[start].reshape(-1)
            size = sum(array.size for array in arrays[start:end])
            yield backend.numpy.lib.stride_tricks.as_strided(flat, (size,), flat.strides)
            start = end


def _side_by_side(arrays: Sequence[Any]) -> bool:
    # Addresses alone prove nothing: two buffers may be neighbours, and one of them go.
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
    """Owner of an array's memory, shared with its other views; None if the array owns it."""
    if hasattr(array, "__cuda_array_interface__"):
        return array.data.mem
    return array.base


def _address(array: Any) -> int:
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])


def to_frame(table: pa.Table, meta: pd.DataFrame) -> pd.DataFrame:
    """A frame again, of the columns of ``meta``."""
    told = json.loads(table.schema.metadata[b"pandas"])
    types = {column["field_name"]: column for column in told["columns"]}
    if told["creator"]["library"] == "cudf":  # which has fewer dtypes, by other names
        types = {name: column | {"numpy_type": None} for name, column in types.items()}
    columns = {
        name: _values(table.column(name), types[name], meta[name].dtype) for name in meta.columns
    }
    frame = pd.DataFrame(columns, index=_index(table, told, types, meta.index))
    return frame if len(meta.columns) else frame.set_axis(meta.columns, axis=1)


def index_columns(schema: pa.Schema) -> list[str]:
    """The columns of a table that are the index of its frame; none if that is a range."""
    told = json.loads(schema.metadata[b"pandas"])["index_columns"]
    return [name for name in told if isinstance(name, str)]


def _index(table: pa.Table, told: Any, types: Any, meta: pd.Index) -> pd.Index:
    (kept,) = told["index_columns"]
    if isinstance(kept, dict):
        return pd.RangeIndex(kept["start"], kept["stop"], kept["step"], name=meta.name)
    return pd.Index(_values(table.column(kept), types[kept], meta.dtype), name=meta.name)


def _values(column: pa.ChunkedArray, told: dict[str, Any], meta: Any) -> Any:
    """A column's values, in the dtype that they had."""
    if told["pandas_type"] == "categorical":
        return _categories(column.to_pandas(), told["metadata"]["ordered"], meta)
    dtype = meta
    if told["numpy_type"] not in (None, str(meta)):
        # A function that gave other types than it had said; those with no name stay Arrow's.
        with suppress(TypeError, ValueError, NotImplementedError):
            dtype = pd.api.types.pandas_dtype(told["numpy_type"])
    if hasattr(dtype, "__from_arrow__"):
        return dtype.__from_arrow__(column)
    values = column.to_pandas()
    return (values.astype(dtype) if dtype.kind in "iufb" else values).array


def _categories(values: pd.Series, ordered: bool, meta: Any) -> Any:
    # Parquet keeps only the categories that occur, and those of numbers as numbers.
    made = pd.Categorical(values, ordered=None if values.dtype == "category" else ordered)
    known = isinstance(meta, pd.CategoricalDtype) and set(made.categories) <= set(meta.categories)
    return made.astype(meta) if known else made


# Of a worker's memory: a partition may be copied twice by what follows, and a worker keeps several.
_PARTITION_SHARE = 1 / 16

# Of workers without a limit.
_ASSUMED = 8 << 30

# Bytes of encoded images that a task holds at once; of more, it reads one by one.
_MOST_ENCODED = 2**28

# Of a worker's memory, what may be kept for the next pixels when partitions are let go.
_KEPT_SHARE = 1 / 8

# Where a worker begins to spill (distributed.worker.memory.target).
_SPILL_SHARE = 0.6


def encoded_memory(nbytes: int) -> np.ndarray | None:
    """Memory for the encoded images of a partition, kept as that of pixels is; None if too much."""
    memory = _worker_memory()
    if nbytes > min(_MOST_ENCODED, memory * _PARTITION_SHARE):
        return None
    return pixel_memory.take(nbytes, int(memory * _KEPT_SHARE))


class HostPixels:
    """A flat buffer of pixels in host memory, to which each pixel is copied or resized once."""

    def __init__(self, nbytes: int) -> None:
        self._keep = int(_worker_memory() * _KEPT_SHARE)
        self._flat = pixel_memory.take(nbytes, self._keep)
        self._end = 0

    def append(self, images: Any) -> None:
        """Take a batch: a DALI tensor list, or a list of arrays, DALI tensors, `ResizedImage`."""
        if not len(images):
            return
        threads = decode_threads()
        if threads == 1 and not isinstance(images, list):
            room = self._room(sum(map(math.prod, images.shape())))
            images.copy_to_external(ctypes.c_void_p(room.ctypes.data))
            return
        sources = [i if isinstance(i, ResizedImage) else np.asarray(i) for i in images]
        ends = np.cumsum([source.nbytes for source in sources])
        room = self._room(int(ends[-1]))
        # All threads that decode take from it: DALI's own copy has one alone.
        undone = deque(zip(sources, np.split(room, ends[:-1]), strict=True))
        helpers = [decode_pool().submit(_write, undone) for _ in range(threads - 1)]
        _write(undone)
        for helper in helpers:
            # One that has not begun, since its thread decodes something else, is not waited for.
            if not helper.cancel():
                helper.result()

    def finish(self) -> np.ndarray:
        """The bytes taken."""
        return self._flat[: self._end]

    def _room(self, nbytes: int) -> np.ndarray:
        start, self._end = self._end, self._end + nbytes
        if self._end > len(self._flat):
            # More than the headers foretold, as after a transform that enlarges.
            larger = pixel_memory.take(max(self._end, len(self._flat) * 3 // 2), self._keep)
            larger[:start] = self._flat[:start]
            self._flat = larger
        return self._flat[start : self._end]


def _write(undone: deque[tuple[np.ndarray | ResizedImage, np.ndarray]]) -> None:
    """Write images to their places, as long as there are any."""
    while True:
        try:
            source, place = undone.popleft()
        except IndexError:
            return
        if isinstance(source, ResizedImage):
            source.write(place)
        else:
            place[:] = as_bytes(source)


class PandasBackend:
    """Partitions are pandas dataframes of Arrow types; pixels lie in host memory."""

    name: Literal["pandas"] = "pandas"
    device: Literal["cpu"] = "cpu"
    numpy = np

    @property
    def largest_partition(self) -> int:
        """Bytes that a worker holds before it spills: more would never come out whole."""
        return int(_worker_memory() * _SPILL_SHARE)

    def holds(self, type_: pa.DataType) -> bool:
        return True

    def thread_setup(self) -> Callable[[], None]:
        return _nothing

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
        return to_frame(table, meta)

    def with_images(
        self, frame: pd.DataFrame, pixels: Pixels, image: str = "image", error: str | None = "error"
    ) -> pd.DataFrame:
        made = {} if error is None else {error: _error_array(pixels.errors)}
        return assigned(frame, made | {image: _image_array(pixels)})

    def with_references(
        self,
        frame: pd.DataFrame,
        references: pa.Array | pa.ChunkedArray,
        image: str,
        error: str | None,
    ) -> pd.DataFrame:
        made = {} if error is None else {error: _error_array([None] * len(frame))}
        return assigned(frame, made | {image: ReferenceDtype().__from_arrow__(references)})

    def is_references(self, dtype: Any) -> bool:
        return is_reference_dtype(dtype)

    def meta(self, types: Mapping[str, pa.DataType]) -> pd.DataFrame:
        columns = {name: pd.array([], dtype=pandas_type(type_)) for name, type_ in types.items()}
        return pd.DataFrame(columns, index=pd.Index([], dtype="int64"))

    def is_images(self, dtype: Any) -> bool:
        return is_image_dtype(dtype)

    def arrays(self, images: pd.Series) -> list[np.ndarray | None]:
        column = images.array
        return (column if isinstance(column, ImageArray) else ImageArray(pa.array(column))).views()

    def with_columns(
        self, frame: pd.DataFrame, columns: Mapping[str, NewColumn], rows: Sequence[int]
    ) -> pd.DataFrame:
        places = None
        if len(rows) < len(frame):
            places = np.full(len(frame), -1, np.int64)
            places[rows] = np.arange(len(rows))
            places = pa.array(places, mask=places < 0)
        made = {}
        for name, (values, type_) in columns.items():
            array = _arrow(values, type_)
            array = array if places is None else array.take(places)
            made[name] = pandas_type(type_).__from_arrow__(array)
        return assigned(frame, made)

    def values(self, series: pd.Series) -> np.ndarray | None:
        dtype = series.dtype
        if isinstance(dtype, pd.ArrowDtype) and is_list(dtype.pyarrow_dtype):
            return list_values(pa.chunked_array(pa.array(series, from_pandas=True)))
        if pd.api.types.is_float_dtype(dtype):
            return series.to_numpy(_numpy_type(dtype), na_value=np.nan)
        if pd.api.types.is_integer_dtype(dtype) or pd.api.types.is_bool_dtype(dtype):
            return None if series.hasnans else series.to_numpy(_numpy_type(dtype))
        return series.to_numpy(object, na_value=None)

    def normalized(
        self, images: Sequence[np.ndarray], scale: np.ndarray, shift: np.ndarray
    ) -> np.ndarray:
        height, width, channels = images[0].shape
        made = np.empty((len(images), channels, height, width), np.float32)
        scale, shift = scale[:, None, None], shift[:, None, None]
        # One by one: an image stays in the cache from the first step to the last.
        for image, place in zip(images, made, strict=True):
            np.multiply(np.ascontiguousarray(image.transpose(2, 0, 1)), scale, out=place)
            place += shift
        return made

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
        return int(_worker_memory() * _PARTITION_SHARE)


def pandas_type(type_: pa.DataType) -> pd.api.extensions.ExtensionDtype:
    """The pandas dtype of an Arrow type: strings as dask has them, all else as Arrow has it."""
    if type_ is IMAGE:
        return ImageDtype()
    if type_.equals(REFERENCE):
        return ReferenceDtype()
    if pa.types.is_nested(type_):
        return nested_dtype(type_)
    return pd.StringDtype("pyarrow") if is_text(type_) else pd.ArrowDtype(type_)


def _nothing() -> None:
    pass


def _arrow(values: Any, type_: pa.DataType) -> pa.Array:
    if not pa.types.is_list(type_):
        return pa.array(values, type_)
    count, length = values.shape
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), type_.value_type)
    return pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * length, flat, type=type_)


def _numpy_type(dtype: Any) -> Any:
    return dtype.numpy_dtype if isinstance(dtype, pd.api.extensions.ExtensionDtype) else dtype


def _pandas_index(index: np.ndarray) -> pd.Index:
    # A range takes no memory, and most partitions have one.
    if len(index) and index[-1] - index[0] == len(index) - 1:
        return pd.RangeIndex(int(index[0]), int(index[-1]) + 1)
    return pd.Index(index)


def _error_array(errors: Sequence[str | None]) -> Any:
    return pd.array([error or None for error in errors], dtype=pandas_type(pa.string()))


def _image_array(pixels: Pixels) -> ImageArray:
    return ImageArray(image_array(pixels))


def _worker_memory() -> int:
    try:
        return get_worker().memory_manager.memory_limit or MEMORY_LIMIT
    except ValueError:  # not in a worker: the client plans for the workers it has
        pass
    limits = [worker["memory_limit"] for worker in workers()]
    # That of this machine says nothing where there are workers: it may be a login node.
    return min((limit for limit in limits if limit), default=_ASSUMED if limits else MEMORY_LIMIT)
