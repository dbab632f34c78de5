"""Inputs of ``map_batches``: columns of a partition, as arguments of the user's function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import (
    Backend,
    NullsError,
    backend_of,
    is_value,
    row_values,
    tensor_type,
)


@dataclass(frozen=True)
class InputColumn:
    """The values of one column: an array of numbers, or a list with None for null."""

    values: Any
    has_images: bool = False

    def batch(self, rows: slice, backend: Backend, *, copies: bool = True) -> Any:
        """The values of some rows; as ``copies`` if the function may write to them.

        Read-only views would do for NumPy; CuPy and torch have none.
        """
        values = self.values[rows]
        if not isinstance(values, list):
            return values.copy() if copies else values
        if self.has_images and len({_shape_and_dtype(value) for value in values}) == 1:
            return values if values[0] is None else backend.numpy.stack(values)
        return [_copied(value) for value in values] if copies else values

    def on_host(self, backend: Backend) -> InputColumn:
        """The column in host memory."""
        if backend.device == "cpu":
            return self
        values = self.values
        on_host = _on_host(values, backend) if isinstance(values, list) else backend.host(values)
        return InputColumn(on_host, self.has_images)

    def row(self, number: int) -> Any:
        """The value of one row, as a copy: an array of NumPy, or Python's own types."""
        value = self.values[number]
        return value.item() if isinstance(value, np.generic) else _copied(value)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value.copy() if hasattr(value, "copy") else value


def _on_host(value: Any, backend: Backend) -> Any:
    """Values with their arrays in host memory, in any nesting."""
    if isinstance(value, dict):
        return {name: _on_host(item, backend) for name, item in value.items()}
    if isinstance(value, list):
        return [_on_host(item, backend) for item in value]
    return backend.host(value) if hasattr(value, "__cuda_array_interface__") else value


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
        column = backend.to_arrow(frame).column(0)  # one chunk may not hold all of it
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ArgumentError(f"inputs= names {name!r}, a column of mixed types: {error}") from error
    try:
        if is_value(column.type) or tensor_type(column.type):
            values = backend.values(frame[name])
            if values is None or (column.null_count and not pa.types.is_floating(column.type)):
                raise NullsError
            return InputColumn(values)
        values = [value for chunk in column.chunks for value in row_values(chunk)]
        return InputColumn([_on_device(value, backend) for value in values])
    except NullsError:
        raise ArgumentError(
            f"inputs= names {name!r}, which has nulls in a row that the function gets; an array of "
            f"{column.type} has no value for these: fill or drop them first, "
            f"ddf[ddf[{name!r}].notnull()]"
        ) from None


def _on_device(values: Any, backend: Backend) -> Any:
    is_numeric = isinstance(values, np.ndarray) and values.dtype.kind in "biuf"
    return backend.numpy.asarray(values) if is_numeric else values
