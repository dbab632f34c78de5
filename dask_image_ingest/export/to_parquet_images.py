"""``to_parquet_images``: encoded images and other columns as parquet files, as by Hugging Face."""

from __future__ import annotations

import functools
import json
import os
import uuid
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

import pandas as pd
import pyarrow as pa
from dask.dataframe.dispatch import meta_nonempty
from pyarrow import parquet

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.arguments import check_flag, check_frame, check_storage_options, shown
from dask_image_ingest.computing import compute
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import files_of_rows, files_read, searches_of_frame
from dask_image_ingest.dataset.plan import ScanFiles, ScanTables, backtrack, value_sources
from dask_image_ingest.dataset.references import (
    LOCATION_COLUMNS,
    Decode,
    field_of,
    references_of,
    references_of_locations,
)
from dask_image_ingest.dataset.schema import region_field
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export.query import as_query, source_options_of
from dask_image_ingest.export.stored_images import not_referenced, stored_files
from dask_image_ingest.frames import (
    backend_of,
    image_columns,
    pandas_type,
    reference_columns,
    with_urls,
    without,
)
from dask_image_ingest.storage.output import (
    LOCK,
    PARQUET_ADVICE,
    STAGING,
    OutputStore,
    acquire,
    begin_run,
    open_output,
    refuse_other_run,
    refuse_sources,
    swap,
)
from dask_image_ingest.typedefs import AnyFrame, DataFrame
from dask_image_ingest.url_secrets import url_identity
from dask_image_ingest.view import references_of_images

# The names of files that tasks have staged.
_NAMES = pd.DataFrame({"part": pd.Series([], dtype="object")})

# The mark of completion: the files of a write.
_MANIFEST, _FORMAT = "_manifest.json", "parquet images 1"

# Key of Hugging Face's features in the schema's metadata.
_KEY = b"huggingface"

# ``datasets.Image().pa_type``, which a column of the feature ``Image`` must have.
_IMAGE = {"_type": "Image"}
_ENCODED = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])


def to_parquet_images(
    frame: AnyFrame,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    storage_options: dict[str, Any] | None = None,
    source_options: dict[str, Any] | None = None,
) -> None:
    """Write the stored images of a frame, with its other columns, to parquet files.

    One file for each partition with rows. :func:`read_parquet_images` reads them, and
    ``datasets.load_dataset("parquet", data_files=...)`` with an ``Image()`` feature. Nothing is
    decoded.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with references, as of ``read_webdataset_images(...,
        decode=False)``, or a lazy one whose images are decoded by a read: each of these columns
        becomes one of encoded images. Else with the columns ``__url__``, ``offset`` and ``nbytes``,
        whose images become the column ``image``. ``error``, and pixels from other operations, are
        left out.
    path
        The folder, or its URL, for ``part.0.parquet`` and so on.
    overwrite
        Remove the contents of the folder once the new files are whole; otherwise it must be empty.
    storage_options
        For the file system of ``path``.
    source_options
        For the file system of the shards; by default those of the read.

    Raises
    ------
    ArgumentError
        If the frame does not refer to its images, or the folder is not empty.
    ExportError
        If the frame reads files of the folder, or its next read would find those that are written;
        if another process is writing to it, or if it can't be written.
    ShardError, ShardNotFoundError
        If a shard can't be read, or has changed.

    Notes
    -----
    Images are ``struct<bytes: binary, path: string>``, declared in the schema as `Hugging Face
    <https://huggingface.co/docs/datasets/about_arrow>`__ does. A missing or sparse image is null.
    Labels by folder, and ``ClassLabel`` features of the source's parquet files, keep the names of
    their classes as ``ClassLabel``. Partitions without rows are left out.

    Files are written to ``_staging``, and moved when all of them are whole; ``_manifest.json`` is
    the last. So a write that fails or is killed changes nothing, except while files are moved: then
    ``part.unfinished.parquet`` exists, at which every reader fails, and the next call finishes the
    move first.

    Examples
    --------
    >>> table = read_webdataset_images("train-{000..003}.tar", decode=False)
    >>> to_parquet_images(table[["cls", "image"]], "photos")
    >>> read_parquet_images("photos", errors="drop", size=32).images.stack().compute().shape
    (51, 32, 32, 3)
    """
    check_frame(frame._meta if isinstance(frame, FrameBase) else frame)
    frame = as_query(frame)
    check_flag("overwrite", overwrite)
    storage_options = check_storage_options(storage_options)
    if source_options is None:
        source_options = source_options_of(frame)
    lazy = frame if isinstance(frame, FrameBase) else None
    meta = frame if lazy is None else lazy._meta
    features = {} if lazy is None else _class_labels(lazy)
    pixels = image_columns(frame)
    made = {"error", *map(region_field, pixels)}  # by decodes, which files lack
    decoded: list[Any] = []
    if lazy is not None and pixels:
        columns = [name for name in lazy.columns if name not in made]
        undecoded = references_of_images(lazy, columns, None)
        if undecoded is not None:
            frame = undecoded[0][columns]
            meta = frame._meta
        decoded = [name for name in image_columns(meta) if _is_decoded(lazy, name)]
        # A sole image column is found by its location columns.
        if decoded and (undecoded is not None or decoded != ["image"]):
            raise not_referenced(lazy, decoded[0])
    left_out = [name for name in meta.columns if name in {*made, *image_columns(meta)}]
    frame, meta = without(frame, left_out), without(meta, left_out)
    images = reference_columns(meta)
    if not images and not {*LOCATION_COLUMNS} <= {*meta.columns}:
        if lazy is not None and decoded:
            raise not_referenced(lazy, decoded[0])
        raise ArgumentError(
            f"the frame has neither references nor the columns {', '.join(LOCATION_COLUMNS)}, "
            "which say where each image is: pass a frame of read_webdataset_images(decode=False)"
        )
    features |= dict.fromkeys(images or ["image"], _IMAGE)
    make = functools.partial(_with_files, images=images, storage_options=source_options)
    empty = make(meta.iloc[:0])
    output = open_output(os.fspath(path), PARQUET_ADVICE, storage_options)
    read = frame if lazy is None else lazy
    names = (f"part.{n}.parquet" for n in range(1 if lazy is None else lazy.npartitions))
    refuse_sources(
        files_read(read),
        map(output.locate, names),
        searches=searches_of_frame(read),
        folder=output.url,
    )
    with acquire(output, steal=overwrite) as check_lock:
        old = sorted(set(output.names()) - {LOCK, _MANIFEST})
        if old and not overwrite:
            raise ArgumentError(
                f"path={shown(output.url)}: there are files already. Pass another folder, or "
                "overwrite=True to remove them"
            )
        output.remove_staging()
        run = begin_run(output)
        write = functools.partial(
            _write_part, make=make, schema=_schema(empty, features), output=output, run=run
        )
        if lazy is None:
            names = write(frame)
        else:
            (names,) = compute(frame.map_partitions(write, meta=_NAMES))
        if not len(names):  # of a frame without rows, one file without any
            names = write(meta.iloc[:0], keeps_empty=True)
        parts = names["part"].tolist()
        refuse_other_run(output, run)
        check_lock()
        new = {f"{STAGING}/{part}": f"part.{number}.parquet" for number, part in enumerate(parts)}
        manifest = json.dumps({"format": _FORMAT, "files": [*new.values()]})
        output.put(f"{STAGING}/{_MANIFEST}", manifest.encode())
        swap(output, {**new, f"{STAGING}/{_MANIFEST}": _MANIFEST}, [_MANIFEST, *old])
        output.remove_staging()


