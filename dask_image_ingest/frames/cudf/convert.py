"""Frames of one backend as the other has them: what ``to_backend`` does.

A column becomes the same whatever stands beside it, since dask asks for some columns alone. Those
of Arrow's dtypes, images among them, become what a read gives; the others what cuDF makes of them.
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
    """A frame on the host: its images as the pandas backend has them, the rest as cuDF has it."""
    images = [name for name, dtype in frame.dtypes.items() if is_images(dtype)]
    others = frame[[name for name in frame.columns if name not in images]]
    if len(frame) or gpus():
        made = to_pandas_dispatch_from_cudf(others, **options)
    else:
        columns = {n: pd.Series([], dtype=_on_host(t)) for n, t in others.dtypes.items()}
        made = pd.DataFrame(columns, index=_index_on_host(frame.index))
    for name in images:
        pixels = pixels_on_host(frame[name])
        rows = PandasBackend().frame(pa.table({}), np.arange(len(frame)), pixels)
        made[name] = rows["image"].array
    return made[list(frame.columns)]


def to_cudf(frame: pd.DataFrame, **options: Any) -> cudf.DataFrame:
    """A pandas frame as the cuDF backend has it."""
    pandas = PandasBackend()
    arrow = [name for name, dtype in frame.dtypes.items() if _is_ours(dtype)]
    others = frame.drop(columns=arrow)
    if len(frame) or gpus():
        made = to_cudf_dispatch_from_pandas(others, **options)
    else:
        made = _empty(others)
    images = [name for name in arrow if pandas.is_images(frame[name].dtype)]
    plain = [name for name in arrow if name not in images]
    converted = make_frame(pandas.to_arrow(frame[plain]), made.index, None)
    converted.columns = plain
    made = with_columns_of(made, converted)
    for name in images:
        made = with_columns_of(made, images_frame(name, _pixels(frame[name]), made.index))
    return made[list(frame.columns)]


def series_to_pandas(series: cudf.Series, **options: Any) -> pd.Series:
    """A series on the host, as in a frame."""
    if not is_images(series.dtype) and (len(series) or gpus()):
        return to_pandas_dispatch_from_cudf(series, **options)
    return to_pandas(series.to_frame("series"))["series"].rename(series.name)


def series_to_cudf(series: pd.Series, **options: Any) -> cudf.Series:
    """A pandas series as in a frame of the cuDF backend."""
    if not _is_ours(series.dtype) and (len(series) or gpus()):
        return to_cudf_dispatch_from_pandas(series, **options)
    return named(to_cudf(series.to_frame("series"))["series"], series.name)


def images_frame(name: Any, pixels: Pixels, index: cudf.Index) -> cudf.DataFrame:
    """A frame of pixels on the host, as one column on the GPU."""
    if not len(index):
        return empty_frame({name: IMAGE}, index)
    on_device = replace(pixels, flat=cupy.asarray(pixels.flat))
    frame = make_frame(pa.table({}), index, on_device)
    frame.columns = [name]  # rename() would copy the pixels
    return frame


def named(series: cudf.Series, name: Any) -> cudf.Series:
    """A series under this name."""
    series.name = name  # rename() would copy the pixels
    return series


def _is_ours(dtype: Any) -> bool:
    return isinstance(dtype, pd.ArrowDtype) or PandasBackend().is_images(dtype)


def _pixels(images: pd.Series) -> Pixels:
    arrays = PandasBackend().arrays(images)
    errors = ["no image" if array is None else None for array in arrays]
    return pixels_of(arrays, errors, np)


def _empty(frame: pd.DataFrame) -> cudf.DataFrame:
    """A frame of no rows as cuDF makes it, which would ask a GPU."""
    schema = pa.Schema.from_pandas(frame, preserve_index=False)
    index = _empty_index(frame.index)
    made = empty_frame(dict(zip(frame.columns, schema.types, strict=True)), index)
    for name, dtype in frame.dtypes.items():
        if isinstance(dtype, (pd.CategoricalDtype, pd.DatetimeTZDtype)):
            column = _empty_column(dtype)
            made = with_columns_of(made, cudf.DataFrame._from_data({name: column}, index=index))
    return made


def _empty_column(dtype: pd.CategoricalDtype | pd.DatetimeTZDtype) -> ColumnBase:
    if isinstance(dtype, pd.DatetimeTZDtype):
        column = empty_frame({"times": pa.timestamp(dtype.unit)})["times"]._column.plc_column
        return ColumnBase.create(column, pd.DatetimeTZDtype(dtype.unit, str(dtype.tz)))
    # What the categories are is known where there is a GPU.
    nothing = cudf.Index.from_pylibcudf(
        empty_frame({"categories": pa.string()})["categories"]._column.plc_column
    )
    codes = empty_frame({"codes": pa.uint8()})["codes"]._column.plc_column
    return ColumnBase.create(codes, cudf.CategoricalDtype(nothing, ordered=dtype.ordered))


def _empty_index(index: pd.Index) -> cudf.Index:
    if isinstance(index, pd.RangeIndex):
        return cudf.RangeIndex(index.start, index.stop, index.step, name=index.name)
    labels = empty_frame({"labels": pa.Array.from_pandas(index).type})["labels"]
    made = cudf.Index.from_pylibcudf(labels._column.plc_column)
    made.name = index.name
    return made


def _index_on_host(index: cudf.Index) -> pd.Index:
    if isinstance(index, cudf.RangeIndex):
        return index.to_pandas()
    return pd.Index([], dtype=_on_host(index.dtype), name=index.name)


def _on_host(dtype: Any) -> Any:
    # As cuDF converts a column of this dtype, asked for without a GPU.
    if isinstance(dtype, cudf.CategoricalDtype):
        return pd.CategoricalDtype(ordered=dtype.ordered)
    plain = (np.dtype, pd.StringDtype, pd.DatetimeTZDtype)
    return dtype if isinstance(dtype, plain) else np.dtype(object)
