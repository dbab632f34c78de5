"""``checkpoint``: compute a frame's partitions once, and read them back from files."""

from __future__ import annotations

import os
from typing import Any

import dask.dataframe as dd

from dask_image_ingest.arguments import check_flag, check_storage_options, path_text
from dask_image_ingest.checkpoint.query import fingerprint_query
from dask_image_ingest.checkpoint.runner import run_checkpoint
from dask_image_ingest.checkpoint.stored_frame import ReadStored
from dask_image_ingest.dask_internals import FrameBase, new_collection
from dask_image_ingest.dataset.references import unfused
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.image_frame import ImageDataFrame
from dask_image_ingest.storage.output import CHECKPOINT_ADVICE, open_output


def checkpoint(
    frame: dd.DataFrame,
    path: str | os.PathLike[str],
    *,
    version: str | None = None,
    overwrite: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> ImageDataFrame:
    """Compute a frame, store each partition in a file, and return a lazy frame of the files.

    Computes missing partitions at once. Called again, after a crash or a month later, it computes
    only what is missing: partitions that a killed run did not reach, and those of shards that were
    added or changed.

    Parameters
    ----------
    frame
        A dask dataframe of :func:`read_webdataset_images`, :func:`read_images`,
        :func:`read_parquet_images` or `checkpoint`, and any steps that work row by row or partition
        by partition: filters, new columns, ``.images.map_batches``, ``map_partitions``,
        :func:`decode_images`.
    path
        A folder, or a URL of a file system that fsspec writes to. One folder for one query.
    version
        Identifies your functions. By default their code does: after an edit, you get an error that
        says so. With a version, you may edit them; results are kept until you change the version.
    overwrite
        Whether to compute everything again, and then replace what is stored.
    storage_options
        For the file system to write to.

    Returns
    -------
    dask.dataframe.DataFrame
        The same rows, columns, types and index. Only needed columns are read, and ``len`` reads
        nothing. Stored partitions keep their boundaries, even if the frame's differ by now, since
        ``partition_size="auto"`` depends on the memory of the machine.

    Raises
    ------
    ArgumentError
        If a partition is not computed from one part of one shard, or from some files alone, as
        after a merge, a shuffle or ``persist``: checkpoint the frame before that step.
    FunctionError
        If a function has no token that is the same in every process: pass ``version``.
    ExportError
        If the folder has results of another query, or files that the frame reads; if its next read
        would find the results; if the folder cannot be written, or another process is writing to
        it.
    ShardError
        If a shard cannot be read, or changes meanwhile.

    Notes
    -----
    A stored partition is identified by its shard or files (URL, size and time or ETag), by the part
    of the shard, the options of the read, and the functions. A file appears under its name when it
    is complete. Partitions of shards that the read no longer has are removed.

    Examples
    --------
    >>> ddf = read_webdataset_images("train-{000..003}.tar", size=64)
    >>> mean = ddf.images.map_batches(lambda x: x.mean((1, 2, 3)), outputs={"mean": "float32"})
    >>> stored = checkpoint(mean, "means", version="1")
    >>> len(stored), stored["mean"].count().compute().item()
    (52, 51)
    """
    if not isinstance(frame, FrameBase) or frame.ndim != 2:
        raise ArgumentError(
            f"checkpoint takes a dask dataframe, not {type(frame).__name__}: one column is "
            "ddf[['column']], and a pandas frame is computed already"
        )
    columns = list(frame.columns)
    if not all(isinstance(name, str) for name in columns) or len(set(columns)) < len(columns):
        raise ArgumentError(f"the frame's columns must be unique strings, and are {columns}")
    if version is not None and (not isinstance(version, str) or not version):
        raise ArgumentError(f"version={version!r}: pass a string, such as '1'")
    check_flag("overwrite", overwrite)
    storage_options = check_storage_options(storage_options)
    output = open_output(path_text("path", path), CHECKPOINT_ADVICE, storage_options)
    query = fingerprint_query(unfused(frame.expr), version)
    stored = run_checkpoint(query, output, frame._meta, overwrite=overwrite)
    return new_collection(ReadStored(stored))
