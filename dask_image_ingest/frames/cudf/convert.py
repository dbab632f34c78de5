"""Conversion of frames between backends, for ``to_backend``.

Each column is converted independently of the others, since Dask may select columns first. Columns
of Arrow dtypes, including images, get the types of a read; others those of cuDF's conversion.

Functions for cuDF frames are registered with Dask in place of dask_cudf's, which it registers on
import: some of these fail for frames with images.
"""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Hashable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import cudf
import cupy
import numpy as np
import pandas as pd
import pyarrow as pa
import pylibcudf as plc
from cudf.comm.serialize import cuda_serialize_cudf_object, dask_serialize_cudf_object
from dask.dataframe.dispatch import (
    concat_dispatch,
    from_pyarrow_table_dispatch,
    meta_nonempty,
)
from dask_cudf.backends import (
    _nonempty_series,
    _table_to_cudf,
    concat_cudf,
    meta_nonempty_cudf,
    to_cudf_dispatch,
    to_cudf_dispatch_from_pandas,
    to_pandas_dispatch,
    to_pandas_dispatch_from_cudf,
)
from distributed.protocol import dask_serialize
from distributed.protocol.cuda import cuda_serialize

from dask_image_ingest.decode import Pixels, pixels_of
from dask_image_ingest.errors import PartitionTooLargeError
from dask_image_ingest.frames.arrow_types import is_text
from dask_image_ingest.frames.backend import gpus
from dask_image_ingest.frames.cudf.columns import (
    empty_frame,
    frame_columns,
    is_images,
    is_references,
    make_frame,
    pixels_on_host,
    table_of,
    with_columns_of,
)
from dask_image_ingest.frames.image_dtype import IMAGE
from dask_image_ingest.frames.pandas_backend import PandasBackend
from dask_image_ingest.frames.reference_dtype import as_references
from dask_image_ingest.typedefs import Dtype


def to_pandas(frame: cudf.DataFrame, **options: Any) -> pd.DataFrame:
    """Convert a cuDF frame: images, lists and structs as in the pandas backend, others by cuDF."""
    images = [name for name, dtype in frame.dtypes.items() if is_images(dtype)]
    nested = [n for n, t in frame.dtypes.items() if isinstance(t, _NESTED_DTYPES)]
    others = frame[[name for name in frame.columns if name not in nested]]
    if len(frame) or gpus():
        result = to_pandas_dispatch_from_cudf(others, **options)
    else:
        columns = {n: pd.Series([], dtype=_dtype_on_host(t)) for n, t in others.dtypes.items()}
        result = pd.DataFrame(columns, index=_index_on_host(frame.index))
    rows = np.arange(len(frame))
    for name in nested:
        if name in images:
            pixels = pixels_on_host(frame[name])
            result[name] = PandasBackend().frame(pa.table({}), rows, pixels)["image"].array
        else:
            column = table_of(frame[[name]]).column(0)
            column = as_references(column) if is_references(frame[name].dtype) else column
            table = pa.table({"nested": column})
            result[name] = PandasBackend().frame(table, rows, None)["nested"].array
    return result[list(frame.columns)]


def to_cudf(frame: pd.DataFrame, **options: Any) -> cudf.DataFrame:
    """Convert a pandas frame: Arrow dtypes as in a read, other columns by cuDF."""
    pandas = PandasBackend()
    arrow = [name for name, dtype in frame.dtypes.items() if _is_arrow(dtype)]
    others = frame.drop(columns=arrow)
    result = to_cudf_dispatch_from_pandas(others, **options)
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
    if not isinstance(series.dtype, _NESTED_DTYPES) and (len(series) or gpus()):
        return to_pandas_dispatch_from_cudf(series, **options)
    return to_pandas(series.to_frame("series"))["series"].rename(series.name)


def series_to_cudf(series: pd.Series, **options: Any) -> cudf.Series:
    """Convert a pandas series as a column of a frame."""
    if not _is_arrow(series.dtype):
        return to_cudf_dispatch_from_pandas(series, **options)
    return named(to_cudf(series.to_frame("series"))["series"], series.name)


