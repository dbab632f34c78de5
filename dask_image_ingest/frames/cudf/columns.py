"""cuDF columns and frames: from Arrow, pixels or types; views of images; to and from storage."""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import cudf
import cupy
import numpy as np
import pandas as pd
import pyarrow as pa
import pylibcudf as plc
from cudf.core.buffer.spillable_buffer import SpillableBufferOwner, SpillLock

from dask_image_ingest.decode import Pixels, from_bytes, pixels_of
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames.arrow_types import (
    bytes_of,
    is_byte_list,
    is_bytes,
    is_list,
    is_text,
    type_name,
)
from dask_image_ingest.frames.backend import NewColumn, gpus, require_gpu
from dask_image_ingest.frames.cudf.pixels import check_pixels
from dask_image_ingest.frames.image_dtype import (
    IMAGE,
    as_images,
    holds_images,
    image_array,
    image_views,
)
from dask_image_ingest.frames.nested_dtype import one_chunk
from dask_image_ingest.frames.reference_dtype import are_fields_of_references
from dask_image_ingest.typedefs import Dtype

# Most digits of a decimal in cuDF.
_MAX_DIGITS = 38


def supports(type_: pa.DataType) -> bool:
    """True if cuDF supports this type, directly or after conversion."""
    return _stored(type_) is not None


def stored(type_: pa.DataType) -> pa.DataType:
    """Type in which cuDF stores values of ``type_``.

    Bytes become lists of uint8, dates timestamps, half floats float32, and times with a zone
    timestamps in UTC.

    Raises
    ------
    TypeError
        For a type without a substitute: times of day, maps, decimals of many digits.
    """
    substitute = _stored(type_)
    if substitute is None:
        raise TypeError(f"cuDF has no type for {type_}")
    return substitute


def stored_types(types: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """`stored` types of columns."""
    for name, type_ in types.items():
        if not supports(type_):
            raise ArgumentError(
                f"column {name!r} is of type {type_name(type_)}, for which cuDF has none: say "
                "another type, leave the column out, or pass backend='pandas'"
            )
    return {name: stored(type_) for name, type_ in types.items()}


def as_stored(array: pa.Array) -> pa.Array:
    """Convert a column to its `stored` type."""
    type_ = array.type
    if is_bytes(type_) or pa.types.is_fixed_size_binary(type_):
        return _byte_lists(array.cast(pa.binary()))
    if pa.types.is_struct(type_):
        children = [as_stored(child) for child in array.flatten()]
        return pa.StructArray.from_arrays(children, type_.names, mask=array.is_null())
    if pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_):
        array = array.cast(pa.list_(type_.value_type))
    if pa.types.is_list(array.type):
        return _with_values(array, as_stored(array.values))
    if pa.types.is_dictionary(type_):
        return as_stored(array.dictionary_decode())
    return array.cast(stored(type_))


def with_bytes(array: pa.Array) -> pa.Array:
    """Convert lists of uint8 back to bytes, also inside lists and structs."""
    if pa.types.is_struct(array.type):
        children = [with_bytes(child) for child in array.flatten()]
        return pa.StructArray.from_arrays(children, array.type.names, mask=array.is_null())
    if not pa.types.is_list(array.type):
        return array
    if is_byte_list(array.type):
        return bytes_of(array)
    return _with_values(array, with_bytes(array.values))


def _with_values(lists: pa.Array, values: pa.Array) -> pa.Array:
    return pa.Array.from_buffers(
        pa.list_(values.type),
        len(lists),
        lists.buffers()[:2],
        offset=lists.offset,
        children=[values],
    )


def _stored(type_: pa.DataType) -> pa.DataType | None:
    if is_bytes(type_) or pa.types.is_fixed_size_binary(type_):
        return pa.list_(pa.uint8())
    if pa.types.is_struct(type_):
        fields = [(field.name, _stored(field.type)) for field in type_]
        return None if any(stored is None for _, stored in fields) else pa.struct(fields)
    if is_list(type_) or pa.types.is_fixed_size_list(type_):
        value = _stored(type_.value_type)
        return None if value is None else pa.list_(value)
    if pa.types.is_dictionary(type_):
        return _stored(type_.value_type)
    if pa.types.is_timestamp(type_):
        return pa.timestamp(type_.unit)
    if pa.types.is_date(type_):
        # As cuDF does, but it needs a GPU even for no rows.
        return pa.timestamp("s" if pa.types.is_date32(type_) else "ms")
    if pa.types.is_decimal256(type_):
        fits = type_.precision <= _MAX_DIGITS
        return pa.decimal128(type_.precision, type_.scale) if fits else None
    if pa.types.is_float16(type_):
        return pa.float32()
    if pa.types.is_null(type_) or pa.types.is_string_view(type_):
        return pa.string()
    return type_ if any(is_kind(type_) for is_kind in _SUPPORTED) else None


