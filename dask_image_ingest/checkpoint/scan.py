"""Scan of a checkpoint: a lazy frame of its files, with projection pushdown."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
from dask.base import tokenize
from pyarrow import parquet

from dask_image_ingest.dask_internals import Task
from dask_image_ingest.dataset import KeepsResults, Read, RowSource, files_read, row_sources
from dask_image_ingest.errors import ExportError
from dask_image_ingest.frames import backend_of, index_columns, with_urls
from dask_image_ingest.storage import OutputStore, Shard
from dask_image_ingest.url_secrets import without_secrets


@dataclass(frozen=True, eq=False)
class StoredFrame:
    """The stored partitions of a frame.

    Attributes
    ----------
    output
        The folder.
    parts
        The file of each partition; None if its shard could not be read.
    lengths
        Rows of each partition.
    meta
        An empty frame with the same columns, types and index.
    divisions
        Dask's divisions.
    urls
        For each partition, the shards whose URLs have secrets, which are not stored: their
        identities → the URLs to open them by.
    made_of
        The query whose results are stored.
    """

    output: OutputStore
    parts: tuple[str | None, ...]
    lengths: tuple[int, ...]
    meta: Any
    divisions: tuple[Any, ...]
    urls: tuple[Mapping[str, str], ...]
    made_of: Any
    token: str = field(init=False)

    def __post_init__(self) -> None:
        names = list(map(str, self.meta.columns))
        backend = backend_of(self.meta).name
        token = tokenize(self.output.url, self.parts, names, backend, self.urls)
        object.__setattr__(self, "token", token)

    def __dask_tokenize__(self) -> str:
        return self.token

    def __str__(self) -> str:
        return without_secrets(f"{len(self.parts)} partitions in {self.output.url}")

    __repr__ = __str__

    def source(self, number: int) -> Shard:
        """Stand-in for a partition's shard, in checkpoints of this one."""
        name = self.parts[number]
        # The name is a digest of everything that determines the content, so it serves as version.
        return Shard(f"{self.output.url}#{number}" if name is None else name, 0, name or "skipped")

    @functools.cached_property
    def numbers(self) -> Mapping[Shard, int]:
        """The number of the partition that each stand-in stands for."""
        return {self.source(number): number for number in range(len(self.parts))}


class ReadStored(Read, KeepsResults):
    """Scan node of a checkpoint; absorbs projections and lengths."""

    _parameters: ClassVar = ["stored", "columns", "_partitions"]

    stored: StoredFrame

    step = "readCheckpoint"

    @property
    def files_read(self) -> set[str]:
        """The stored files, and those that they were made of, which references need."""
        output, parts = self.stored.output, self.stored.parts
        own = (output.locate(part) for part in parts if part is not None)
        return {*own, *files_read(self.stored.made_of)}

    @property
    def made_of(self) -> Any:
        """The query whose results are stored."""
        return self.stored.made_of

    @functools.cached_property
    def row_sources(self) -> tuple[RowSource, ...] | None:
        """The shards, or part of one, that each partition was computed from."""
        sources = row_sources(self.stored.made_of)
        return None if sources is None else tuple(sources[n] for n in self._partitions)

    def _filtered_task(self, name: Any, index: int) -> Task:
        stored = self.stored
        part, urls = stored.parts[index], stored.urls[index]
        return Task(name, read_part, stored.output, part, self._meta, urls, _data_producer=True)


def read_part(output: OutputStore, part: str | None, meta: Any, urls: Mapping[str, str]) -> Any:
    """Read the columns of ``meta`` of one partition; for a skipped one, an empty frame.

    Raises
    ------
    ExportError
        If the file is missing or damaged.
    """
    if part is None:
        return meta
    backend = backend_of(meta)
    try:
        with output.open(part) as source, parquet.ParquetFile(source) as file:
            columns = [*meta.columns, *index_columns(file.schema_arrow)]
            # Select again: pyarrow also reads columns with the prefix, "json.score" for "json".
            table = file.read(columns).select(columns)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise ExportError(
            f"{output.locate(part)} cannot be read any more: {error}. If it is gone or damaged, "
            "remove it, and let checkpoint() make it again"
        ) from error
    if urls:
        table = with_urls(table, lambda url: urls.get(url, url))
    return backend.from_storage(table, meta)
