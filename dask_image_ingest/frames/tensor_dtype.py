"""Pandas dtype and array of arrays of one shape, such as the latents of an autoencoder.

The dtype has a name that pandas can parse: ``float16[4, 64, 64]``. To Arrow and to parquet they are
nested lists of fixed size, which more readers know than Arrow's type of tensors.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from dask.dataframe.extensions import make_array_nonempty

from dask_image_ingest.errors import OperandError
from dask_image_ingest.frames.arrow_types import (
    as_lists,
    is_list,
    named_type,
    tensor_type,
    type_name,
)
from dask_image_ingest.frames.nested_dtype import NestedArray, arrow_of, one_chunk


@pd.api.extensions.register_extension_dtype
class TensorDtype(pd.ArrowDtype):
    """Dtype of arrays of one shape, ``float16[4, 64, 64]``."""

    pyarrow_dtype: pa.FixedShapeTensorType

    @property
    def name(self) -> str:
        """Name that pandas can parse."""
        return type_name(self.pyarrow_dtype)

    @property
    def type(self) -> builtins.type[np.ndarray]:
        """Class of a row."""
        return np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each row."""
        return tuple(self.pyarrow_dtype.shape)

    @property
    def value_dtype(self) -> np.dtype:
        """NumPy dtype of the values."""
        return np.dtype(self.pyarrow_dtype.value_type.to_pandas_dtype())

    @classmethod
    def construct_from_string(cls, string: str) -> TensorDtype:
        """Dtype by its name."""
        # pandas tries every dtype for every name; only a TypeError makes it try the next.
        if isinstance(string, str) and string.endswith("]"):
            try:
                tensor = tensor_type(named_type(string))
            except (ValueError, RecursionError):
                tensor = None
            if tensor is not None:
                return cls(tensor)
        raise TypeError(f"Cannot construct a TensorDtype from {string!r}")

    def construct_array_type(self) -> builtins.type[TensorColumn]:
        """Array class of this dtype."""
        return TensorColumn

    def _get_common_dtype(self, dtypes: list[Any]) -> TensorDtype | None:
        return self if all(self._can_hold(dtype) for dtype in dtypes) else None

    def _can_hold(self, dtype: Any) -> bool:
        if not isinstance(dtype, pd.ArrowDtype):
            return False
        type_ = dtype.pyarrow_dtype
        return tensor_type(type_) == self.pyarrow_dtype or pa.types.is_null(type_)

    def __from_arrow__(self, array: pa.Array | pa.ChunkedArray) -> TensorColumn:
        return TensorColumn(as_tensors(array, self.pyarrow_dtype))

    def __reduce__(self) -> tuple[builtins.type[TensorDtype], tuple[pa.DataType]]:
        return TensorDtype, (self.pyarrow_dtype,)


class TensorColumn(NestedArray):
    """Extension array of arrays of one shape."""

    _noun = "arrays"
    _hint = "for their numbers call .images.vectors(column)"

    def __init__(self, values: pa.Array | pa.ChunkedArray) -> None:
        super().__init__(values)
        self._dtype = TensorDtype(values.type)

    @classmethod
    def _to_arrow(cls, values: Iterable[Any], dtype: Any) -> pa.Array | pa.ChunkedArray:
        if not isinstance(dtype, TensorDtype):
            raise OperandError("arrays of one shape: name their dtype, such as 'float32[3]'")
        type_ = dtype.pyarrow_dtype
        array = arrow_of(values, type_, lambda column: as_tensors(column, type_))
        if array is not None:
            return array
        rows = [None if _is_null(value) else _row(value, dtype) for value in values]
        return tensor_array(rows, type_)

    def __arrow_array__(self, type: Any = None) -> pa.ChunkedArray:
        lists = as_lists(self._pa_type)
        array = pa.chunked_array([_lists_of(chunk) for chunk in self._pa_array.chunks], lists)
        return array if type is None else array.cast(type)

    def _objects(self) -> Iterator[np.ndarray | None]:
        shape = self.dtype.shape
        for chunk in self._pa_array.chunks:
            for row in range(len(chunk)):
                storage = chunk.storage.slice(row, 1)
                yield None if storage.null_count else _flat(storage).reshape(shape)

    def _bytes(self) -> Iterator[bytes | None]:
        return (None if value is None else value.tobytes() for value in self._objects())

    def _is_one(self, value: Any) -> bool:
        if isinstance(value, np.ndarray) and value.dtype != object:
            return value.ndim <= len(self.dtype.shape)
        return super()._is_one(value)

    def numbers(self) -> np.ndarray | None:
        """All rows as one read-only array (n, ...), if possible a view; None if a row is null."""
        storage = one_chunk(self._pa_array).storage
        if storage.null_count:
            return None
        return _flat(storage).reshape(len(storage), *self.dtype.shape)