def images_frame(name: str, pixels: Pixels, index: cudf.Index) -> cudf.DataFrame:
    """Frame of one image column, from pixels on the host."""
    if not len(index):
        return empty_frame({name: IMAGE}, index)
    on_device = replace(pixels, flat=cupy.asarray(pixels.flat))
    frame = make_frame(pa.table({}), index, on_device)
    frame.columns = [name]  # rename() would copy the pixels
    return frame


def named(series: cudf.Series, name: Hashable) -> cudf.Series:
    """Rename a series in place."""
    series.name = name  # rename() would copy the pixels
    return series


def _is_arrow(dtype: Dtype) -> bool:
    return isinstance(dtype, pd.ArrowDtype)


def _pixels(images: pd.Series) -> Pixels:
    arrays = PandasBackend().arrays(images)
    errors = ["no image" if array is None else None for array in arrays]
    return pixels_of(arrays, errors, np)


def _index_on_host(index: cudf.Index) -> pd.Index:
    if isinstance(index, cudf.RangeIndex):
        return index.to_pandas()
    return pd.Index([], dtype=_dtype_on_host(index.dtype), name=index.name)


def _dtype_on_host(dtype: Dtype) -> Any:
    """Dtype that cuDF converts a column of this dtype to, found without a GPU."""
    if isinstance(dtype, cudf.CategoricalDtype):
        return pd.CategoricalDtype(ordered=dtype.ordered)
    unchanged = (np.dtype, pd.StringDtype, pd.DatetimeTZDtype)
    return dtype if isinstance(dtype, unchanged) else np.dtype(object)


_NESTED = {plc.TypeId.LIST, plc.TypeId.STRING, plc.TypeId.STRUCT}
_NESTED_DTYPES = (cudf.ListDtype, cudf.StructDtype)


def register() -> None:
    """Replace dask_cudf's functions by this package's."""
    concat_dispatch.register(cudf.DataFrame, concat)
    from_pyarrow_table_dispatch.register(cudf.DataFrame, from_table)
    meta_nonempty.register(cudf.DataFrame, nonempty)
    meta_nonempty.register(cudf.Series, _nonempty_nested)
    to_pandas_dispatch.register(cudf.DataFrame, to_pandas)
    to_pandas_dispatch.register(cudf.Series, series_to_pandas)
    to_cudf_dispatch.register(pd.DataFrame, to_cudf)
    to_cudf_dispatch.register(pd.Series, series_to_cudf)
    for kind in (cudf.DataFrame, cudf.Series):
        cuda_serialize.register(kind, lambda part: cuda_serialize_cudf_object(compacted(part)))
        dask_serialize.register(kind, lambda part: dask_serialize_cudf_object(compacted(part)))
        copyreg.pickle(kind, lambda part: compacted(part).__reduce_ex__(pickle.HIGHEST_PROTOCOL))
    # cuDF 26.10 serializes a struct with strings, such as a reference, by the pickle of its dtype,
    # but the pickle of its dtype by that serialization.
    copyreg.pickle(cudf.StructDtype, _by_fields)


def _by_fields(dtype: cudf.StructDtype) -> tuple[type[cudf.StructDtype], tuple[dict[str, Any]]]:
    return cudf.StructDtype, (dict(dtype.fields),)


def concat(frames: list[cudf.DataFrame], *args: Any, **kwargs: Any) -> cudf.DataFrame:
    """Concatenate as dask_cudf, with a helpful error."""
    try:
        return concat_cudf(frames, *args, **kwargs)
    except OverflowError as error:
        if not _image_columns(frames[0]):
            raise
        raise PartitionTooLargeError(
            f"the images of {len(frames)} partitions can't be one cuDF dataframe: a list column "
            "holds at most 2.1 GB of pixels. Go through them with .images.iter_batches(), write "
            "them with to_parquet(), compute some of them at a time with .partitions[...], or drop "
            "the image column before compute()"
        ) from error


