"""Conversion of frames between backends, for ``to_backend``.

Each column is converted independently of the others, since Dask may select columns first. Columns
of Arrow dtypes, including images, get the types of a read; others those of cuDF's conversion.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cudf
import cupy
import numpy as np
import pandas as pd
import pyarrow as pa
from cudf.core.column import ColumnBase
from dask_cudf.backends import to_cudf_dispatch_from_pandas, to_pandas_dispatch_from_cudf

from dask_image_ingest.decode import Pixels, pixels_of
from dask_image_ingest.frames.backend import gpus
from dask_image_ingest.frames.cudf.columns import (
    empty_frame,
    is_images,
    make_frame,
    pixels_on_host,
    with_columns_of,
)
from dask_image_ingest.frames.image_dtype import IMAGE
from dask_image_ingest.frames.pandas_backend import PandasBackend


def to_pandas(frame: cudf.DataFrame, **options: Any) -> pd.DataFrame:
    """Convert a cuDF frame: images as in the pandas backend, other columns by cuDF."""
    images = [name for name, dtype in frame.dtypes.items() if is_images(dtype)]
    others = frame[[name for name in frame.columns if name not in images]]
    if len(frame) or gpus():
        result = to_pandas_dispatch_from_cudf(others, **options)
    else:
        columns = {n: pd.Series([], dtype=_dtype_on_host(t)) for n, t in others.dtypes.items()}
        result = pd.DataFrame(columns, index=_index_on_host(frame.index))
    for name in images:
        pixels = pixels_on_host(frame[name])
        rows = PandasBackend().frame(pa.table({}), np.arange(len(frame)), pixels)
        result[name] = rows["image"].array
    return result[list(frame.columns)]


def to_cudf(frame: pd.DataFrame, **options: Any) -> cudf.DataFrame:
    """Convert a pandas frame: Arrow dtypes as in a read, other columns by cuDF."""
    pandas = PandasBackend()
    arrow = [name for name, dtype in frame.dtypes.items() if _is_arrow(dtype)]
    others = frame.drop(columns=arrow)
    if len(frame) or gpus():
        result = to_cudf_dispatch_from_pandas(others, **options)
    else:
        result = _empty(others)
    images = [name for name in arrow if pandas.is_images(frame[name].dtype)]
    metadata = [name for name in arrow if name not in images]
    converted = make_frame(pandas.to_arrow(frame[metadata]), result.index, None)
    converted.columns = metadata
    result = with_columns_of(result, converted)
    for name in images:
        result = with_columns_of(result, images_frame(name, _pixels(frame[name]), result.index))
    return result[list(frame.columns)]


def series_to_pandas(series: cudf.Series, **options: Any) -> pd.Series:
    """Convert a cuDF series as a column of a frame."""
    if not is_images(series.dtype) and (len(series) or gpus()):
        return to_pandas_dispatch_from_cudf(series, **options)
    return to_pandas(series.to_frame("series"))["series"].rename(series.name)


def series_to_cudf(series: pd.Series, **options: Any) -> cudf.Series:
    """Convert a pandas series as a column of a frame."""
    if not _is_arrow(series.dtype) and (len(series) or gpus()):
        return to_cudf_dispatch_from_pandas(series, **options)
    return named(to_cudf(series.to_frame("series"))["series"], series.name)


def images_frame(name: Any, pixels: Pixels, index: cudf.Index) -> cudf.DataFrame:
    """Frame of one image column, from pixels on the host."""
    if not len(index):
        return empty_frame({name: IMAGE}, index)
    on_device = replace(pixels, flat=cupy.asarray(pixels.flat))
    frame = make_frame(pa.table({}), index, on_device)
    frame.columns = [name]  # rename() would copy the pixels
    return frame


def named(series: cudf.Series, name: Any) -> cudf.Series:
    """Rename a series in place."""
    series.name = name  # rename() would copy the pixels
    return series


def _is_arrow(dtype: Any) -> bool:
    return isinstance(dtype, pd.ArrowDtype)


def _pixels(images: pd.Series) -> Pixels:
    arrays = PandasBackend().arrays(images)
    errors = ["no image" if array is None else None for array in arrays]
    return pixels_of(arrays, errors, np)


def _empty(frame: pd.DataFrame) -> cudf.DataFrame:
    """Convert a frame without rows as cuDF does, but without a GPU."""
    schema = pa.Schema.from_pandas(frame, preserve_index=False)
    index = _empty_index(frame.index)
    result = empty_frame(dict(zip(frame.columns, schema.types, strict=True)), index)
    for name, dtype in frame.dtypes.items():
        if isinstance(dtype, (pd.CategoricalDtype, pd.DatetimeTZDtype)):
            column = cudf.DataFrame._from_data({name: _empty_column(dtype)}, index=index)
            result = with_columns_of(result, column)
    return result


def _empty_column(dtype: pd.CategoricalDtype | pd.DatetimeTZDtype) -> ColumnBase:
    if isinstance(dtype, pd.DatetimeTZDtype):
        column = empty_frame({"times": pa.timestamp(dtype.unit)})["times"]._column.plc_column
        return ColumnBase.create(column, pd.DatetimeTZDtype(dtype.unit, str(dtype.tz)))
    # No categories, since a column of them would need a GPU.
    categories = cudf.Index.from_pylibcudf(
        empty_frame({"categories": pa.string()})["categories"]._column.plc_column
    )
    codes = empty_frame({"codes": pa.uint8()})["codes"]._column.plc_column
    return ColumnBase.create(codes, cudf.CategoricalDtype(categories, ordered=dtype.ordered))


def _empty_index(index: pd.Index) -> cudf.Index:
    if isinstance(index, pd.RangeIndex):
        return cudf.RangeIndex(index.start, index.stop, index.step, name=index.name)
    labels = empty_frame({"labels": pa.Array.from_pandas(index).type})["labels"]
    result = cudf.Index.from_pylibcudf(labels._column.plc_column)
    result.name = index.name
    return result


def _index_on_host(index: cudf.Index) -> pd.Index:
    if isinstance(index, cudf.RangeIndex):
        return index.to_pandas()
    return pd.Index([], dtype=_dtype_on_host(index.dtype), name=index.name)


def _dtype_on_host(dtype: Any) -> Any:
    """Dtype that cuDF converts a column of this dtype to, found without a GPU."""
    if isinstance(dtype, cudf.CategoricalDtype):
        return pd.CategoricalDtype(ordered=dtype.ordered)
    unchanged = (np.dtype, pd.StringDtype, pd.DatetimeTZDtype)
    return dtype if isinstance(dtype, unchanged) else np.dtype(object)
