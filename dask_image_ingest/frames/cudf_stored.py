"""cuDF frames in parquet files: the files that pandas frames give, so that either reads both."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import cudf
import cupy
import numpy as np
import pyarrow as pa

from dask_image_ingest.decode import Pixels
from dask_image_ingest.frames.cudf_columns import make_frame, with_columns_of
from dask_image_ingest.frames.cudf_values import is_images, pixels_on_host, typed
from dask_image_ingest.frames.image_dtype import image_array, image_views
from dask_image_ingest.frames.image_type import as_images, holds_images


def to_table(frame: cudf.DataFrame) -> pa.Table:
    """A frame with its index as a table that parquet can hold."""
    # A selection: drop() would copy the pixels, and keep cuDF from spilling them.
    plain = frame[[name for name in frame.columns if not is_images(frame[name].dtype)]]
    made = plain.to_arrow(preserve_index=False)
    told = json.loads(made.schema.metadata[b"pandas"])
    # Types are named as cuDF has them: a reader with pandas goes by its own.
    told["creator"] = {"library": "cudf", "version": cudf.__version__}
    columns = {}
    for name, dtype in frame.dtypes.items():
        if is_images(dtype):
            columns[name] = _image_array(frame[name])
            named = {"name": name, "field_name": name}
            types = {"pandas_type": "object", "numpy_type": "image", "metadata": None}
            told["columns"].append(named | types)
        else:
            columns[name] = typed(made.column(name).combine_chunks(), dtype)
    index = frame.index
    if isinstance(index, cudf.RangeIndex):
        edges = {"start": index.start, "stop": index.stop, "step": index.step}
        told["index_columns"] = [{"kind": "range", "name": index.name, **edges}]
    else:
        kept = _free_name("__index_level_0__" if index.name is None else index.name, columns)
        alone = index.to_frame(index=False, name=kept).to_arrow(preserve_index=False)
        (described,) = json.loads(alone.schema.metadata[b"pandas"])["columns"]
        columns[kept] = alone.column(kept)
        told["index_columns"] = [kept]
        told["columns"].append(described | {"name": index.name})
    return pa.table(columns).replace_schema_metadata({b"pandas": json.dumps(told).encode()})


def to_frame(table: pa.Table, meta: cudf.DataFrame) -> cudf.DataFrame:
    """A frame again, of the columns of ``meta``."""
    (kept,) = json.loads(table.schema.metadata[b"pandas"])["index_columns"]
    index = (
        cudf.RangeIndex(kept["start"], kept["stop"], kept["step"], name=meta.index.name)
        if isinstance(kept, dict)
        else cudf.Index(cudf.Series.from_arrow(table.column(kept)), name=meta.index.name)
    )
    images = [n for n in meta.columns if holds_images(table.schema.field(n).type)]
    plain = table.select([name for name in meta.columns if name not in images])
    frame = make_frame(plain.replace_schema_metadata(None), index, None)
    for name in images:
        made = make_frame(pa.table({}), index, _pixels(table.column(name)))
        made.columns = [name]  # rename() would copy the pixels
        frame = with_columns_of(frame, made)
    return frame[list(meta.columns)]


def _image_array(series: cudf.Series) -> pa.Array:
    pixels = pixels_on_host(series)
    absent = np.array([error is not None for error in pixels.errors], bool)
    return image_array(pixels.flat, pixels.shapes, absent)


def _free_name(name: Any, taken: Collection[Any]) -> str:
    name = str(name)
    while name in taken:
        name = f"_{name}"
    return name


def _pixels(column: pa.ChunkedArray) -> Pixels:
    images = as_images(column).combine_chunks()
    views = image_views(images)
    shapes = np.array([(0, 0, 0) if view is None else view.shape for view in views], np.int32)
    there = [view.reshape(-1) for view in views if view is not None]
    flat = np.concatenate(there) if there else np.empty(0, np.uint8)
    errors = ["no image" if view is None else None for view in views]
    return Pixels(cupy.asarray(flat), shapes.reshape(-1, 3), errors)


__all__ = ["to_frame", "to_table"]
