"""cuDF frames made of Arrow's columns, of pixels, or of types alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cudf
import cupy
import numpy as np
import pyarrow as pa
import pylibcudf as plc

from dask_image_ingest.decode import Pixels
from dask_image_ingest.frames.backend import NewColumn
from dask_image_ingest.frames.cudf_pixels import check_pixels
from dask_image_ingest.frames.cudf_types import as_stored, stored, stored_types
from dask_image_ingest.frames.gpus import gpus, require_gpu
from dask_image_ingest.frames.image_type import IMAGE

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
    ends = np.cumsum(pixels.shapes.astype(np.int64).prod(axis=1))
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