_SUPPORTED = (
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_duration,
    is_text,
)


def _byte_lists(array: pa.Array) -> pa.Array:
    """View bytes as lists of uint8, which have the same layout in memory."""
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


_NO_NUMBERS = np.empty(0, np.int64)


def make_frame(table: pa.Table, index: cudf.Index, pixels: Pixels | None) -> cudf.DataFrame:
    """Frame of the columns of ``table``, followed by ``image`` if there are pixels."""
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
    """Frame without rows; needs no GPU."""
    types = stored_types(types)
    columns = {name: _empty_column(type_) for name, type_ in types.items()}
    return _frame_of(columns, types, make_index(_NO_NUMBERS) if index is None else index)


def frame_of_new(
    columns: Mapping[str, NewColumn], rows: Sequence[int], index: cudf.Index
) -> cudf.DataFrame:
    """Frame of columns whose values belong to ``rows``; other rows, and NaN, are null."""
    types = {name: type_ for name, (_, type_) in columns.items()}
    if not len(index):
        return make_frame(pa.table({n: pa.array([], t) for n, t in types.items()}), index, None)
    in_cudf = stored_types(types)
    new = {n: _new_column(values, rows, len(index), t) for n, (values, t) in columns.items()}
    frame = _frame_of(new, in_cudf, index)
    for name, type_ in types.items():
        if pa.types.is_floating(type_):
            frame[name] = frame[name].nans_to_nulls()
    return frame


def with_columns_of(frame: cudf.DataFrame, new: cudf.DataFrame) -> cudf.DataFrame:
    """Assign the columns of ``new``, which has the same index, without a copy.

    ``DataFrame.assign`` would copy them, which doubles the memory of pixels.
    """
    # A shallow copy, so that writes to the result don't change ``frame``.
    columns = frame_columns(frame.copy(deep=False)) | frame_columns(new)
    return cudf.DataFrame._from_data(columns, index=frame.index)


def frame_columns(frame: cudf.DataFrame) -> dict[Any, Any]:
    """CuDF's internal columns of a frame, by name."""
    return {name: frame[name]._column for name in frame.columns}


def make_index(numbers: np.ndarray) -> cudf.Index:
    """Index of ascending numbers."""
    if not len(numbers):
        return cudf.Index.from_pylibcudf(_empty_column(pa.int64()))
    # A range, as most partitions have, takes no memory.
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
    """Names inside a nested type, which pylibcudf's columns don't have."""
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
    """Column of ``values`` at ``rows``; other rows are null."""
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        values = one_chunk(values)
        positions = np.zeros(length, np.int64)
        positions[rows] = np.arange(len(rows))
        is_null = np.ones(length, bool)
        is_null[rows] = False
        by_position = values.take(pa.array(positions, mask=is_null))
        return plc.Column.from_arrow(as_stored(by_position))
    if isinstance(values, list):
        by_row: list[Any] = [None] * length
        for row, value in zip(rows, values, strict=True):
            by_row[row] = value
        return plc.Column.from_arrow(as_stored(pa.array(by_row, type_)))
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
    _wait_for_cupy()
    if present.all():
        return column
    return column.with_mask(*plc.transform.bools_to_mask(plc.Column.from_array(present)))


def _wait_for_cupy() -> None:
    """Wait for CuPy's pending writes, unless they are on the default stream, as libcudf's kernels.

    pylibcudf wraps memory without waiting for them.
    """
    stream = cupy.cuda.get_current_stream()
    if stream.ptr != cupy.cuda.Stream.null.ptr:
        stream.synchronize()


def _image_column(pixels: Pixels) -> plc.Column:
    ends = np.cumsum(pixels.sizes)
    check_pixels(int(ends[-1]))
    _wait_for_cupy()
    offsets = np.concatenate([np.zeros(1, np.int64), ends]).astype(np.int32)
    flat = plc.Column.from_cuda_array_interface(pixels.flat)
    lists = [plc.Column.from_array(offsets), flat]
    data = plc.Column(plc.DataType(plc.TypeId.LIST), len(ends), None, None, 0, 0, lists)
    edges = (np.ascontiguousarray(pixels.shapes[:, axis]) for axis in range(3))
    children = [data, *(plc.Column.from_array(edge) for edge in edges)]
    present = np.array([error is None for error in pixels.errors], np.bool_)
    if not present.all():
        # libcudf requires that the fields of a null struct are null too.
        mask, nulls = plc.transform.bools_to_mask(plc.Column.from_array(present))
        children = [child.with_mask(mask, nulls) for child in children]
    return plc.Column.struct_from_children(children)


