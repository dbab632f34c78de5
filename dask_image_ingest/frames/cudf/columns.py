"""cuDF columns and frames: made of Arrow, of pixels, of types alone; read, stored and restored."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import cudf
import cupy
import numpy as np
import pandas as pd
import pyarrow as pa
import pylibcudf as plc

from dask_image_ingest.decode import Pixels, from_bytes, pixels_of
from dask_image_ingest.frames.backend import NewColumn, gpus, require_gpu
from dask_image_ingest.frames.cudf.column_types import as_stored, stored, stored_types, with_bytes
from dask_image_ingest.frames.cudf.pixels import check_pixels
from dask_image_ingest.frames.image_dtype import (
    IMAGE,
    as_images,
    holds_images,
    image_array,
    image_views,
)
from dask_image_ingest.frames.reference_dtype import REFERENCE

_NO_NUMBERS = np.empty(0, np.int64)


def make_frame(table: pa.Table, index: cudf.Index, pixels: Pixels | None) -> cudf.DataFrame:
    """A frame of ``table``'s columns, and ``image`` last where there are pixels."""
    types = dict(zip(table.column_names, table.schema.types, strict=True))
    if pixels is not None:
        types["image"] = IMAGE
    types = stored_types(types)
    if not len(index) and not gpus():
        return empty_frame(types, index)
    require_gpu()
    columns = {name: _arrow_column(table.column(name)) for name in table.column_names}
    if pixels is not None:
        columns["image"] = _image_column(pixels) if len(index) else _empty_column(types["image"])
    return _frame_of(columns, types, index)


def empty_frame(
    types: Mapping[str, pa.DataType], index: cudf.Index | None = None
) -> cudf.DataFrame:
    """A frame of no rows; unlike any other, it can be made where there is no GPU."""
    types = stored_types(types)
    columns = {name: _empty_column(type_) for name, type_ in types.items()}
    return _frame_of(columns, types, make_index(_NO_NUMBERS) if index is None else index)


def frame_of_new(
    columns: Mapping[str, NewColumn], rows: Sequence[int], index: cudf.Index
) -> cudf.DataFrame:
    """A frame of columns whose values belong to ``rows``; null in the others."""
    types = {name: type_ for name, (_, type_) in columns.items()}
    if not len(index):
        return empty_frame(types, index)
    made = {n: _new_column(values, rows, len(index), t) for n, (values, t) in columns.items()}
    return _frame_of(made, stored_types(types), index)


def with_columns_of(frame: cudf.DataFrame, new: cudf.DataFrame) -> cudf.DataFrame:
    """``frame`` with the columns of ``new``, which has its index, in place of its own or behind.

    ``DataFrame.assign`` would copy them, which for pixels is twice the memory.
    """
    # A shallow copy of its own: whoever writes to the result writes to nothing of the frame.
    columns = columns_of(frame.copy(deep=False)) | columns_of(new)
    return cudf.DataFrame._from_data(columns, index=frame.index)


def columns_of(frame: cudf.DataFrame) -> dict[Any, Any]:
    """The columns of a frame as cuDF itself has them."""
    return {name: frame[name]._column for name in frame.columns}


def make_index(numbers: np.ndarray) -> cudf.Index:
    """An index of these numbers, which ascend."""
    if not len(numbers):
        return cudf.Index.from_pylibcudf(_empty_column(pa.int64()))
    # A range takes no memory, and most partitions have one.
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return cudf.RangeIndex(int(numbers[0]), int(numbers[-1]) + 1)
    return cudf.Index(numbers)


def _frame_of(
    columns: Mapping[str, plc.Column], types: Mapping[str, pa.DataType], index: cudf.Index
) -> cudf.DataFrame:
    return cudf.DataFrame.from_pylibcudf(
        plc.Table(list(columns.values())),
        metadata={
            "columns": list(columns),
            "child_names": {name: _child_names(types[name]) for name in columns},
            "index": index,
        },
    )


def _child_names(type_: pa.DataType) -> dict[str, dict[str, Any]]:
    """The names inside a nested type, which pylibcudf's columns don't carry."""
    if pa.types.is_struct(type_):
        return {field.name: _child_names(field.type) for field in type_}
    if pa.types.is_list(type_):
        return {"offsets": {}, "element": _child_names(type_.value_type)}
    return {}


def _arrow_column(column: pa.ChunkedArray) -> plc.Column:
    return plc.Column.from_arrow(as_stored(column.combine_chunks()))


