"""Samples of a shard for reports, opened lazily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dask_image_ingest.dataset import (
    ReadOptions,
    SampleRows,
    parse_image_extensions,
)
from dask_image_ingest.decode import MAX_PIXELS, Decoding
from dask_image_ingest.storage import open_shard
from dask_image_ingest.tar import IMAGE_EXTENSIONS, TarIndex, index_tar

__all__ = ["OPTIONS", "open_rows"]

#: Those of `read_webdataset_images`, where nothing is said.
OPTIONS = ReadOptions(parse_image_extensions(IMAGE_EXTENSIONS), Decoding(max_pixels=MAX_PIXELS))


@contextmanager
def open_rows(
    url: str, storage_options: dict[str, Any] | None
) -> Iterator[tuple[SampleRows, TarIndex]]:
    """Walk a shard, and give all of its samples.

    Raises
    ------
    ShardError, ShardNotFoundError
        If it can't be read.
    """
    with open_shard(url, storage_options) as content:
        index = index_tar(content, url)
        yield SampleRows(url, content, index, OPTIONS), index
