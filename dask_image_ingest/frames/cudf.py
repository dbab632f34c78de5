"""The GPU backend: cuDF over memory that DALI fills."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import cudf
import cupy
import numpy as np
import pyarrow as pa
import pylibcudf as plc

from dask_image_ingest.decode import Pixels
from dask_image_ingest.errors import PartitionTooLargeError
from dask_image_ingest.frames import NewColumn
from dask_image_ingest.images import FrameImages, SeriesImages
from dask_image_ingest.schema import IMAGE

# The offsets of a cuDF list column are int32.
_LARGEST_PARTITION = 2**31 - 1

# Of a GPU's memory, as dask_cudf's own readers have it.
_PARTITION_SHARE = 1 / 32

# What dask_cudf takes a GPU to have that it can't see.
_UNKNOWN_GPU_MEMORY = 8 * 2**30


class DevicePixels:
    """A flat buffer of pixels in GPU memory."""

    def __init__(self, nbytes: int) -> None:
        self._flat = cupy.empty(nbytes, cupy.uint8)
        self._end = 0
        # Memory from a pool is free on the stream that asked for it, and on no other: DALI has to
        # copy on this one.
        self._stream = cupy.cuda.get_current_stream()

    def append(self, images: Any) -> None:
        """Take a batch: a DALI tensor list whole, or a list of NumPy arrays or DALI tensors."""
        if not isinstance(images, list):
            self._copy(images, sum(math.prod(shape) for shape in images.shape()))
            return
        for image in images:
            if isinstance(image, np.ndarray):
                self._room(image.size).set(np.ascontiguousarray(image).reshape(-1))
            else:
                self._copy(image, math.prod(image.shape()))

    def finish(self) -> cupy.ndarray:
        """The bytes taken."""
        flat = self._flat[: self._end]
        if len(flat) < len(self._flat) * 3 // 4:
            # Many images could not be decoded: what was reserved for them goes back to the pool.
            flat = flat.copy()
        # pylibcudf wraps memory without waiting for whoever still writes to it.
        self._stream.synchronize()
        return flat

    def _copy(self, images: Any, nbytes: int) -> None:
        room = self._room(nbytes)
        if nbytes:
            # Not blocking the host is safe: DALI takes its own memory back after the copy. A kernel
            # copies a batch of many small images in one launch.
            images.copy_to_external(
                ctypes.c_void_p(room.data.ptr),
                cuda_stream=ctypes.c_void_p(self._stream.ptr),
                non_blocking=True,
                use_copy_kernel=True,
            )

    def _room(self, nbytes: int) -> cupy.ndarray:
        start, self._end = self._end, self._end + nbytes
        if self._end > _LARGEST_PARTITION:
            raise PartitionTooLargeError(
                "the images of a partition became larger than their headers foretold, and a cuDF "
                "list column holds at most 2.1 GB of pixels. Pass partition_size='512 MiB' to "
                "split shards into smaller partitions"
            )
        if self._end > len(self._flat):
            grown = cupy.empty(max(self._end, len(self._flat) * 3 // 2), cupy.uint8)
            grown[:start] = self._flat[:start]
            self._flat = grown
        return self._flat[start : self._end]


class CudfBackend:
    """Partitions are cuDF dataframes; pixels lie in GPU memory."""

    name: Literal["cudf"] = "cudf"
    device: Literal["gpu"] = "gpu"
    largest_partition = _LARGEST_PARTITION
    numpy = cupy

    def pixel_buffer(self, nbytes: int) -> DevicePixels:
        """A buffer for about ``nbytes`` of pixels."""
        return DevicePixels(nbytes)

    def frame(self, table: pa.Table, index: np.ndarray, pixels: Pixels | None) -> cudf.DataFrame:
        """A dataframe of ``table``'s columns, and ``image`` last where there are pixels."""
        arrays = {name: _for_cudf(table.column(name)) for name in table.column_names}
        columns = {name: plc.Column.from_arrow(array) for name, array in arrays.items()}
        names = {name: _child_names(array.type) for name, array in arrays.items()}
        if pixels is not None:
            columns["image"] = _image_column(pixels)
            names["image"] = _child_names(IMAGE)
        # Made at once, since a column that is assigned to a frame is copied.
        return cudf.DataFrame.from_pylibcudf(
            plc.Table(list(columns.values())),
            metadata={
                "columns": list(columns),
                "child_names": names,
                "index": _cudf_index(index),
            },
        )

    def to_arrow(self, frame: cudf.DataFrame) -> pa.Table:
        """Metadata columns of a dataframe, on the host."""
        return frame.to_arrow(preserve_index=False)

    def with_images(self, frame: cudf.DataFrame, pixels: Pixels) -> cudf.DataFrame:
        """``frame`` with the columns ``error`` and ``image`` of a late decode."""
        errors = pa.table({"error": pa.array(pixels.errors, pa.string())})
        decoded = self.frame(errors, np.arange(len(frame)), pixels)
        decoded.index = frame.index
        return frame.assign(error=decoded["error"], image=decoded["image"])

    def meta(self, types: Mapping[str, pa.DataType]) -> cudf.DataFrame:
        """An empty dataframe with these columns."""
        table = pa.table({name: pa.array([], t) for name, t in types.items() if name != "image"})
        nothing = Pixels(cupy.empty(0, cupy.uint8), np.empty((0, 3), np.int32), [])
        frame = self.frame(table, np.empty(0, np.int64), nothing if "image" in types else None)
        return frame[list(types)]

    def is_images(self, dtype: Any) -> bool:
        """Whether a column of this dtype holds decoded images."""
        return isinstance(dtype, cudf.StructDtype) and set(dtype.fields) == set(IMAGE.names)

    def arrays(self, images: cudf.Series) -> list[cupy.ndarray | None]:
        """Views of each image of a column, without a copy."""
        if not len(images):
            return []
        fields = list(images.dtype.fields)
        present = images.notna().to_arrow().to_pylist()
        # cuDF's public ways to a buffer's pointer pin it in GPU memory for good, and every later
        # slice of the column becomes a copy. Inside this context it stays where it is, and what
        # owns the memory is all that the views need to outlive it.
        with images._column.access(mode="read", scope="internal") as column:
            struct = column.plc_column.struct_view()
            data, *edges = (struct.get_sliced_child(fields.index(name)) for name in IMAGE.names)
            flat = _cupy_view(data.list_view().child())
            offsets = _cupy_view(data.list_view().offsets())
            ends = offsets[data.offset() : data.offset() + len(images) + 1].get().tolist()
            shapes = zip(*(_cupy_view(edge).get().tolist() for edge in edges), strict=True)
        return [
            flat[start:end].reshape(shape) if there else None
            for start, end, shape, there in zip(ends[:-1], ends[1:], shapes, present, strict=True)
        ]

    def with_columns(
        self, frame: cudf.DataFrame, columns: Mapping[str, NewColumn], rows: Sequence[int]
    ) -> cudf.DataFrame:
        """``frame`` with new columns of ``rows``, null elsewhere."""
        made = {
            name: _new_column(values, rows, len(frame), type_)
            for name, (values, type_) in columns.items()
        }
        new = cudf.DataFrame.from_pylibcudf(
            plc.Table(list(made.values())),
            metadata={
                "columns": list(made),
                "child_names": {name: _child_names(_stored(t)) for name, (_, t) in columns.items()},
                "index": _cudf_index(np.arange(len(frame))),
            },
        )
        new.index = frame.index
        return frame.assign(**{name: new[name] for name in made})

    def values(self, series: cudf.Series) -> Any:
        """A column as an array, None where nulls or lists of differing lengths make that none."""
        if isinstance(series.dtype, cudf.ListDtype):
            lengths = series.list.len()
            if series.null_count or lengths.nunique() > 1:
                return None
            length = int(lengths.iloc[0]) if len(series) else 0
            return series.list.leaves.to_cupy().reshape(len(series), length)
        if series.dtype.kind == "f":
            return series.to_cupy(na_value=np.nan)
        if series.dtype.kind in "iub":
            return None if series.null_count else series.to_cupy()
        return np.array(series.to_arrow().to_pylist(), object)

    def host(self, array: cupy.ndarray) -> np.ndarray:
        """A copy of the array in host memory."""
        return array.get()

    def partition_memory(self) -> int:
        """A thirty-second of the smallest GPU's memory."""
        return int(_gpu_memory() * _PARTITION_SHARE)