def is_images(dtype: Dtype) -> bool:
    """True for the dtype of decoded images."""
    return isinstance(dtype, cudf.StructDtype) and set(dtype.fields) == set(IMAGE.names)


def is_references(dtype: Dtype) -> bool:
    """True for the dtype of image references."""
    return isinstance(dtype, cudf.StructDtype) and are_fields_of_references(list(dtype.fields))


def is_bytes_dtype(dtype: Dtype) -> bool:
    """True for lists of uint8, which stand for bytes in cuDF."""
    return isinstance(dtype, cudf.ListDtype) and dtype.element_type == np.dtype(np.uint8)


def image_arrays(images: cudf.Series) -> list[cupy.ndarray | None]:
    """Views of the images of a column; None for a missing image."""
    if not len(images):
        return []
    column = _read(images)
    starts, ends = column.offsets[:-1], column.offsets[1:]
    return [
        from_bytes(column.flat[start:end], shape) if is_present else None
        for start, end, shape, is_present in zip(
            starts, ends, column.shapes.tolist(), column.present, strict=True
        )
    ]


def pixels_on_host(images: cudf.Series) -> Pixels:
    """Copy a column's pixels to the host, in one transfer."""
    if not len(images):
        return Pixels(np.empty(0, np.uint8), np.empty((0, 3), np.int32), [])
    column = _read(images)
    shapes = np.where(np.array(column.present)[:, None], column.shapes, 0).astype(np.int32)
    errors = [None if is_present else "no image" for is_present in column.present]
    values = shapes.astype(np.int64).prod(axis=1)
    itemsizes = np.diff(column.offsets) // np.maximum(values, 1)
    flat = column.flat[column.offsets[0] : column.offsets[-1]].get()
    return Pixels(flat, shapes, errors, np.maximum(itemsizes, 1))


def table_of(frame: cudf.DataFrame) -> pa.Table:
    """Arrow table of a frame without its index: bytes as bytes; no rows need no GPU."""
    table = frame.to_arrow(preserve_index=False) if len(frame) or gpus() else empty_table(frame)
    columns = [
        typed(column.combine_chunks(), dtype)
        for column, dtype in zip(table.columns, frame.dtypes, strict=True)
    ]
    return pa.table(columns, table.column_names, metadata=table.schema.metadata)


def typed(array: pa.Array, dtype: Dtype) -> pa.Array:
    """Cast the result of cuDF's ``to_arrow`` to the type of the column, with bytes as bytes.

    cuDF converts nested columns without a value to Arrow's null type.
    """
    if isinstance(dtype, (cudf.ListDtype, cudf.StructDtype)):
        return with_bytes(array.cast(dtype.to_arrow()))
    return array


def empty_table(frame: cudf.DataFrame) -> pa.Table:
    """Arrow table of a frame without rows, from its dtypes alone; needs no GPU."""
    types = {name: _arrow_type(dtype) for name, dtype in frame.dtypes.items()}
    return pa.table({name: pa.array([], type_) for name, type_ in types.items()})


def _arrow_type(dtype: Dtype) -> pa.DataType:
    if isinstance(dtype, np.dtype) and dtype.kind != "O":
        return pa.from_numpy_dtype(dtype)
    if isinstance(dtype, pd.DatetimeTZDtype):
        return pa.timestamp(dtype.unit, str(dtype.tz))
    return dtype.to_arrow() if hasattr(dtype, "to_arrow") else pa.string()


class _Column(NamedTuple):
    """Parts of an image column: row n is ``flat[offsets[n]:offsets[n + 1]]``."""

    flat: cupy.ndarray
    offsets: list[int]
    shapes: np.ndarray
    present: list[bool]


def _read(images: cudf.Series) -> _Column:
    fields = list(images.dtype.fields)
    present = images.notna().to_arrow().to_pylist()
    # cuDF's public access to a buffer's pointer makes it unspillable for good, and every later
    # slice of the column a copy. This context does not, and the views keep the memory.
    with images._column.access(mode="read", scope="internal") as column:
        struct = column.plc_column.struct_view()
        data, *edges = (struct.get_sliced_child(fields.index(name)) for name in IMAGE.names)
        flat, offsets = _bytes_and_offsets(data)
        row_offsets = offsets[data.offset() : data.offset() + len(images) + 1].get().tolist()
        shapes = np.stack([_view(edge).get() for edge in edges], axis=1)
    return _Column(flat, row_offsets, shapes, present)


