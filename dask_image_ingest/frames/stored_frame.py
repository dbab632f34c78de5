"""pandas frames in parquet files, index and dtypes included.

pandas' own reader asks for dtypes by their names, and Arrow's nested types have none that it knows.
Here a frame's columns are as an empty frame like it says.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pandas as pd
import pyarrow as pa

__all__ = ["index_columns", "to_frame"]


def to_frame(table: pa.Table, meta: pd.DataFrame) -> pd.DataFrame:
    """A frame again, of the columns of ``meta``."""
    told = json.loads(table.schema.metadata[b"pandas"])
    types = {column["field_name"]: column for column in told["columns"]}
    if told["creator"]["library"] == "cudf":  # which has fewer dtypes, by other names
        types = {name: column | {"numpy_type": None} for name, column in types.items()}
    columns = {
        name: _values(table.column(name), types[name], meta[name].dtype) for name in meta.columns
    }
    frame = pd.DataFrame(columns, index=_index(table, told, types, meta.index))
    return frame if len(meta.columns) else frame.set_axis(meta.columns, axis=1)


def index_columns(schema: pa.Schema) -> list[str]:
    """The columns of a table that are the index of its frame; none if that is a range."""
    told = json.loads(schema.metadata[b"pandas"])["index_columns"]
    return [name for name in told if isinstance(name, str)]


def _index(table: pa.Table, told: Any, types: Any, meta: pd.Index) -> pd.Index:
    (kept,) = told["index_columns"]
    if isinstance(kept, dict):
        return pd.RangeIndex(kept["start"], kept["stop"], kept["step"], name=meta.name)
    return pd.Index(_values(table.column(kept), types[kept], meta.dtype), name=meta.name)


def _values(column: pa.ChunkedArray, told: dict[str, Any], meta: Any) -> Any:
    """A column's values, in the dtype that they had."""
    if told["pandas_type"] == "categorical":
        return _categories(column.to_pandas(), told["metadata"]["ordered"], meta)
    dtype = meta
    if told["numpy_type"] not in (None, str(meta)):
        # A function that gave other types than it had said; those with no name stay Arrow's.
        with suppress(TypeError, ValueError, NotImplementedError):
            dtype = pd.api.types.pandas_dtype(told["numpy_type"])
    if hasattr(dtype, "__from_arrow__"):
        return dtype.__from_arrow__(column)
    values = column.to_pandas()
    return (values.astype(dtype) if dtype.kind in "iufb" else values).array


def _categories(values: pd.Series, ordered: bool, meta: Any) -> Any:
    # Parquet keeps only the categories that occur, and those of numbers as numbers.
    made = pd.Categorical(values, ordered=None if values.dtype == "category" else ordered)
    known = isinstance(meta, pd.CategoricalDtype) and set(made.categories) <= set(meta.categories)
    return made.astype(meta) if known else made
