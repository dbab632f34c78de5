"""Columns of a partition as the arguments of a function of ``map_batches``."""

from __future__ import annotations

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
        """The values of some rows, as copies that a function may change.

        NumPy could forbid it to write to the frame's own pixels; CuPy and torch could not.
        """
        values = self.values[rows]
        if not isinstance(values, list):
            return values.copy()
        if self.has_images and len({_kind(value) for value in values}) == 1:
            return values if values[0] is None else backend.numpy.stack(values)
        return [value.copy() if hasattr(value, "copy") else value for value in values]


def _kind(image: Any) -> Any:
    return None if image is None else (image.shape, image.dtype)


def rows_with_images(frame: Any, names: Sequence[Any]) -> list[int]:
    """The rows that have an image in each of the named columns that hold images."""
    backend = backend_of(frame)
    columns = [
        backend.arrays(frame[name]) for name in names if backend.is_images(frame[name].dtype)
    ]
    return [row for row in range(len(frame)) if all(images[row] is not None for images in columns)]


def input_columns(frame: Any, names: Sequence[Any], rows: Sequence[int]) -> list[InputColumn]:
    """The named columns of some rows of a pandas or cuDF frame.

    Raises
    ------
    ArgumentError
        If whole numbers or truth values are null: no array has a value for these.
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
            arrays = _lists(column)
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


def _lists(column: Any) -> list[Any]:
    """Each list of an Arrow column: an array of numbers, (k, d) of lists of one length."""
    items = _items(column.flatten())
    lengths = column.value_lengths().fill_null(0).to_numpy()
    ends = np.cumsum(lengths)
    present = column.is_valid().to_numpy(zero_copy_only=False)
    return [
        _stacked(items[start:end]) if there else None
        for start, end, there in zip(ends - lengths, ends, present, strict=True)
    ]


def _items(array: Any) -> Any:
    """The values of an Arrow array: an array where their types and lengths allow it, or a list."""
    if _is_number(array.type):
        _refuse_nulls(array)
        return array.to_numpy(zero_copy_only=False)
    if is_list(array.type):
        return _stacked(_lists(array)) if len(array) else np.empty((0, 0))
    return array.to_pylist()


def _stacked(values: Any) -> Any:
    """Arrays of one shape as one array; anything else as it is."""
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