def _schema(empty: pd.DataFrame, features: dict[str, Any]) -> pa.Schema:
    """The schema of all files, inferred as Dask does, with Hugging Face's features."""
    schema = pa.Schema.from_pandas(meta_nonempty(empty), preserve_index=False)
    images = {name for name, feature in features.items() if feature == _IMAGE}
    fields = [pa.field(f.name, _ENCODED if f.name in images else f.type) for f in schema]
    return pa.schema(fields, {_KEY: json.dumps({"info": {"features": features}}).encode()})


def _write_part(
    frame: DataFrame,
    make: Callable[[Any], pd.DataFrame],
    schema: pa.Schema,
    output: OutputStore,
    run: str,
    keeps_empty: bool = False,
) -> pd.DataFrame:
    """Stage the file of a partition; a row with its name, none if the partition has no rows.

    A file without rows is not written, since ``datasets`` can't read its row group.
    """
    refuse_sources(files_of_rows(frame), folder=output.url)
    rows = make(frame)
    if not len(rows) and not keeps_empty:
        return _NAMES
    table = pa.Table.from_pandas(rows, schema, preserve_index=False)
    # Without pandas' metadata, which name dtypes of this package: pandas alone fails at them.
    table = table.replace_schema_metadata(schema.metadata)
    name = f"{uuid.uuid4().hex}.parquet"
    with output.scratch() as file:
        with parquet.ParquetWriter(file, table.schema) as writer:
            if len(table):
                writer.write_table(table)
        check = functools.partial(refuse_other_run, output, run)
        output.commit(file, f"{STAGING}/{name}", check)
    return pd.DataFrame({"part": [name]}, dtype="object")


def _is_decoded(frame: FrameBase, column: Hashable) -> bool:
    """True for images of a read, False for pixels that an operation made."""
    return all(isinstance(last, Decode) for (last, _), *_ in backtrack(frame.expr, (column,)))


def _with_files(
    frame: DataFrame, images: Sequence[str], storage_options: dict[str, Any] | None
) -> pd.DataFrame:
    """A partition in pandas, with encoded images in place of references."""
    backend = backend_of(frame)
    if images:
        references = {name: references_of(frame, name) for name in images}
    else:
        references = {"image": pa.chunked_array([references_of_locations(frame)])}
    table = with_urls(backend.to_arrow(without(frame, images)), url_identity)
    result = table.to_pandas(types_mapper=pandas_type).set_axis(range(len(frame)))
    for name, column in references.items():
        keys = field_of(column, "key").to_pylist()
        stored = zip(stored_files(column, storage_options), keys, strict=True)
        files = [None if data is None else {"bytes": data, "path": key} for data, key in stored]
        result[name] = pd.Series(pandas_type(_ENCODED).__from_arrow__(pa.array(files, _ENCODED)))
    order = [*frame.columns, *(name for name in references if name not in frame.columns)]
    return result[order]


def _class_labels(frame: FrameBase) -> dict[str, Any]:
    """Hugging Face's ``ClassLabel`` features of a lazy frame's columns, by lineage."""
    features = {}
    for column in frame.columns:
        for source, (name,) in value_sources(frame.expr, (column,)):
            if isinstance(source, ScanFiles) and name == "label":
                names = list(source.dataset.options.classes or ())
                features[column] = {"_type": "ClassLabel", "names": names}
            elif isinstance(source, (ScanTables, dx.ReadParquet)):
                ours = isinstance(source, ScanTables)
                schema: Any = source.dataset.schema if ours else source._dataset_info["schema"]
                with suppress(ValueError, LookupError, TypeError, RecursionError):  # any bytes
                    feature = json.loads(schema.metadata[_KEY])["info"]["features"][name]
                    is_label = feature["_type"] == "ClassLabel"
                    if is_label and all(isinstance(label, str) for label in feature["names"]):
                        features[column] = feature
    return features