def _for_cudf(column: pa.ChunkedArray) -> pa.Array:
    """The column as cuDF can hold it, which has no type for bytes but has lists of uint8."""
    array = column.combine_chunks()
    if pa.types.is_large_binary(array.type) or pa.types.is_fixed_size_binary(array.type):
        array = array.cast(pa.binary())
    if not pa.types.is_binary(array.type):
        return array
    # Both types lie in memory in the same way.
    validity, offsets, data = array.buffers()
    data = data or pa.py_buffer(b"")
    values = pa.Array.from_buffers(pa.uint8(), data.size, [None, data])
    return pa.Array.from_buffers(
        pa.list_(pa.uint8()),
        len(array),
        [validity, offsets or pa.py_buffer(bytes(4))],
        offset=array.offset,
        children=[values],
    )


def _stored(type_: pa.DataType) -> pa.DataType:
    return pa.list_(pa.uint8()) if pa.types.is_binary(type_) else type_


def _new_column(values: Any, rows: Sequence[int], length: int, type_: pa.DataType) -> plc.Column:
    """A column of ``values`` at ``rows``, null in between."""
    if isinstance(values, list):
        spread: list = [None] * length
        for row, value in zip(rows, values, strict=True):
            spread[row] = value
        return plc.Column.from_arrow(_for_cudf(pa.chunked_array([pa.array(spread, type_)])))
    present = np.zeros(length, np.bool_)
    present[rows] = True
    if pa.types.is_list(type_):
        values = cupy.asarray(values, type_.value_type.to_pandas_dtype())
        ends = np.cumsum(present * values.shape[1])
        offsets = np.concatenate([np.zeros(1, np.int64), ends]).astype(np.int32)
        flat = cupy.ascontiguousarray(values).reshape(-1)
        lists = [plc.Column.from_array(offsets), plc.Column.from_cuda_array_interface(flat)]
        column = plc.Column(plc.DataType(plc.TypeId.LIST), length, None, None, 0, 0, lists)
    else:
        flat = cupy.zeros(length, type_.to_pandas_dtype())
        flat[np.asarray(rows, np.int64)] = cupy.asarray(values)
        column = plc.Column.from_cuda_array_interface(flat)
    # pylibcudf wraps memory without waiting for whoever still writes to it.
    cupy.cuda.get_current_stream().synchronize()
    if present.all():
        return column
    return column.with_mask(*plc.transform.bools_to_mask(plc.Column.from_array(present)))