def from_table(meta: cudf.DataFrame, table: pa.Table, **options: Any) -> cudf.DataFrame:
    """Frame of a table that a P2P shuffle has sent, in the types of ``meta``.

    cuDF sends lists and structs without a value, and such fields, in Arrow's null type. If that
    holds for all rows of a partition, they would become ``object``.
    """
    for position, field in enumerate(table.schema):
        if _has_null_type(field.type) and field.name in meta.columns:
            dtype = meta[field.name].dtype
            if isinstance(dtype, _NESTED_DTYPES):
                typed = table.column(position).cast(dtype.to_arrow())
                table = table.set_column(position, field.name, typed)
    return _table_to_cudf(meta, table, **options)


def nonempty(frame: cudf.DataFrame) -> cudf.DataFrame:
    """Two rows of the frame's types, on which Dask infers a function's meta.

    dask_cudf's own would have null images, and lists of lists of integers for any lists.
    """
    nested = {n: t for n, t in frame.dtypes.items() if isinstance(t, _NESTED_DTYPES)}
    filled = meta_nonempty_cudf(frame[[name for name in frame.columns if name not in nested]])
    for name, dtype in nested.items():
        if is_images(dtype):
            shapes = np.tile(np.array([1, 1, 3], np.int32), (2, 1))
            pixels = Pixels(np.zeros(6, np.uint8), shapes, [None] * 2)
            new = images_frame(name, pixels, filled.index)
        else:
            type_ = dtype.to_arrow()
            table = pa.table({"nested": pa.array([_example(type_)] * 2, type_)})
            new = make_frame(table, filled.index, None)
            new.columns = [name]
        filled = with_columns_of(filled, new)
    return filled[list(frame.columns)]


def compacted(part: cudf.DataFrame | cudf.Series) -> Any:
    """Copy sliced columns before they are sent, so that only the rows of the slice are.

    cuDF does this only for slices with an offset: the first rows of nested columns would be sent
    with all pixels of the partition. Its copy also makes the source unspillable.
    """
    if isinstance(part, cudf.Series):
        frame = part.to_frame("series")
        result = compacted(frame)
        return part if result is frame else named(result["series"], part.name)
    columns = frame_columns(part)
    slices = {name: column for name, column in columns.items() if _is_slice(column.plc_column)}
    if not slices:
        return part
    for name, column in slices.items():
        with column.access(mode="read", scope="internal") as accessed:
            columns[name] = accessed.copy()
    # Not frame.copy(): cuDF would copy shared buffers again before it sends them.
    return cudf.DataFrame._from_data(columns, index=part.index)


def _is_slice(column: plc.Column) -> bool:
    # A spilled column would come back to the GPU for the copy. With an offset cuDF copies anyway.
    return bool(column.offset()) or (is_head(column) and not _spilled(column))


def is_head(column: plc.Column) -> bool:
    """True if a nested column is the first rows of a longer one."""
    if column.type().id() not in _NESTED or column.offset():
        return False
    if column.type().id() == plc.TypeId.STRUCT:
        return any(c.size() > column.size() or is_head(c) for c in column.children())
    # There is one offset more than rows.
    return any(child.size() > column.size() + 1 for child in column.children()[:1])


def _spilled(column: plc.Column) -> bool:
    """True if any of a column's memory has been spilled to the host."""
    buffer = column.data()
    if buffer is not None and getattr(buffer.owner, "is_spilled", False):
        return True
    return any(_spilled(child) for child in column.children())


def _has_null_type(type_: pa.DataType) -> bool:
    parts = (type_.field(number).type for number in range(type_.num_fields))
    return pa.types.is_null(type_) or any(map(_has_null_type, parts))


def _image_columns(frame: cudf.DataFrame) -> list[Any]:
    return [name for name, dtype in frame.dtypes.items() if is_images(dtype)]


def _nonempty_nested(series: cudf.Series, *args: Any) -> cudf.Series:
    if not isinstance(series.dtype, _NESTED_DTYPES):
        return _nonempty_series(series, *args)
    return named(nonempty(series.to_frame("nested"))["nested"], series.name)


def _example(type_: pa.DataType) -> Any:
    """Example value of a type, as input for Arrow."""
    if pa.types.is_struct(type_):
        return {field.name: _example(field.type) for field in type_}
    if pa.types.is_list(type_):
        return [_example(type_.value_type)]
    if pa.types.is_decimal(type_):
        return Decimal(0)
    return "cat" if is_text(type_) else pa.scalar(1).cast(type_)
