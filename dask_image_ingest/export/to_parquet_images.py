"""``to_parquet_images``: encoded images and their columns as parquet files, Hugging Face's too."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from typing import Any

import dask.dataframe as dd
import fsspec
import pandas as pd
import pyarrow as pa

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import check_flag, check_frame, check_storage_options, shown
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import (
    POINTER,
    ReadImageFiles,
    ReadParquetImages,
    field_of,
    references_of,
    references_of_pointers,
    value_sources,
)
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export.query import source_options_of
from dask_image_ingest.export.stored_images import stored_files
from dask_image_ingest.frames import backend_of, image_columns, pandas_type, reference_columns
from dask_image_ingest.view import references_of_images

# Of a schema's metadata: what Hugging Face calls its columns.
_KEY = b"huggingface"

# ``datasets.Image().pa_type``: a schema with any other is not taken for images.
_ENCODED = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])


def to_parquet_images(
    frame: Any,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    storage_options: dict[str, Any] | None = None,
    source_options: dict[str, Any] | None = None,
) -> None:
    """Write encoded images, as they are stored, with the other columns to parquet files.

    A file for each partition. ``datasets.load_dataset("parquet", data_files=...)`` opens them with
    an ``Image()`` feature, and so does :func:`read_parquet_images`. Nothing is decoded.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with references, as ``read_webdataset_images(...,
        decode=False)`` gives them, or a lazy one of images that a read decodes: each of these
        columns becomes one of encoded images. Else with the columns ``__url__``, ``offset`` and
        ``nbytes``, whose images are the column ``image``. ``error``, and pixels that no read
        decodes, are left out.
    path
        The folder, or its URL: ``part.0.parquet`` and so on.
    overwrite
        Whether to remove what is in the folder; it must be empty otherwise.
    storage_options
        For the filesystem of ``path``.
    source_options
        For the filesystem of the shards; by default those of the read.

    Raises
    ------
    ArgumentError
        If the frame does not point to its images, or the folder is not empty.
    ShardError, ShardNotFoundError
        If a shard can't be read, or is another one by now.

    Notes
    -----
    Images are ``struct<bytes: binary, path: string>``, and the schema names them as `Hugging Face
    <https://huggingface.co/docs/datasets/about_arrow>`__ does. An image that is not there, or lies
    in its shard in several pieces, is null. Labels of folders, and those that parquet files of
    Hugging Face call so, keep the names of their classes as ``ClassLabel``.

    Examples
    --------
    >>> table = read_webdataset_images("train-{000..003}.tar", decode=False)
    >>> to_parquet_images(table[["cls", "image"]], "photos")
    >>> read_parquet_images("photos", errors="drop", size=32).images.stack().compute().shape
    (51, 32, 32, 3)
    """
    check_frame(frame._meta if isinstance(frame, FrameBase) else frame)
    check_flag("overwrite", overwrite)
    check_storage_options(storage_options)
    if source_options is None:
        source_options = source_options_of(frame)
    lazy = frame if isinstance(frame, FrameBase) else None
    meta = frame if lazy is None else lazy._meta
    features = {} if lazy is None else _class_labels(lazy)
    pixels = image_columns(frame)
    if lazy is not None and pixels:
        columns = [name for name in lazy.columns if name != "error"]
        found = references_of_images(lazy, columns, None)
        if found is not None:
            frame = found[0][columns]
            meta = frame._meta
    left_out = [name for name in meta.columns if name == "error" or name in image_columns(meta)]
    frame, meta = frame.drop(columns=left_out), meta.drop(columns=left_out)
    images = reference_columns(meta)
    if not images and not {*POINTER} <= {*meta.columns}:
        raise ArgumentError(
            f"the frame has neither references nor the columns {', '.join(POINTER)}, which say "
            "where each image is: pass a frame of read_webdataset_images(decode=False)"
        )
    folder = os.fspath(path)
    files, root = fsspec.core.url_to_fs(folder, **(storage_options or {}))
    if not overwrite and files.exists(root) and files.ls(root):
        raise ArgumentError(
            f"path={shown(folder)}: there are files already. Pass another folder, or "
            "overwrite=True to remove them"
        )
    make = functools.partial(_with_files, images=images, storage_options=source_options)
    empty = make(meta.iloc[:0])
    names = images or ["image"]
    features |= {name: {"_type": "Image"} for name in names}
    if lazy is None:
        parts = dd.from_pandas(make(frame), npartitions=1)
    else:
        parts = frame.map_partitions(make, meta=empty)
    parts.to_parquet(
        folder,
        write_index=False,
        overwrite=overwrite,
        schema=dict.fromkeys(names, _ENCODED),
        custom_metadata={_KEY.decode(): json.dumps({"info": {"features": features}})},
        storage_options=storage_options,
    )


def _with_files(
    frame: Any, images: Sequence[str], storage_options: dict[str, Any] | None
) -> pd.DataFrame:
    """A partition in pandas, with encoded images in place of references."""
    backend = backend_of(frame)
    if images:
        found = {name: references_of(frame, name) for name in images}
    else:
        found = {"image": pa.chunked_array([references_of_pointers(frame)])}
    table = backend.to_arrow(frame.drop(columns=list(images)))
    made = table.to_pandas(types_mapper=pandas_type).set_axis(range(len(frame)))
    for name, references in found.items():
        keys = field_of(references, "key").to_pylist()
        stored = zip(stored_files(references, storage_options), keys, strict=True)
        files = [data and {"bytes": data, "path": key} for data, key in stored]
        made[name] = pd.Series(pandas_type(_ENCODED).__from_arrow__(pa.array(files, _ENCODED)))
    order = [*(n for n in frame.columns), *(n for n in found if n not in frame.columns)]
    return made[order]


def _class_labels(frame: Any) -> dict[str, Any]:
    """Features of Hugging Face for the columns of a lazy frame whose numbers stand for classes."""
    features = {}
    for column in frame.columns:
        for source, (name,) in value_sources(frame.expr, (column,)):
            known = None
            if isinstance(source, ReadImageFiles) and name == "label":
                known = {"_type": "ClassLabel", "names": list(source.files.classes or ())}
            elif isinstance(source, (ReadParquetImages, dx.ReadParquet)):
                ours = isinstance(source, ReadParquetImages)
                read: Any = source.dataset.schema if ours else source._dataset_info["schema"]
                told = json.loads((read.metadata or {}).get(_KEY, b"{}")).get("info", {})
                known = told.get("features", {}).get(name)
            if known and known.get("_type") == "ClassLabel":
                features[column] = known
    return features
