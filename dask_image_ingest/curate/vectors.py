"""Columns of vectors: as arrays, columns computed from them, and ``find_nearest``."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dask_image_ingest.arguments import check_frame, shown, whole_number
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset.plan import select_columns
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of, pandas_type, without
from dask_image_ingest.ops import (
    BatchMap,
    InputColumn,
    apply_batch_map,
    call_once,
    make_batch_map,
    vectors,
)
from dask_image_ingest.typedefs import AnyFrame, Array, DataFrame

_FLOAT = pa.float32()

# Vectors of a batch, and of those whose lengths are computed at once.
_BATCH_SIZE, _BLOCK = 10_000, 4096

# Nearest rows of equal similarity are sorted by those of these columns that a frame has.
_TIE_BREAKERS = ("__key__", "__url__", "offset")


def check_vectors(frame: AnyFrame, column: object) -> None:
    """Raise ``ArgumentError`` if the frame lacks this column."""
    check_frame(frame._meta if isinstance(frame, FrameBase) else frame)
    if column not in frame.columns:
        raise ArgumentError(
            f"the frame has no column {column!r}: pass column=, the name of a column of vectors, "
            "such as embed() makes"
        )


def valid_vectors(frame: DataFrame, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a pandas or cuDF frame whose vector is not null, finite and not zero.

    Their positions, int64 (n,), and their vectors, float32 (n, d), on the host.
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
    lengths = _lengths(vectors)
    usable: np.ndarray = np.isfinite(lengths) & (lengths > 0)
    return usable


def _lengths(vectors: np.ndarray) -> np.ndarray:
    """Euclidean norms in float64, a block at a time, of which alone there is a copy."""
    lengths = np.empty(len(vectors))
    for start in range(0, len(vectors), _BLOCK):
        block = slice(start, start + _BLOCK)
        lengths[block] = np.linalg.norm(vectors[block].astype(np.float64), axis=1)
    return lengths


def _vectors(frame: DataFrame, column: str) -> Array:
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
    found, lengths = np.empty(vectors.shape, vectors.dtype), _lengths(vectors)
    for start in range(0, len(vectors), _BLOCK):
        block = slice(start, start + _BLOCK)
        found[block] = vectors[block] / lengths[block, None]
    return found


def to_device_of(array: np.ndarray, vectors: Array) -> Array:
    """Move an array to the memory, and the library, of ``vectors``."""
    if isinstance(vectors, np.ndarray) or not isinstance(array, np.ndarray):
        return array
    import cupy

    return cupy.asarray(array)


def as_numbers(value: object) -> np.ndarray:
    """Numbers of NumPy, CuPy or torch, or lists of them, as an array on the host.

    ``TypeError`` or ``ValueError`` if they are none.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu().float()
    array = np.asarray(value.get() if hasattr(value, "get") else value)
    if array.dtype.kind == "O":
        array = array.astype(np.float64)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"an array of {array.dtype} has no numbers")
    return array


def on_host(array: Array) -> np.ndarray:
    """Copy a CuPy array to NumPy."""
    return array if isinstance(array, np.ndarray) else array.get()


@dataclass(frozen=True)
class VectorMap(BatchMap):
    """``map_batches`` of columns of vectors, which are arrays (n, d) without nulls."""

    length: int | None = None  # that each vector must have
    directed: bool = False  # zero, NaN and infinite vectors count as null

    def arguments(self, frame: DataFrame) -> tuple[list[int], list[InputColumn]]:
        """The rows that have all vectors, and the vectors."""
        backend = backend_of(frame)
        present = functools.reduce(operator.and_, (frame[name].notnull() for name in self.inputs))
        rows = np.flatnonzero(backend.host(present.values))
        if not len(rows):
            return [], []
        # Not all columns: the rows of others, such as pixels, would be copied.
        valid = frame[list(self.inputs)][present]
        columns = [_vectors(valid, name) for name in self.inputs]
        length = columns[0].shape[1] if self.length is None else self.length
        for column in columns:
            if column.shape[1] != length:
                raise ArgumentError(
                    f"{self.function.called_by} needs vectors of length {length}, these are of "
                    f"{column.shape[1]}: take both from one model"
                )
        if self.directed:
            usable = [has_direction(backend.host(column)) for column in columns]
            kept = np.flatnonzero(np.logical_and.reduce(usable))
            if len(kept) < len(rows):
                rows, on_device = rows[kept], backend.numpy.asarray(kept)
                columns = [column[on_device] for column in columns]
        return rows.tolist(), [InputColumn(column) for column in columns]


def map_vectors(
    frame: AnyFrame,
    columns: Sequence[str],
    outputs: Mapping[str, str],
    function: Callable[..., Any],
    *,
    length: int | None = None,
    directed: bool = False,
    batch_size: int = _BATCH_SIZE,
    **of_function: Any,
) -> Any:
    """Add or replace columns, computed by a function of columns of vectors.

    ``function`` takes an array (n, d) for each of ``columns``, NumPy or CuPy, and returns (n,). The
    result is null where one of the vectors is, or if ``directed`` has no direction: zero, NaN or
    infinite. ``of_function`` are fields of `BatchFunction`.
    """
    for column in columns:
        check_vectors(frame, column)
        if column in outputs:
            raise ArgumentError(f"the column {column!r} would be made of itself: rename it first")
    kept = list(frame.columns)
    batch_map = make_batch_map(
        function, outputs, batch_size, columns, True, kept, noun="vectors", **of_function
    )
    return apply_batch_map(frame, VectorMap(**vars(batch_map), length=length, directed=directed))