def _empty_column(type_: pa.DataType) -> plc.Column:
    if pa.types.is_struct(type_):
        id_, children = plc.TypeId.STRUCT, [_empty_column(field.type) for field in type_]
    elif pa.types.is_list(type_):
        id_, children = (
            plc.TypeId.LIST,
            [_empty_column(pa.int32()), _empty_column(type_.value_type)],
        )
    else:
        return plc.Column(plc.DataType.from_arrow(type_), 0, None, None, 0, 0, [])
    return plc.Column(plc.DataType(id_), 0, None, None, 0, 0, children)


def _new_column(values: Any, rows: Sequence[int], length: int, type_: pa.DataType) -> plc.Column:
    """A column of ``values`` at ``rows``, null in between."""
    if isinstance(values, list):
        spread: list[Any] = [None] * length
        for row, value in zip(rows, values, strict=True):
            spread[row] = value
        return plc.Column.from_arrow(as_stored(pa.array(spread, type_)))
    type_ = stored(type_)
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


def _image_column(pixels: Pixels) -> plc.Column:
    ends = np.cumsum(pixels.sizes)
    check_pixels(int(ends[-1]))
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


def is_images(dtype: Any) -> bool:
    """True for the dtype of decoded images."""
    return isinstance(dtype, cudf.StructDtype) and set(dtype.fields) == set(IMAGE.names)


def is_references(dtype: Any) -> bool:
    """True for the dtype of image references."""
    return isinstance(dtype, cudf.StructDtype) and list(dtype.fields) == REFERENCE.names


def is_bytes(dtype: Any) -> bool:
    """True for the dtype of bytes, which cuDF has as lists of uint8."""
    return isinstance(dtype, cudf.ListDtype) and dtype.element_type == np.dtype(np.uint8)


def image_arrays(images: cudf.Series) -> list[cupy.ndarray | None]:
    """Views of each image of a column, without a copy; None where there is none."""
    if not len(images):
        return []
    column = _read(images)
    return [
        from_bytes(column.flat[start:end], shape) if there else None
        for start, end, shape, there in zip(
            column.ends[:-1], column.ends[1:], column.shapes.tolist(), column.present, strict=True
        )
    ]


def pixels_on_host(images: cudf.Series) -> Pixels:
    """A column's pixels, copied to the host in one piece."""
    if not len(images):
        return Pixels(np.empty(0, np.uint8), np.empty((0, 3), np.int32), [])
    column = _read(images)
    shapes = np.where(np.array(column.present)[:, None], column.shapes, 0).astype(np.int32)
    errors = [None if there else "no image" for there in column.present]
    values = shapes.astype(np.int64).prod(axis=1)
    itemsizes = np.diff(column.ends) // np.maximum(values, 1)
    flat = column.flat[column.ends[0] : column.ends[-1]].get()
    return Pixels(flat, shapes, errors, np.maximum(itemsizes, 1))


def typed(array: pa.Array, dtype: Any) -> pa.Array:
    """The result of ``to_arrow`` of a column of this dtype, in its own type and with bytes.

    cuDF gives nested columns, and what they hold, as nulls where there is no value.
    """
    if isinstance(dtype, (cudf.ListDtype, cudf.StructDtype)):
        return with_bytes(array.cast(dtype.to_arrow()))
    return array


def empty_table(frame: cudf.DataFrame) -> pa.Table:
    """A frame of no rows as Arrow, told by its types: no GPU is asked."""
    types = {name: _arrow_type(dtype) for name, dtype in frame.dtypes.items()}
    return pa.table({name: pa.array([], type_) for name, type_ in types.items()})


def _arrow_type(dtype: Any) -> pa.DataType:
    if isinstance(dtype, np.dtype) and dtype.kind != "O":
        return pa.from_numpy_dtype(dtype)
    if isinstance(dtype, pd.DatetimeTZDtype):
        return pa.timestamp(dtype.unit, str(dtype.tz))
    return dtype.to_arrow() if hasattr(dtype, "to_arrow") else pa.string()


class _Column(NamedTuple):
    """An image column's parts: row n has ``flat[ends[n]:ends[n + 1]]``."""

    flat: cupy.ndarray
    ends: list[int]
    shapes: np.ndarray
    present: list[bool]


def _read(images: cudf.Series) -> _Column:
    fields = list(images.dtype.fields)
    present = images.notna().to_arrow().to_pylist()
    # cuDF's public ways to a buffer's pointer pin it in GPU memory for good, and every later
    # slice of the column becomes a copy. Inside this context it stays where it is, and what
    # owns the memory is all that the views need to outlive it.
    with images._column.access(mode="read", scope="internal") as column:
        struct = column.plc_column.struct_view()
        data, *edges = (struct.get_sliced_child(fields.index(name)) for name in IMAGE.names)
        flat, offsets = _bytes_and_offsets(data)
        ends = offsets[data.offset() : data.offset() + len(images) + 1].get().tolist()
        shapes = np.stack([_view(edge).get() for edge in edges], axis=1)
    return _Column(flat, ends, shapes, present)


