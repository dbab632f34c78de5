"""Results of ``map_batches`` that are no rectangular arrays, as Arrow columns.

Rows are arrays, tensors, lists, dicts or None, in any nesting that the declared type has. Numbers
are cast if that is lossless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dask_image_ingest.arguments import shown
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import is_list, is_value, tensor_array, tensor_type, type_name
from dask_image_ingest.url_secrets import storable

# Casts numbers to a dtype, on the host; raises a ResultError if it can't hold one.
Numbers = Callable[[Any, np.dtype], np.ndarray]


class ResultError(ArgumentError):
    """A function's result does not fit its outputs.

    Parameters
    ----------
    gave
        The result, and what is wrong with it.
    advice
        The rest of the sentence, for functions whose outputs are the argument ``outputs=``.
    """

    def __init__(self, gave: str, advice: str = "") -> None:
        super().__init__(f"map_batches: the function gave {gave}{advice}")
        self.gave = gave


def is_null(value: object) -> bool:
    """True for None, and for the nulls of masked arrays and of pandas."""
    return value is None or value is np.ma.masked or value is pd.NA


def with_none(values: Any) -> Any:
    """Values that NumPy, pandas or Arrow say are null as None; a list if there are any."""
    if is_null(values):
        return None
    if isinstance(values, np.ma.MaskedArray):
        return values.tolist() if np.ma.is_masked(values) else values.data
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        # NumPy has no nulls: an array of integers would become one of floats.
        has_nulls = values.null_count or pa.types.is_nested(values.type)
        return values.to_pylist() if has_nulls else values
    if isinstance(values, pa.Scalar):
        return values.as_py()
    if isinstance(values, (pd.Series, pd.Index, pd.api.extensions.ExtensionArray)):
        missing = values.isna()
        if missing.any():
            return [None if null else value for value, null in zip(values, missing, strict=True)]
    elif getattr(values, "has_nulls", False) and hasattr(values, "to_arrow"):
        return values.to_arrow().to_pylist()  # of cuDF
    return values


def arrow_rows(name: str, rows: Sequence[Any], type_: pa.DataType, numbers: Numbers) -> pa.Array:
    """Rows of an output, None for null, as an Arrow array.

    Raises
    ------
    ResultError
        Naming the output ``name``, if a row has not the type.
    """
    if not hasattr(rows, "dtype"):  # which numbers have that were cast already
        rows = [with_none(row) for row in rows]
    if (tensors := tensor_type(type_)) is not None:
        arrays = [_tensor(name, row, tensors, numbers) for row in rows]
        array = tensor_array(arrays, tensors)
        return array if isinstance(type_, pa.BaseExtensionType) else array.storage.cast(type_)
    if is_value(type_):
        return _number_array(name, rows, type_, numbers)
    mask = pa.array([row is None for row in rows], pa.bool_())
    if is_list(type_):
        return _lists(name, rows, type_, numbers, mask)
    if pa.types.is_struct(type_):
        return _structs(name, rows, type_, numbers, mask)
    try:
        return pa.array(storable_values(rows), type_)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise _misfit(name, rows, type_, f": {error}") from error


def _tensor(name: str, row: Any, type_: pa.FixedShapeTensorType, numbers: Numbers) -> Any:
    if row is None:
        return None
    array = numbers(row, np.dtype(type_.value_type.to_pandas_dtype()))
    if array.shape != tuple(type_.shape):
        raise ResultError(
            f"an array of shape {array.shape} in {name!r}",
            f", and outputs= says {tuple(type_.shape)}",
        )
    return array


def _number_array(name: str, rows: Any, type_: pa.DataType, numbers: Numbers) -> pa.Array:
    dtype = np.dtype(type_.to_pandas_dtype())
    if isinstance(rows, np.ndarray):
        return pa.array(numbers(rows, dtype), type_)
    missing = [row is None for row in rows]
    if not rows or all(missing):
        return pa.nulls(len(rows), type_)
    # In place of null one of the values: beside another number NumPy might round them all.
    instead = rows[missing.index(False)]
    values = numbers([instead if row is None else row for row in rows], dtype)
    if values.ndim != 1:
        raise _misfit(name, [instead], type_)
    return pa.array(values, type_, mask=np.array(missing))


def _lists(
    name: str, rows: Sequence[Any], type_: pa.DataType, numbers: Numbers, mask: pa.Array
) -> pa.Array:
    lists = [_items(name, row, type_, numbers) for row in rows]
    item = type_.value_type
    if is_value(item) and all(isinstance(each, np.ndarray) for each in lists):
        items: Any = np.concatenate([np.empty(0, item.to_pandas_dtype()), *lists])
    else:
        items = list(chain.from_iterable(lists))
    is_large = pa.types.is_large_list(type_)
    ends = np.cumsum([0, *map(len, lists)], dtype=np.int64 if is_large else np.int32)
    kind = pa.LargeListArray if is_large else pa.ListArray
    values = arrow_rows(name, items, item, numbers)
    return kind.from_arrays(pa.array(ends), values, type=type_, mask=mask)


def _items(name: str, row: Any, type_: pa.DataType, numbers: Numbers) -> Any:
    """The items of one list: an array (k,) of numbers, or a sequence of anything."""
    has_values = is_value(type_.value_type)
    is_sequence = isinstance(row, (list, tuple))
    if row is None or (is_sequence and not row):
        return np.empty(0, type_.value_type.to_pandas_dtype()) if has_values else []
    is_array = hasattr(row, "__array__") and not isinstance(row, (str, bytes, np.generic))
    if not (is_sequence or (is_array and row.ndim)):
        raise _misfit(name, [row], type_)
    if not has_values or (is_sequence and any(map(is_null, row))):
        return list(row)
    array = numbers(row, np.dtype(type_.value_type.to_pandas_dtype()))
    if array.ndim != 1:
        raise _misfit(name, [row], type_)
    return array


def _structs(
    name: str, rows: Sequence[Any], type_: pa.DataType, numbers: Numbers, mask: pa.Array
) -> pa.Array:
    names = [field.name for field in type_]
    for row in rows:
        if row is not None and (not isinstance(row, Mapping) or not set(row) <= set(names)):
            raise _misfit(name, [row], type_, f": give dicts of {', '.join(names)}")
    fields = [
        arrow_rows(name, [None if row is None else row.get(field.name) for row in rows], field.type,
                   numbers)
        for field in type_
    ]  # fmt: skip
    return pa.StructArray.from_arrays(fields, fields=list(type_), mask=mask)


def storable_values(values: Sequence[Any]) -> list[Any]:
    """Values of which strings have no lone surrogates, which Arrow refuses."""
    return [storable(value) if isinstance(value, str) else value for value in values]


def _misfit(name: str, rows: Sequence[Any], type_: pa.DataType, why: str = "") -> ResultError:
    some = rows[0] if len(rows) == 1 else list(rows)
    return ResultError(
        f"{shown(some)} in {name!r}", f", and outputs= says {type_name(type_)} for each image{why}"
    )
