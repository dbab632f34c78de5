"""Columns of vectors: as arrays, and columns computed from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dask_image_ingest.arguments import check_frame
from dask_image_ingest.dask_internals import FrameBase, new_collection
from dask_image_ingest.dataset.plan import MapColumns
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of, without
from dask_image_ingest.ops import BatchMap, InputColumn, make_batch_map, vectors

_FLOAT = pa.float32()


def check_vectors(frame: Any, column: Any) -> None:
    """Check that the frame has this column.

    Raises
    ------
    ArgumentError
    """
    check_frame(frame._meta if isinstance(frame, FrameBase) else frame)
    if column not in frame.columns:
        raise ArgumentError(
            f"the frame has no column {column!r}: pass column=, the name of a column of vectors, "
            "such as embed() makes"
        )


def valid_vectors(frame: Any, column: str) -> tuple[np.ndarray, np.ndarray]:
    """The valid vectors of a pandas or cuDF frame, on the host.

    Returns
    -------
    rows : array, shape (n,), int64
        Positions of the rows whose vector is not null, finite and not zero.
    vectors : array, shape (n, d), float32
        Their vectors.
    """
    backend = backend_of(frame)
    present = frame[column].notnull()
    array = backend.host(_vectors(frame[present], column))
    if not len(array):
        return np.empty(0, np.int64), np.empty((0, array.shape[1]), np.float32)
    rows = np.flatnonzero(backend.host(present.values))
    array = array.astype(np.float32, copy=False)
    usable = has_direction(array)
    return rows[usable], array[usable]


def has_direction(vectors: np.ndarray) -> np.ndarray:
    """True for vectors (n, d) that are finite and not zero: bool (n,)."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    usable: np.ndarray = np.isfinite(lengths) & (lengths > 0)
    return usable


def _vectors(frame: Any, column: str) -> Any:
    """The vectors of a frame whose column has no nulls: (n, d)."""
    dtype = frame[column].dtype
    fixed = isinstance(dtype, pd.ArrowDtype) and pa.types.is_fixed_size_list(dtype.pyarrow_dtype)
    if fixed or (isinstance(frame, pd.DataFrame) and pd.api.types.is_object_dtype(dtype)):
        try:
            lists = pa.array(frame[column], pa.list_(_FLOAT), from_pandas=True)
        except (pa.ArrowException, TypeError, ValueError):
            pass  # `vectors` raises the error that names the type
        else:
            frame = pd.DataFrame({column: pd.Series(lists, dtype=pd.ArrowDtype(lists.type))})
    return vectors(frame, column)


def unit(vectors: np.ndarray) -> np.ndarray:
    """Normalize vectors (n, d), none of which is zero, to length one; keep their dtype."""
    return (vectors / np.linalg.norm(vectors.astype(np.float64), axis=1)[:, None]).astype(
        vectors.dtype
    )


def to_device_of(array: np.ndarray, vectors: Any) -> Any:
    """Move an array to the memory, and the library, of ``vectors``."""
    if isinstance(vectors, np.ndarray) or not isinstance(array, np.ndarray):
        return array
    import cupy

    return cupy.asarray(array)


def as_numbers(value: Any) -> np.ndarray:
    """Numbers of NumPy, CuPy or torch, or lists of them, as an array on the host.

    Raises
    ------
    TypeError, ValueError
        If they are none.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu().float()
    array = np.asarray(value.get() if hasattr(value, "get") else value)
    if array.dtype.kind == "O":
        array = array.astype(np.float64)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"an array of {array.dtype} has no numbers")
    return array


def on_host(array: Any) -> np.ndarray:
    """Copy a CuPy array to NumPy."""
    return array if isinstance(array, np.ndarray) else array.get()


def from_vectors(
    frame: Any,
    columns: tuple[str, ...],
    name: str,
    function: Callable[..., Any],
    type_: pa.DataType = _FLOAT,
    *,
    directed: bool = False,
) -> Any:
    """Add or replace a column ``name``, computed by a function of columns of vectors.

    ``function`` takes an array (n, d) for each of ``columns``, NumPy or CuPy, and returns (n,). The
    result is null where one of the vectors is, or if ``directed`` has no direction: zero, NaN or
    infinite. Functions of the user need a `vector_map`.
    """
    if name in columns:
        raise ArgumentError(f"the column {name!r} would be made of itself: rename it first")
    for column in columns:
        check_vectors(frame, column)
    frame = without(frame, [name])
    if not isinstance(frame, FrameBase):
        return _map_vectors(frame, columns, name, function, type_, directed)
    operands = (columns, name, function, type_, directed)
    return new_collection(MapColumns(frame.expr, _map_vectors, (name,), columns, *operands))


def _map_vectors(
    frame: Any,
    columns: tuple[str, ...],
    name: str,
    function: Callable[..., Any],
    type_: pa.DataType,
    directed: bool,
) -> Any:
    backend = backend_of(frame)
    present = frame[columns[0]].notnull()
    for column in columns[1:]:
        present = present & frame[column].notnull()
    # Not all columns: the rows of others, such as pixels, would be copied.
    valid = frame[list(columns)][present]
    rows = np.flatnonzero(backend.host(present.values)).tolist()
    for column in columns if directed and rows else ():
        usable = np.flatnonzero(has_direction(backend.host(_vectors(valid, column)))).tolist()
        if len(usable) < len(rows):
            valid, rows = valid.take(usable), [rows[row] for row in usable]
    if pa.types.is_string(type_):
        texts = function(*(_vectors(valid, column) for column in columns)) if rows else []
        return backend.with_columns(frame, {name: (texts, type_)}, rows)
    dtype = type_.to_pandas_dtype()
    values = backend.numpy.empty(0, dtype)
    if len(valid):
        values = function(*(_vectors(valid, column) for column in columns))
        values = backend.numpy.asarray(values, dtype=dtype)
    return backend.with_columns(frame, {name: (values, type_)}, rows)


@dataclass(frozen=True)
class VectorMap(BatchMap):
    """``map_batches`` of a column of vectors, which are arrays (n, d) without nulls."""

    length: int | None = None  # that each vector must have

    def arguments(self, frame: Any) -> tuple[list[int], list[InputColumn]]:
        """The rows that have a vector, and the vectors.

        Raises
        ------
        ArgumentError
            If these have another length.
        """
        (column,) = self.inputs
        present = frame[column].notnull()
        rows = np.flatnonzero(backend_of(frame).host(present.values)).tolist()
        if not rows:
            return [], []
        values = _vectors(frame[[column]][present], column)
        if self.length not in (None, values.shape[1]):
            raise ArgumentError(
                f"{self.function.called_by}: the head takes vectors of length {self.length}, these "
                f"are of {values.shape[1]}"
            )
        return rows, [InputColumn(values)]


def vector_map(
    frame: Any,
    column: str,
    length: int | None,
    function: Callable[..., Any],
    outputs: Mapping[str, str],
    batch_size: int,
    **of_function: Any,
) -> VectorMap:
    """Check arguments, and build a `VectorMap` that keeps all columns of the frame.

    Raises
    ------
    ArgumentError
    """
    columns = list(frame.columns)
    batch_map = make_batch_map(
        function, outputs, batch_size, [column], True, columns, noun="vectors", **of_function
    )
    return VectorMap(**vars(batch_map), length=length)