def find_nearest(
    frame: AnyFrame,
    query: Array | Sequence[float] | Sequence[Sequence[float]],
    k: int = 10,
    *,
    column: str = "embedding",
    model: Callable[..., Any] | None = None,
) -> pd.DataFrame:
    """Find the rows nearest to a vector or an image; computed at once.

    Each partition finds its own ``k`` nearest rows, which are merged in a tree. The vectors stay on
    the workers.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with a column of vectors.
    query
        A vector (d,), several (n, d), or with ``model`` an image (height, width, channels) or
        several (n, height, width, channels), uint8.
    k
        Rows to find for each query, at most.
    column
        The column of vectors, as from ``embed``.
    model
        The model of the embeddings, as for ``embed``, to embed the query in this process.

    Returns
    -------
    pandas.DataFrame
        The nearest rows of each query, the nearest first: ``query``, int64, the number of the
        query; ``similarity``, float32, the cosine x·y / (‖x‖ ‖y‖); and the other columns of
        ``frame`` except images and the vectors. Ties are sorted by key, URL and offset. Rows
        without a vector, or with one that is zero or not finite, are left out.

    Raises
    ------
    ArgumentError
        If the query is of another length than the vectors, zero or not finite, ``k`` is not
        positive, or a column is missing.
    FunctionError
        If the model fails.

    Examples
    --------
    >>> query = frame.images.vectors("embedding")[0]
    >>> found = curate.find_nearest(frame[["__key__", "embedding"]], query, k=3)
    >>> found.head(1)
       query  similarity __key__
    0      0         1.0    0000
    """
    check_vectors(frame, column)
    k = whole_number("k", k, 1, "pass a positive number of rows")
    queries = _queries(query, model)
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    backend = backend_of(meta)
    kept = [
        name
        for name, dtype in meta.dtypes.items()
        if name != column and not backend.is_images(dtype)
    ]
    taken = [name for name in ("query", "similarity") if name in kept]
    if taken:
        raise ArgumentError(
            f"the frame has a column {taken[0]!r}, as the result has: rename or drop it first"
        )
    frame = select_columns(frame, [*kept, column])
    find = functools.partial(_find, queries=queries, k=k, column=column)
    merge = functools.partial(_top_k, k=k)
    if isinstance(frame, FrameBase):
        empty = find(frame._meta)
        found = frame.reduction(find, combine=merge, aggregate=merge, meta=empty).compute()
    else:
        found = merge(find(frame))
    return found.reset_index(drop=True)


def _queries(query: object, model: Callable[..., Any] | None) -> np.ndarray:
    array = _on_host(query)
    if model is not None:
        if array.dtype != np.uint8 or array.ndim not in (3, 4):
            raise ArgumentError(
                f"query= is an array of shape {array.shape} and {array.dtype}: with model= pass an "
                "image (height, width, channels) of uint8, or several"
            )
        images = array if array.ndim == 4 else array[None]
        array = _on_host(call_once(model, "find_nearest", "__call__", images, "query="), "model=")
    if array.ndim not in (1, 2) or array.dtype.kind not in "iuf" or not array.size:
        raise ArgumentError(
            f"query={shown(query)}: pass a vector, several of them (n, d), or an image and model="
        )
    queries = np.atleast_2d(array).astype(np.float64)
    lengths = np.linalg.norm(queries, axis=1)
    if not (np.isfinite(lengths) & (lengths > 0)).all():
        raise ArgumentError("a vector of query= is zero or not finite: it has no direction")
    return unit(queries)


def _on_host(value: object, given: str = "query=") -> np.ndarray:
    try:
        return as_numbers(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"{given}{shown(value)}: pass an array of numbers") from None


def _find(frame: DataFrame, queries: np.ndarray, k: int, column: str) -> pd.DataFrame:
    """The nearest rows of a partition, for each query."""
    rows, vectors = valid_vectors(frame, column)
    if len(rows) and vectors.shape[1] != queries.shape[1]:
        raise ArgumentError(
            f"query= has vectors of length {queries.shape[1]}, the column {column!r} of "
            f"{vectors.shape[1]}"
        )
    backend = backend_of(frame)
    table = backend.to_arrow(without(frame, [column])).to_pandas(types_mapper=pandas_type)
    # One frame without rows, so that a partition without vectors has the columns too.
    found = [_with_cosines(table.iloc[:0], 0, np.empty(0, np.float32))]
    if len(rows):
        # In float64, so that the rounded result of a row does not depend on its partition.
        cosines = (queries @ unit(vectors.astype(np.float64)).T).astype(np.float32)
        for number, cosine in enumerate(cosines):
            least = np.partition(cosine, -k)[-k] if k < len(cosine) else -np.inf
            near = np.flatnonzero(cosine >= least)
            found.append(_top_k(_with_cosines(table.iloc[rows[near]], number, cosine[near]), k))
    return pd.concat(found) if len(found) > 1 else found[0]


def _with_cosines(rows: pd.DataFrame, query: int, cosines: np.ndarray) -> pd.DataFrame:
    rows = rows.copy()
    rows.insert(0, "similarity", cosines)
    rows.insert(0, "query", np.full(len(rows), query, np.int64))
    return rows


def _top_k(rows: pd.DataFrame, k: int) -> pd.DataFrame:
    names = [name for name in _TIE_BREAKERS if name in rows.columns]
    ordered = rows.sort_values(
        ["query", "similarity", *names], ascending=[True, False, *(True for _ in names)],
        kind="stable",
    )  # fmt: skip
    return ordered.groupby("query", sort=False).head(k)