def _bytes_and_offsets(data: plc.Column) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Bytes and offsets of a column of lists, or of strings: cuDF reads binary files as these."""
    if data.type().id() != plc.TypeId.STRING:
        return _view(data.list_view().child()), _view(data.list_view().offsets())
    characters = data.data()
    nbytes = 0 if characters is None else characters.size
    return _memory(characters, 0, nbytes, np.dtype(np.uint8)), _view(data.child(0))


def _view(column: plc.Column) -> cupy.ndarray:
    """View of a column's values, which keeps their memory alive."""
    dtype = np.dtype(column.type().typestr)
    return _memory(column.data(), column.offset(), column.size(), dtype)


def _memory(buffer: Any, start: int, count: int, dtype: np.dtype) -> cupy.ndarray:
    if not count or buffer is None:
        return cupy.empty(0, dtype)
    spillable = buffer.owner
    owner: Any = spillable.owner
    if isinstance(spillable, SpillableBufferOwner):
        # As long as the view keeps this memory, to spill it would free nothing.
        lock = SpillLock()
        spillable.spill_lock(lock)
        owner = owner, lock
    memory = cupy.cuda.UnownedMemory(buffer.ptr, buffer.size, owner=owner)
    pointer = cupy.cuda.MemoryPointer(memory, start * dtype.itemsize)
    return cupy.ndarray(count, dtype, pointer)


def table_for_storage(frame: cudf.DataFrame) -> pa.Table:
    """Arrow table of a frame and its index, in types for parquet and with pandas metadata."""
    # Select: drop() would copy the pixels, and make them unspillable.
    others = frame[[name for name in frame.columns if not is_images(frame[name].dtype)]]
    arrow = others.to_arrow(preserve_index=False)
    metadata = json.loads(arrow.schema.metadata[b"pandas"])
    # Tells the pandas backend that the dtype names are cuDF's.
    metadata["creator"] = {"library": "cudf", "version": cudf.__version__}
    columns = {}
    for name, dtype in frame.dtypes.items():
        if is_images(dtype):
            columns[name] = image_array(pixels_on_host(frame[name]))
            names = {"name": name, "field_name": name}
            types = {"pandas_type": "object", "numpy_type": "image", "metadata": None}
            metadata["columns"].append(names | types)
        else:
            columns[name] = typed(arrow.column(name).combine_chunks(), dtype)
    index = frame.index
    if isinstance(index, cudf.RangeIndex):
        edges = {"start": index.start, "stop": index.stop, "step": index.step}
        metadata["index_columns"] = [{"kind": "range", "name": index.name, **edges}]
    else:
        field = _free_name("__index_level_0__" if index.name is None else index.name, columns)
        labels = index.to_frame(index=False, name=field).to_arrow(preserve_index=False)
        (description,) = json.loads(labels.schema.metadata[b"pandas"])["columns"]
        columns[field] = labels.column(field)
        metadata["index_columns"] = [field]
        metadata["columns"].append(description | {"name": index.name})
    return pa.table(columns).replace_schema_metadata({b"pandas": json.dumps(metadata).encode()})


def frame_from_storage(table: pa.Table, meta: cudf.DataFrame) -> cudf.DataFrame:
    """Restore the columns of ``meta`` from a stored table."""
    (field,) = json.loads(table.schema.metadata[b"pandas"])["index_columns"]
    index = (
        cudf.RangeIndex(field["start"], field["stop"], field["step"], name=meta.index.name)
        if isinstance(field, dict)
        else cudf.Index(cudf.Series.from_arrow(table.column(field)), name=meta.index.name)
    )
    images = [n for n in meta.columns if holds_images(table.schema.field(n).type)]
    others = table.select([name for name in meta.columns if name not in images])
    frame = make_frame(others.replace_schema_metadata(None), index, None)
    for name in images:
        new = make_frame(pa.table({}), index, _pixels(table.column(name)))
        new.columns = [name]  # rename() would copy the pixels
        frame = with_columns_of(frame, new)
    return frame[list(meta.columns)]


def _free_name(name: Hashable, taken: Collection[Hashable]) -> str:
    """``name``, with underscores in front until it is not taken."""
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
