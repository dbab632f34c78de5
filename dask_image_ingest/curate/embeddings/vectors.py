"""Columns of vectors: taken from a frame, and columns that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dask_image_ingest.arguments import check_frame, is_column
from dask_image_ingest.dask_internals import FrameBase, new_collection
from dask_image_ingest.dataset import MapColumns
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of
from dask_image_ingest.ops import vectors

_FLOAT = pa.float32()


def check_vectors(frame: Any, column: Any) -> None:
    """Refuse a frame without this column.

    Raises
    ------
    ArgumentError
    """
    check_frame(frame._meta if isinstance(frame, FrameBase) else frame)
    if not is_column(column, frame.columns):
        raise ArgumentError(
            f"the frame has no column {column!r}: pass column=, the name of a column of vectors, "
            "such as embed() makes"
        )


def valid_vectors(frame: Any, column: str) -> tuple[np.ndarray, np.ndarray]:
    """The vectors of a pandas or cuDF frame that point anywhere, on the host.

    Returns
    -------
    rows : array, shape (n,), int64
        Places of the rows whose vector is there, finite and not zero.
    vectors : array, shape (n, d), float32
        Their vectors.
    """
    backend = backend_of(frame)
    there = frame[column].notnull()
    found = backend.host(_vectors(frame[there], column))
    if not len(found):
        return np.empty(0, np.int64), np.empty((0, found.shape[1]), np.float32)
    rows = np.flatnonzero(backend.host(there.values))
    found = found.astype(np.float32, copy=False)
    lengths = np.linalg.norm(found.astype(np.float64), axis=1)
    usable = np.isfinite(lengths) & (lengths > 0)
    return rows[usable], found[usable]


def _vectors(frame: Any, column: str) -> Any:
    """The vectors of a frame whose column has no nulls: (n, d)."""
    dtype = frame[column].dtype
    fixed = isinstance(dtype, pd.ArrowDtype) and pa.types.is_fixed_size_list(dtype.pyarrow_dtype)
    if fixed or (isinstance(frame, pd.DataFrame) and pd.api.types.is_object_dtype(dtype)):
        try:
            lists = pa.array(frame[column], pa.list_(_FLOAT), from_pandas=True)
        except (pa.ArrowException, TypeError, ValueError):
            pass  # what it is will be told
        else:
            frame = pd.DataFrame({column: pd.Series(lists, dtype=pd.ArrowDtype(lists.type))})
    return vectors(frame, column)


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors (n, d), of which none is zero, at length one; of their own type."""
    return (vectors / np.linalg.norm(vectors.astype(np.float64), axis=1)[:, None]).astype(
        vectors.dtype
    )


def beside(array: np.ndarray, vectors: Any) -> Any:
    """An array in the library, and the memory, of vectors."""
    if isinstance(vectors, np.ndarray) or not isinstance(array, np.ndarray):
        return array
    import cupy

    return cupy.asarray(array)


def on_host(array: Any) -> np.ndarray:
    """An array of NumPy or CuPy as one of NumPy."""
    return array if isinstance(array, np.ndarray) else array.get()


def from_vectors(
    frame: Any,
    columns: tuple[str, ...],
    name: str,
    function: Callable[..., Any],
    type_: pa.DataType = _FLOAT,
) -> Any:
    """``frame`` with a column of numbers that a function makes of columns of vectors.

    ``function`` takes an array (n, d) for each of ``columns``, NumPy or CuPy, and gives (n,). It is
    null where one of the vectors is, and replaces a column of this name.
    """
    if name in columns:
        raise ArgumentError(f"the column {name!r} would be made of itself: rename it first")
    for column in columns:
        check_vectors(frame, column)
    frame = frame.drop(columns=name) if name in frame.columns else frame
    if not isinstance(frame, FrameBase):
        return _map_vectors(frame, columns, name, function, type_)
    operands = (columns, name, function, type_)
    return new_collection(MapColumns(frame.expr, _map_vectors, (name,), columns, *operands))


def _map_vectors(
    frame: Any,
    columns: tuple[str, ...],
    name: str,
    function: Callable[..., Any],
    type_: pa.DataType,
) -> Any:
    backend = backend_of(frame)
    there = frame[columns[0]].notnull()
    for column in columns[1:]:
        there = there & frame[column].notnull()
    some = frame[there]
    rows = np.flatnonzero(backend.host(there.values)).tolist()
    if pa.types.is_string(type_):
        texts = function(*(_vectors(some, column) for column in columns)) if rows else []
        return backend.with_columns(frame, {name: (texts, type_)}, rows)
    dtype = type_.to_pandas_dtype()
    made = backend.numpy.empty(0, dtype)
    if len(some):
        made = function(*(_vectors(some, column) for column in columns))
        made = backend.numpy.asarray(made, dtype=dtype)
        if made.shape not in ((len(some),), (len(some), 1)):
            raise ArgumentError(
                f"{name!r}: the function gives an array of shape {tuple(made.shape)} for "
                f"{len(some)} vectors; it has to give a number for each, ({len(some)},)"
            )
    return backend.with_columns(frame, {name: (made.reshape(-1), type_)}, rows)
