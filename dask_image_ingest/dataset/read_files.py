"""The files that a frame reads, so that no writer writes or removes one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset.plan.base_nodes import Read
from dask_image_ingest.dataset.references.fetch import field_of, references_of
from dask_image_ingest.frames import backend_of, reference_columns


def files_read(frame: Any) -> set[str]:
    """Paths and URLs of all files that a frame, or its query, reads, whatever rows it keeps.

    Shards with their sidecars and indexes, image files, parquet files, stored partitions; and of
    rows in memory those that they refer to. What a table refers to is known by its rows only: a
    writer asks `files_of_rows` for those that it gets.
    """
    expr = frame.expr if isinstance(frame, FrameBase) else frame
    return set(_files_read(expr)) if isinstance(expr, dx.Expr) else files_of_rows(frame)


def files_of_rows(frame: Any) -> set[str]:
    """The shards and files that the rows of a pandas or cuDF frame refer to."""
    if "__url__" in frame.columns:
        urls = [backend_of(frame).to_arrow(frame[["__url__"]]).column(0)]
    else:
        urls = []
    urls += [field_of(references_of(frame, name), "url") for name in reference_columns(frame)]
    found = (pc.unique(column).to_pylist() for column in urls if not pa.types.is_null(column.type))
    return {url for column in found for url in column if isinstance(url, str) and "\0" not in url}


def _files_read(expr: Any) -> Iterator[str]:
    for step in expr.walk():
        if isinstance(step, dx.Fused):
            yield from _files_read(step.exprs[0])
        elif isinstance(step, Read):
            yield from step.files_read
        elif isinstance(step, dx.ReadParquet):
            yield from _of_dask(step)
        elif isinstance(step, (dx.FromGraph, dx.FromPandas)) and _may_refer(step._meta):
            rows = dx.new_collection(step).map_partitions(_as_frame, meta={"url": "object"})
            yield from rows.compute()["url"]


def _as_frame(rows: Any) -> Any:
    return pd.DataFrame({"url": sorted(files_of_rows(rows))}, dtype="object")


def _may_refer(meta: Any) -> bool:
    is_frame = getattr(meta, "ndim", 0) == 2 and hasattr(meta, "columns")
    return is_frame and ("__url__" in meta.columns or bool(reference_columns(meta)))


def _of_dask(read: Any) -> Iterator[str]:
    """The files of a read of Dask's own."""
    info = read._dataset_info
    fs = info.get("fs") or read.fs
    files = info["ds"].files if "ds" in info else [file.path for file in info["all_files"]]
    fs = getattr(getattr(fs, "handler", None), "fs", fs)
    for path in files:
        if hasattr(fs, "unstrip_protocol"):
            yield fs.unstrip_protocol(path)
        else:
            yield path if fs.type_name == "local" else f"{fs.type_name}://{path}"
