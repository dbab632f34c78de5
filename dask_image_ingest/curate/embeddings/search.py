"""``find_nearest``: similarity search by a vector or an image."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from dask_image_ingest.arguments import shown, whole_number
from dask_image_ingest.curate.embeddings.vectors import (
    as_numbers,
    check_vectors,
    unit,
    valid_vectors,
)
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset.plan import select_columns
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of, pandas_type, without
from dask_image_ingest.ops import call_once

# Ties are sorted by those of these columns that a frame has.
_TIE_BREAKERS = ("__key__", "__url__", "offset")


def find_nearest(
    frame: Any,
    query: Any,
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
    merge = functools.partial(_merge, k=k)
    if isinstance(frame, FrameBase):
        empty = find(frame._meta)
        found = frame.reduction(find, combine=merge, aggregate=merge, meta=empty).compute()
    else:
        found = merge(find(frame))
    return found.reset_index(drop=True)


def _queries(query: Any, model: Callable[..., Any] | None) -> np.ndarray:
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


def _on_host(value: Any, given: str = "query=") -> np.ndarray:
    try:
        return as_numbers(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"{given}{shown(value)}: pass an array of numbers") from None


def _find(frame: Any, queries: np.ndarray, k: int, column: str) -> pd.DataFrame:
    """The nearest rows of a partition, for each query."""
    rows, vectors = valid_vectors(frame, column)
    if len(rows) and vectors.shape[1] != queries.shape[1]:
        raise ArgumentError(
            f"query= has vectors of length {queries.shape[1]}, the column {column!r} of "
            f"{vectors.shape[1]}"
        )
    backend = backend_of(frame)
    table = backend.to_arrow(without(frame, [column])).to_pandas(types_mapper=pandas_type)
    nearest_of_queries = []
    if len(rows):
        # In float64, so that the rounded result of a row does not depend on its partition.
        cosines = (queries @ unit(vectors.astype(np.float64)).T).astype(np.float32)
        for number, cosine in enumerate(cosines):
            least = np.partition(cosine, -k)[-k] if k < len(cosine) else -np.inf
            near = np.flatnonzero(cosine >= least)
            nearest_rows = table.iloc[rows[near]].copy()
            nearest_rows.insert(0, "similarity", cosine[near])
            nearest_rows.insert(0, "query", np.int64(number))
            nearest_of_queries.append(_top_k(nearest_rows, k))
    if nearest_of_queries:
        return pd.concat(nearest_of_queries)
    empty = table.iloc[:0].copy()
    empty.insert(0, "similarity", np.empty(0, np.float32))
    empty.insert(0, "query", np.empty(0, np.int64))
    return empty


def _merge(parts: pd.DataFrame, k: int) -> pd.DataFrame:
    """The nearest rows of several partitions."""
    return _top_k(parts, k)


def _top_k(rows: pd.DataFrame, k: int) -> pd.DataFrame:
    names = [name for name in _TIE_BREAKERS if name in rows.columns]
    ordered = rows.sort_values(
        ["query", "similarity", *names], ascending=[True, False, *(True for _ in names)],
        kind="stable",
    )  # fmt: skip
    return ordered.groupby("query", sort=False).head(k)
