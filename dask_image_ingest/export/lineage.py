"""The shards that a frame's query reads: which, and with which options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import (
    Decode,
    KeepsResults,
    ReadImageFiles,
    ReadWebDataset,
    datasets_of,
    image_sources,
)
from dask_image_ingest.decode import Decoding
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


def pixel_operations(frame: Any, column: str) -> Iterator[str]:
    """Operations that gave a column other pixels than the stored ones, by users' names.

    Nothing, if they are those of the images that the rows point to. Of a frame that is computed or
    persisted nothing tells.
    """
    if not isinstance(frame, FrameBase):
        yield "nobody knows where, since the frame is computed"
        return
    yield from _makers(frame.expr, column)


def stored_members(frame: Any, column: str) -> tuple[str, ...]:
    """Member extensions of an image column beside ``image``, as the frame's reads name them."""
    datasets = datasets_of(frame.expr) if isinstance(frame, FrameBase) else ()
    others = (each for dataset in datasets for each in dataset.options.other_images)
    return next((each.extensions for each in others if each.column == column), ())


def _makers(expr: Any, column: str) -> Iterator[str]:
    for source, name in image_sources(expr, column):
        if isinstance(source, KeepsResults):
            yield from _makers(source.made_of, name)
        elif (decoding := _decoding(source, name)) is not None:
            options = [
                *["size="] * (decoding.size is not None),
                *["mode="] * (decoding.mode not in ("RGB", "labels", "raw")),
                *["transform="] * (decoding.transform is not None),
            ]
            if options:
                yield f"{operation_name(source)} with {', '.join(options)}"
        else:
            yield operation_name(source)


def _decoding(expr: Any, column: str) -> Decoding | None:
    """Decode options of a column in an expression; None where it is not a decode."""
    if isinstance(expr, ReadWebDataset) and column == "image":
        return expr.dataset.options.decoding
    found = expr.images if isinstance(expr, Decode) else ()
    return next((each.decoding for each in found if each.image == column), None)


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
    if isinstance(expr, dx.MapPartitions):
        return str(expr)
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