def _bytes_and_offsets(data: plc.Column) -> tuple[cupy.ndarray, cupy.ndarray]:
    """The bytes of a column of lists, or of the strings that cuDF makes of a file's bytes."""
    if data.type().id() != plc.TypeId.STRING:
        return _view(data.list_view().child()), _view(data.list_view().offsets())
    characters = data.data()
    nbytes = 0 if characters is None else characters.size
    return _memory(characters, 0, nbytes, np.dtype(np.uint8)), _view(data.child(0))


def _view(column: plc.Column) -> cupy.ndarray:
    """A column's values where they lie; keeps their memory, whatever becomes of the column."""
    dtype = np.dtype(column.type().typestr)
    return _memory(column.data(), column.offset(), column.size(), dtype)


def _memory(buffer: Any, start: int, count: int, dtype: np.dtype) -> cupy.ndarray:
    if not count or buffer is None:
        return cupy.empty(0, dtype)
    memory = cupy.cuda.UnownedMemory(buffer.ptr, buffer.size, owner=buffer.owner.owner)
    pointer = cupy.cuda.MemoryPointer(memory, start * dtype.itemsize)
    return cupy.ndarray(count, dtype, pointer)


def to_table(frame: cudf.DataFrame) -> pa.Table:
    """A frame with its index as a table that parquet can hold."""
    # A selection: drop() would copy the pixels, and keep cuDF from spilling them.
    plain = frame[[name for name in frame.columns if not is_images(frame[name].dtype)]]
    made = plain.to_arrow(preserve_index=False)
    told = json.loads(made.schema.metadata[b"pandas"])
    # Types are named as cuDF has them: a reader with pandas goes by its own.
    told["creator"] = {"library": "cudf", "version": cudf.__version__}
    columns = {}
    for name, dtype in frame.dtypes.items():
        if is_images(dtype):
            columns[name] = _image_array(frame[name])
            named = {"name": name, "field_name": name}
            types = {"pandas_type": "object", "numpy_type": "image", "metadata": None}
            told["columns"].append(named | types)
        else:
            columns[name] = typed(made.column(name).combine_chunks(), dtype)
    index = frame.index
    if isinstance(index, cudf.RangeIndex):
        edges = {"start": index.start, "stop": index.stop, "step": index.step}
        told["index_columns"] = [{"kind": "range", "name": index.name, **edges}]
    else:
        kept = _free_name("__index_level_0__" if index.name is None else index.name, columns)
        alone = index.to_frame(index=False, name=kept).to_arrow(preserve_index=False)
        (described,) = json.loads(alone.schema.metadata[b"pandas"])["columns"]
        columns[kept] = alone.column(kept)
        told["index_columns"] = [kept]
        told["columns"].append(described | {"name": index.name})
    return pa.table(columns).replace_schema_metadata({b"pandas": json.dumps(told).encode()})


def to_frame(table: pa.Table, meta: cudf.DataFrame) -> cudf.DataFrame:
    """A frame again, of the columns of ``meta``."""
    (kept,) = json.loads(table.schema.metadata[b"pandas"])["index_columns"]
    index = (
        cudf.RangeIndex(kept["start"], kept["stop"], kept["step"], name=meta.index.name)
        if isinstance(kept, dict)
        else cudf.Index(cudf.Series.from_arrow(table.column(kept)), name=meta.index.name)
    )
    images = [n for n in meta.columns if holds_images(table.schema.field(n).type)]
    plain = table.select([name for name in meta.columns if name not in images])
    frame = make_frame(plain.replace_schema_metadata(None), index, None)
    for name in images:
        made = make_frame(pa.table({}), index, _pixels(table.column(name)))
        made.columns = [name]  # rename() would copy the pixels
        frame = with_columns_of(frame, made)
    return frame[list(meta.columns)]


def _image_array(series: cudf.Series) -> pa.Array:
    return image_array(pixels_on_host(series))


def _free_name(name: Any, taken: Collection[Any]) -> str:
    name = str(name)
    while name in taken:
        name = f"_{name}"
    return name


def _pixels(column: pa.ChunkedArray) -> Pixels:
    images = as_images(column).combine_chunks()
    views = image_views(images)
    errors = ["no image" if view is None else None for view in views]
    pixels = pixels_of(views, errors, np)
    return replace(pixels, flat=cupy.asarray(pixels.flat))
