"""Inputs of ``map_batches``: columns of a partition, as arguments of the user's function."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend, backend_of, is_list


@dataclass(frozen=True)
class InputColumn:
    """The values of one column: an array of numbers, or a list with None for null."""

    values: Any
    has_images: bool = False

    def batch(self, rows: slice, backend: Backend) -> Any:
        """The values of some rows, as copies: the function may write to them.

        Read-only views would do for NumPy; CuPy and torch have none.
        """
        values = self.values[rows]
        if not isinstance(values, list):
            return values.copy()
        if self.has_images and len({_shape_and_dtype(value) for value in values}) == 1:
            return values if values[0] is None else backend.numpy.stack(values)
        return [value.copy() if hasattr(value, "copy") else value for value in values]


def _shape_and_dtype(image: Any) -> Any:
    return None if image is None else (image.shape, image.dtype)


def rows_with_images(frame: Any, names: Sequence[Any]) -> list[int]:
    """Numbers of the rows that have an image in every image column among ``names``."""
    backend = backend_of(frame)
    columns = [
        backend.arrays(frame[name]) for name in names if backend.is_images(frame[name].dtype)
    ]
    return [row for row in range(len(frame)) if all(images[row] is not None for images in columns)]


def input_columns(frame: Any, names: Sequence[Any], rows: Sequence[int]) -> list[InputColumn]:
    """The values of columns in some rows of a pandas or cuDF frame.

    Raises
    ------
    ArgumentError
        If integers or booleans are null, which an array cannot represent.
    """
    return [_input_column(frame[[name]], name, rows) for name in names]


def _input_column(frame: Any, name: Any, rows: Sequence[int]) -> InputColumn:
    backend = backend_of(frame)
    if backend.is_images(frame[name].dtype):
        images = backend.arrays(frame[name])
        return InputColumn([images[row] for row in rows], has_images=True)
    if len(rows) < len(frame):
        frame = frame.take(rows)
    try:
        column = backend.to_arrow(frame).column(0).combine_chunks()
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ArgumentError(f"inputs= names {name!r}, a column of mixed types: {error}") from error
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    try:
        if _is_number(column.type):
            _refuse_nulls(column)
            return InputColumn(backend.values(frame[name]))
        if is_list(column.type):
            arrays = _list_arrays(column)
            return InputColumn([_on_device(array, backend) for array in arrays])
    except _HasNulls:
        raise ArgumentError(
            f"inputs= names {name!r}, which has nulls in a row that the function gets; an array of "
            f"{column.type} has no value for these: fill or drop them first, "
            f"ddf[ddf[{name!r}].notnull()]"
        ) from None
    return InputColumn(column.to_pylist())


class _HasNulls(Exception):
    """Raised for integers or booleans with nulls."""


def _list_arrays(column: Any) -> list[Any]:
    """The lists of an Arrow column: each an array (k,), or (k, d) for lists of vectors; or None.

    A list without items is of shape (0,) or (0, 0), whatever the lists in other rows are.
    """
    items = _item_values(column.flatten())
    empty = _empty(column.type)
    lengths = column.value_lengths().fill_null(0).to_numpy()
    ends = np.cumsum(lengths)
    present = column.is_valid().to_numpy(zero_copy_only=False)
    return [
        (_stack(items[start:end]) if start < end else copy.copy(empty)) if is_present else None
        for start, end, is_present in zip(ends - lengths, ends, present, strict=True)
    ]


def _item_values(array: Any) -> Any:
    """The values of an Arrow array, as an array if types and lengths allow it; else as a list."""
    if _is_number(array.type):
        _refuse_nulls(array)
        return array.to_numpy(zero_copy_only=False)
    return _stack(_list_arrays(array)) if is_list(array.type) else array.to_pylist()


def _empty(type_: pa.DataType) -> Any:
    """The value of a list without items: an array, or a list if the items are no numbers."""
    depth = 0
    while is_list(type_):
        type_, depth = type_.value_type, depth + 1
    return np.empty((0,) * depth, type_.to_pandas_dtype()) if _is_number(type_) else []


def _stack(values: Any) -> Any:
    """Stack arrays of one shape; return anything else unchanged."""
    if not isinstance(values, list) or not values:
        return values
    shapes = {value.shape if isinstance(value, np.ndarray) else None for value in values}
    return np.stack(values) if len(shapes) == 1 and None not in shapes else values


def _on_device(values: Any, backend: Backend) -> Any:
    is_numeric = isinstance(values, np.ndarray) and values.dtype.kind in "biuf"
    return backend.numpy.asarray(values) if is_numeric else values


def _is_number(type_: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_boolean(type_)
    )


def _refuse_nulls(array: Any) -> None:
    if array.null_count and not pa.types.is_floating(array.type):
        raise _HasNulls
