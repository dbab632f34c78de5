"""The files that a frame reads, so that no writer writes or removes one of them.

Nor does a writer add to them, where the frame has searched a folder or a glob.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset.plan.base_nodes import Read
from dask_image_ingest.dataset.references.fetch import field_of, references_of
from dask_image_ingest.frames import backend_of, reference_columns
from dask_image_ingest.storage import PARQUET, Search
from dask_image_ingest.typedefs import AnyFrame, DataFrame

# Dask searches hidden folders, too.
_OF_DASK = replace(PARQUET, hidden=())


def files_read(frame: AnyFrame | dx.Expr) -> set[str]:
    """Paths and URLs of all files that a frame, or its query, reads, whatever rows it keeps.

    Shards with their sidecars and indexes, image files, parquet files, stored partitions. What the
    rows of a table refer to is known by these rows only: a writer asks `files_of_rows` for those
    that it gets.
    """
    expr = frame.expr if isinstance(frame, FrameBase) else frame
    return set(_files_read(expr)) if isinstance(expr, dx.Expr) else files_of_rows(frame)


def files_of_rows(frame: DataFrame) -> set[str]:
    """The shards and files that the rows of a pandas or cuDF frame refer to."""
    if "__url__" in frame.columns:
        urls = [backend_of(frame).to_arrow(frame[["__url__"]]).column(0)]
    else:
        urls = []
    urls += [field_of(references_of(frame, name), "url") for name in reference_columns(frame)]
    found = (pc.unique(column).to_pylist() for column in urls if not pa.types.is_null(column.type))
    return {url for column in found for url in column if isinstance(url, str) and "\0" not in url}


def _files_read(expr: dx.Expr) -> Iterator[str]:
    for step in _steps(expr):
        if isinstance(step, Read):
            yield from step.files_read
        elif isinstance(step, dx.ReadParquet):
            yield from _of_dask(step)


def _steps(expr: dx.Expr) -> Iterator[Any]:
    """The operations of a query, also of one that is optimized."""
    for step in expr.walk():
        if isinstance(step, dx.Fused):
            yield from _steps(step.exprs[0])
        else:
            yield step


def searches_of_frame(frame: AnyFrame | dx.Expr) -> set[Search]:
    """The folders and globs where a frame, or its query, has found the files that it reads.

    Empty for rows in memory.
    """
    expr = frame.expr if isinstance(frame, FrameBase) else frame
    return set(_searches(expr)) if isinstance(expr, dx.Expr) else set()


def _searches(expr: dx.Expr) -> Iterator[Search]:
    for step in _steps(expr):
        if isinstance(step, Read):
            yield from step.searches
        elif isinstance(step, dx.ReadParquet):
            paths = step.path if isinstance(step.path, (list, tuple)) else [step.path]
            for path in paths:
                yield Search(_url_of(_file_system(step), os.fspath(path)), _OF_DASK)


def _of_dask(read: dx.ReadParquet) -> Iterator[str]:
    """The files of a read of Dask's own."""
    info, fs = read._dataset_info, _file_system(read)
    files = info["ds"].files if "ds" in info else [file.path for file in info["all_files"]]
    for path in files:
        yield _url_of(fs, path)


def _file_system(read: dx.ReadParquet) -> Any:
    return read._dataset_info.get("fs") or read.fs


def _url_of(fs: Any, path: str) -> str:
    """The URL of a path, or its absolute path, in a file system of fsspec or Arrow."""
    if "://" in path:
        return path
    fs = getattr(getattr(fs, "handler", None), "fs", fs)
    if hasattr(fs, "unstrip_protocol"):
        return str(fs.unstrip_protocol(path))
    return os.path.abspath(path) if fs.type_name == "local" else f"{fs.type_name}://{path}"
