"""Lineage of an export: the shards that a frame reads, and how users call its operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import (
    Decode,
    MapColumns,
    ReadImageFiles,
    ReadWebDataset,
    datasets_of,
)
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.ops import MapBatches
from dask_image_ingest.storage import Shard, is_pipe, local_path


def shards_read(frame: Any) -> set[str]:
    """The URLs of all shards that a lazy frame reads, those of which it keeps no row included.

    Of a frame that is computed or persisted, only its rows tell.
    """
    return {shard.url for shards, _ in _read(frame) for shard in shards}


def source_options_of(frame: Any) -> dict[str, Any] | None:
    """The storage options that a lazy frame's shards are read with; None where nothing tells.

    Raises
    ------
    ArgumentError
        If they are not the same for all shards that are not simply files of this machine.
    """
    found: dict[str, dict[str, Any]] = {}
    for shards, storage_options in _read(frame):
        url = next((shard.url for shard in shards if _needs_options(shard.url)), None)
        options = storage_options or {}
        if url is not None and options not in found.values():
            found[url] = options
    if len(found) > 1:
        one, other, *_ = sorted(found)
        raise ArgumentError(
            f"the frame reads {one} and {other} with different storage_options. Pass "
            "source_options= for both, or export one after the other"
        )
    return next(iter(found.values()), None)


def operation_name(expr: Any) -> str:
    """Name of an operation as users know it."""
    if isinstance(expr, ReadWebDataset):
        return "read_webdataset_images"
    if isinstance(expr, ReadImageFiles):
        return "read_images"
    if isinstance(expr, Decode):
        of_read = isinstance(expr.frame, ReadWebDataset)
        return operation_name(expr.frame) if of_read else "decode_images"
    if isinstance(expr, MapBatches):
        return f"map_batches({expr.batch_map.function.name})"
    if isinstance(expr, MapColumns):
        return str(expr.function.__name__).strip("_")
    if isinstance(expr, dx.MapPartitions):
        return str(expr)
    if isinstance(expr, dx.ReadParquet):
        return "dd.read_parquet"
    if isinstance(expr, dx.FromGraph):
        return "a persisted frame"
    return type(expr).__name__


def _needs_options(url: str) -> bool:
    return local_path(url) is None or is_pipe(url)


def _read(frame: Any) -> Iterator[tuple[Sequence[Shard], dict[str, Any] | None]]:
    """The shards and image files that a lazy frame reads, with their storage options."""
    if not isinstance(frame, FrameBase):
        return
    for dataset in datasets_of(frame.expr):
        yield dataset.shards, dataset.options.storage_options
    for read in frame.expr.find_operations(ReadImageFiles):
        yield read.files.files, read.files.images.storage_options