def tensor_array(
    rows: np.ndarray | Sequence[np.ndarray | None], type_: pa.FixedShapeTensorType
) -> pa.Array:
    """Arrow array of rows of the type's shape, None for null; values are cast."""
    dtype = np.dtype(type_.value_type.to_pandas_dtype())
    shape, mask = tuple(type_.shape), None
    if isinstance(rows, np.ndarray):
        values = rows.astype(dtype, copy=False)
    else:
        values = np.zeros((len(rows), *shape), dtype)
        for row, value in enumerate(rows):
            if value is not None:
                values[row] = value
        if any(value is None for value in rows):
            mask = pa.array([value is None for value in rows])
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), type_.value_type)
    storage = pa.FixedSizeListArray.from_arrays(flat, type=type_.storage_type, mask=mask)
    return pa.ExtensionArray.from_storage(type_, storage)


def as_tensors(array: pa.Array | pa.ChunkedArray, type_: pa.FixedShapeTensorType) -> Any:
    """Convert an Arrow column of tensors or lists to tensors.

    Lists are nested as the shape, or flat.

    Raises
    ------
    pyarrow.ArrowInvalid
        If a row has another number of values, or nulls among them.
    """
    if array.type == type_:
        return array
    if pa.types.is_null(array.type):
        return tensor_array([None] * len(array), type_)
    column = one_chunk(array)
    shape = tuple(type_.shape)
    if isinstance(column.type, pa.FixedShapeTensorType):
        if tuple(column.type.shape) != shape:
            raise pa.ArrowInvalid(f"{column.type} is no {type_}")
        column = column.storage
    present = column.is_valid().to_numpy(zero_copy_only=False)
    values = column.drop_null()
    count, lengths = len(values), []
    while is_list(values.type) or pa.types.is_fixed_size_list(values.type):
        items = values.flatten()
        lengths.append(len(items) // max(1, len(values)))
        if (pc.list_value_length(values).to_numpy(zero_copy_only=False) != lengths[-1]).any():
            raise pa.ArrowInvalid("lists differ in length")
        values = items
    if values.null_count and not pa.types.is_floating(values.type):
        raise pa.ArrowInvalid("a list has nulls")
    if count and tuple(lengths) not in (shape, (math.prod(shape),)):
        raise pa.ArrowInvalid(f"lists of {lengths} values are no array of shape {shape}")
    dense = values.to_numpy(zero_copy_only=False).reshape(count, *shape)
    if count == len(column):
        return tensor_array(dense, type_)
    rows = iter(dense)
    return tensor_array([next(rows) if each else None for each in present], type_)


def _lists_of(chunk: pa.Array) -> pa.FixedSizeListArray:
    """Nested lists of fixed size over the memory of tensors."""
    storage, (length, *edges) = chunk.storage, chunk.type.shape
    size = storage.type.list_size
    lists = storage.values.slice(storage.offset * size, len(storage) * size)
    for edge in reversed(edges):
        lists = pa.FixedSizeListArray.from_arrays(lists, edge)
    mask = storage.is_null() if storage.null_count else None
    return pa.FixedSizeListArray.from_arrays(lists, length, mask=mask)


def _flat(storage: pa.FixedSizeListArray) -> np.ndarray:
    return storage.flatten().to_numpy(zero_copy_only=False)


def _row(value: Any, dtype: TensorDtype) -> np.ndarray:
    """A user's value as an array of the dtype's shape.

    Raises
    ------
    OperandError
    """
    array = np.asarray(value)
    if array.dtype == object:  # of pandas: nested lists of parquet are arrays of arrays
        array = np.array(_as_lists(value), None)
    if array.shape not in (dtype.shape, (math.prod(dtype.shape),)):
        raise OperandError(
            f"a column of {dtype} takes arrays of shape {dtype.shape}, and a row has {array.shape}"
        )
    if not np.can_cast(array.dtype, dtype.value_dtype, "same_kind"):
        raise OperandError(f"a column of {dtype} takes no values of {array.dtype}")
    return array.reshape(dtype.shape)


def _as_lists(value: Any) -> Any:
    if isinstance(value, (np.ndarray, list, tuple)):
        return [_as_lists(item) for item in value]
    return value


def _is_null(value: Any) -> bool:
    return value is None or (pd.api.types.is_scalar(value) and bool(pd.isna(value)))


@make_array_nonempty.register(TensorDtype)
def _two_rows(dtype: TensorDtype) -> TensorColumn:
    zeros = np.zeros((2, *dtype.shape), dtype.value_dtype)
    return TensorColumn(pa.chunked_array([tensor_array(zeros, dtype.pyarrow_dtype)]))