def _child_names(type_: pa.DataType) -> dict[str, dict]:
    """The names inside a nested type, which pylibcudf's columns don't carry."""
    if pa.types.is_struct(type_):
        return {field.name: _child_names(field.type) for field in type_}
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return {"offsets": {}, "element": _child_names(type_.value_type)}
    return {}


def _image_column(pixels: Pixels) -> plc.Column:
    ends = np.cumsum(pixels.shapes.astype(np.int64).prod(axis=1))
    offsets = np.concatenate([np.zeros(1, np.int64), ends]).astype(np.int32)
    flat = plc.Column.from_cuda_array_interface(pixels.flat)
    lists = [plc.Column.from_array(offsets), flat]
    data = plc.Column(plc.DataType(plc.TypeId.LIST), len(ends), None, None, 0, 0, lists)
    edges = (np.ascontiguousarray(pixels.shapes[:, axis]) for axis in range(3))
    children = [data, *(plc.Column.from_array(edge) for edge in edges)]
    present = np.array([error is None for error in pixels.errors], np.bool_)
    if not present.all():
        # libcudf wants the nulls of a struct to be nulls of its fields too.
        mask, nulls = plc.transform.bools_to_mask(plc.Column.from_array(present))
        children = [child.with_mask(mask, nulls) for child in children]
    return plc.Column.struct_from_children(children)


def _cudf_index(index: np.ndarray) -> cudf.Index:
    # A range weighs nothing, and most partitions have one.
    if len(index) and index[-1] - index[0] == len(index) - 1:
        return cudf.RangeIndex(int(index[0]), int(index[-1]) + 1)
    return cudf.Index(index)


def _cupy_view(column: plc.Column) -> cupy.ndarray:
    """A column's values where they lie; keeps their memory, whatever becomes of the column."""
    dtype = np.dtype(column.type().typestr)
    buffer = column.data()
    if not column.size() or buffer is None:
        return cupy.empty(0, dtype)
    memory = cupy.cuda.UnownedMemory(buffer.ptr, buffer.size, owner=buffer.owner.owner)
    pointer = cupy.cuda.MemoryPointer(memory, column.offset() * dtype.itemsize)
    return cupy.ndarray(column.size(), dtype, pointer)


def _gpu_memory() -> int:
    """Memory of the workers' smallest GPU, or of this machine's, asked for without using it."""
    from distributed.client import default_client
    from distributed.diagnostics import nvml

    try:
        workers = default_client().scheduler_info(n_workers=-1)["workers"].values()
        sizes = [worker["gpu"]["memory-total"] for worker in workers if "gpu" in worker]
    except ValueError:
        sizes = []
    if not sizes:
        try:
            sizes = [nvml.one_time()["memory-total"]]
        except RuntimeError:
            sizes = []
    return min((size for size in sizes if size), default=_UNKNOWN_GPU_MEMORY)


# A frame's accessor is a class attribute: cuDF warns where one takes the place of another.
if getattr(cudf.DataFrame, "images", None) is not FrameImages:
    cudf.api.extensions.register_dataframe_accessor("images")(FrameImages)
    cudf.api.extensions.register_series_accessor("images")(SeriesImages)
