"""cuDF frames in parquet files: the files that pandas frames give, so that either reads both."""

from __future__ import annotations

import json

import cudf
import cupy
import numpy as np
import pyarrow as pa

from dask_image_ingest.decode import Pixels
from dask_image_ingest.frames.cudf_columns import make_frame, with_columns_of
from dask_image_ingest.frames.cudf_values import bytes_of, is_bytes, is_images, pixels_on_host
from dask_image_ingest.frames.image_dtype import image_array, image_views
from dask_image_ingest.frames.image_type import as_images, holds_images


def to_table(frame: cudf.DataFrame) -> pa.Table:
    """A frame with its index as a table that parquet can hold."""
    images = [name for name in frame.columns if is_images(frame[name].dtype)]
    table = frame.drop(columns=images).to_arrow()
    metadata = json.loads(table.schema.metadata[b"pandas"])
    # Types are named as cuDF has them: a reader with pandas goes by its own.
    metadata["creator"] = {"library": "cudf", "version": cudf.__version__}
    for name in (name for name in frame.columns if is_bytes(frame[name].dtype)):
        number = table.schema.get_field_index(name)
        table = table.set_column(number, name, bytes_of(table.column(number)))
    for name in images:
        pixels = pixels_on_host(frame[name])
        absent = np.array([error is not None for error in pixels.errors], bool)
        table = table.append_column(name, image_array(pixels.flat, pixels.shapes, absent))
        told = {"name": name, "field_name": name, "pandas_type": "object", "numpy_type": "image"}
        metadata["columns"].append({**told, "metadata": None})
    return table.replace_schema_metadata({b"pandas": json.dumps(metadata).encode()})


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
        frame = with_columns_of(frame, made.rename(columns={"image": name}))
    return frame[list(meta.columns)]


def _pixels(column: pa.ChunkedArray) -> Pixels:
    images = as_images(column).combine_chunks()
    views = image_views(images)
    shapes = np.array([(0, 0, 0) if view is None else view.shape for view in views], np.int32)
    there = [view.reshape(-1) for view in views if view is not None]
    flat = np.concatenate(there) if there else np.empty(0, np.uint8)
    errors = ["no image" if view is None else None for view in views]
    return Pixels(cupy.asarray(flat), shapes.reshape(-1, 3), errors)


__all__ = ["to_frame", "to_table"]
