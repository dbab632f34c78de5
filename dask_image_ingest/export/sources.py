"""The shards that a frame's query reads: which, and with which options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import Dataset, datasets_of
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.storage import is_pipe, local_path

__all__ = ["shards_read", "source_options_of"]


def shards_read(frame: Any) -> set[str]:
    """The URLs of all shards that a lazy frame reads, those of which it keeps no row included.

    Of a frame that is computed or persisted, only its rows tell.
    """
    return {shard.url for dataset in _datasets(frame) for shard in dataset.shards}


def source_options_of(frame: Any) -> dict[str, Any] | None:
    """The storage options that a lazy frame's shards are read with; None where nothing tells.

    Raises
    ------
    ArgumentError
        If they are not the same for all shards that are not simply files of this machine.
    """
    found: dict[str, dict[str, Any]] = {}
    for dataset in _datasets(frame):
        elsewhere = (shard.url for shard in dataset.shards if _needs_options(shard.url))
        url = next(elsewhere, None)
        options = dataset.options.storage_options or {}
        if url is not None and options not in found.values():
            found[url] = options
    if len(found) > 1:
        one, other, *_ = sorted(found)
        raise ArgumentError(
            f"the frame reads {one} and {other} with different storage_options. Pass "
            "source_options= for both, or export one after the other"
        )
    return next(iter(found.values()), None)


def _needs_options(url: str) -> bool:
    return local_path(url) is None or is_pipe(url)


def _datasets(frame: Any) -> Iterator[Dataset]:
    return datasets_of(frame.expr) if isinstance(frame, FrameBase) else iter(())
