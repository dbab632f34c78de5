"""The rows of nested columns, one by one: arrays, lists, dicts.

The form of a row depends on its own values and the column's type, never on its neighbours.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.frames.arrow_types import is_list, is_number


class NullsError(ValueError):
    """Raised for integers or booleans with nulls, which an array has no value for."""


def row_values(column: pa.Array) -> list[Any]:
    """Each row of an Arrow column; None for null.

    Lists of numbers are arrays (k,), with NaN for null floats; lists of such lists arrays (k, d),
    if they have one length, else lists of arrays. Structs are dicts of such values. Anything else
    is a Python value. An empty list is an array of shape (0,), or (0, 0) if it is one of lists;
    (0, d) if these have a fixed length by their type.

    Raises
    ------
    NullsError
        For lists of integers or booleans with nulls.
    """
    if _is_any_list(column.type):
        return _list_rows(column)
    if pa.types.is_struct(column.type):
        fields = {
            field.name: row_values(values)
            for field, values in zip(column.type, column.flatten(), strict=True)
        }
        present = column.is_valid().to_pylist()
        return [
            {name: values[row] for name, values in fields.items()} if present[row] else None
            for row in range(len(column))
        ]
    return column.to_pylist()


def regular(values: Any) -> Any:
    """Stack arrays of one shape; return anything else unchanged."""
    if not isinstance(values, list) or not values:
        return values
    shapes = {value.shape if isinstance(value, np.ndarray) else None for value in values}
    return np.stack(values) if len(shapes) == 1 and None not in shapes else values


def _list_rows(column: pa.Array) -> list[Any]:
    """The lists of a column."""
    items = _item_values(column.flatten())
    empty = _empty(column.type)
    lengths = pc.list_value_length(column).fill_null(0).to_numpy()
    ends = np.cumsum(lengths)
    present = column.is_valid().to_numpy(zero_copy_only=False)
    return [
        (regular(items[start:end]) if start < end else copy.copy(empty)) if is_present else None
        for start, end, is_present in zip(ends - lengths, ends, present, strict=True)
    ]


def _item_values(array: pa.Array) -> Any:
    """The values of an Arrow array, as an array if types and lengths allow it; else as a list."""
    if is_value(array.type):
        if array.null_count and not pa.types.is_floating(array.type):
            raise NullsError
        return array.to_numpy(zero_copy_only=False)
    if _is_any_list(array.type) and len(array) and not array.null_count:
        lengths = pc.list_value_length(array).to_numpy()
        if lengths[0] and (lengths == lengths[0]).all():
            items = _item_values(array.flatten())
            if isinstance(items, np.ndarray):
                return items.reshape(len(array), lengths[0], *items.shape[1:])
    return regular(row_values(array))


def _empty(type_: pa.DataType) -> Any:
    """The value of a list without items: an array, or a list if the items are no numbers."""
    shape = [0]
    while _is_any_list(type_ := type_.value_type):
        shape.append(type_.list_size if pa.types.is_fixed_size_list(type_) else 0)
    return np.empty(shape, type_.to_pandas_dtype()) if is_value(type_) else []


def _is_any_list(type_: pa.DataType) -> bool:
    return is_list(type_) or bool(pa.types.is_fixed_size_list(type_))


def is_value(type_: pa.DataType) -> bool:
    """True for numbers and booleans."""
    return is_number(type_) or bool(pa.types.is_boolean(type_))
