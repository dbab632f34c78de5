"""What the columns of a cuDF frame hold: images as views, bytes as Arrow has them."""

from __future__ import annotations

from typing import Any, NamedTuple

import cudf
import cupy
import numpy as np
import pandas as pd
import pyarrow as pa
import pylibcudf as plc

from dask_image_ingest.decode import Pixels
from dask_image_ingest.frames.cudf_types import with_bytes
from dask_image_ingest.frames.image_type import IMAGE
from dask_image_ingest.frames.reference_type import REFERENCE


def is_images(dtype: Any) -> bool:
    """Whether a column of this dtype holds decoded images."""
    return isinstance(dtype, cudf.StructDtype) and set(dtype.fields) == set(IMAGE.names)


def is_references(dtype: Any) -> bool:
    """Whether a column of this dtype holds image references."""
    return isinstance(dtype, cudf.StructDtype) and list(dtype.fields) == REFERENCE.names


def is_bytes(dtype: Any) -> bool:
    """Whether a column of this dtype holds bytes, which cuDF has as lists of uint8."""
    return isinstance(dtype, cudf.ListDtype) and dtype.element_type == np.dtype(np.uint8)


def image_arrays(images: cudf.Series) -> list[cupy.ndarray | None]:
    """Views of each image of a column, without a copy; None where there is none."""
    if not len(images):
        return []
    column = _read(images)
    return [
        column.flat[start:end].reshape(shape) if there else None
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
    return Pixels(column.flat[column.ends[0] : column.ends[-1]].get(), shapes, errors)


def typed(array: pa.Array, dtype: Any) -> pa.Array:
    """What ``to_arrow`` gives of a column of this dtype, in its own type and with bytes.

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
