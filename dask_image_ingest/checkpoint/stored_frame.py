"""Scan of a checkpoint: a lazy frame of its files, with projection pushdown."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
from dask.base import tokenize
from dask.typing import Key
from pyarrow import parquet

from dask_image_ingest.dask_internals import Task
from dask_image_ingest.dataset import files_read, searches_of_frame
from dask_image_ingest.dataset.plan import KeepsResults
from dask_image_ingest.dataset.scan import Partition, ShardSplit
from dask_image_ingest.errors import ExportError
from dask_image_ingest.frames import backend_of, index_columns, with_urls
from dask_image_ingest.storage import Search, Shard
from dask_image_ingest.storage.output import OutputStore
from dask_image_ingest.typedefs import DataFrame
from dask_image_ingest.url_secrets import url_identity, without_secrets


@dataclass(frozen=True, eq=False)
class StoredFrame:
    """The stored partitions of a frame."""

    output: OutputStore
    parts: tuple[str | None, ...]  # the file of each partition; None if its shard can't be read
    lengths: tuple[int, ...]  # rows of each partition
    meta: Any  # an empty frame with the same columns, types and index
    divisions: tuple[Any, ...]
    #: What each partition was computed from; also for a checkpoint of a checkpoint.
    origins: tuple[Partition, ...]
    made_of: Any  # the query whose results are stored
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

    @functools.cached_property
    def urls(self) -> tuple[Mapping[str, str], ...]:
        """The URLs of each partition's shards by their identities, if they have secrets."""
        urls = ([split.url for split in partition] for partition in self.origins)
        return tuple({url_identity(u): u for u in own if url_identity(u) != u} for own in urls)

    @functools.cached_property
    def partitions(self) -> tuple[Partition, ...]:
        """Stand-ins for the shards, in checkpoints of this one.

        A file's name is a digest of everything that determines the content: it serves as version.
        """
        versions = (
            (f"{self.output.url}#{number}", "skipped") if name is None else (name, name)
            for number, name in enumerate(self.parts)
        )
        return tuple((ShardSplit(Shard(url, 0, version)),) for url, version in versions)

    @functools.cached_property
    def numbers(self) -> Mapping[Partition, int]:
        """The number of the partition that each stand-in stands for."""
        return {partition: number for number, partition in enumerate(self.partitions)}


class ReadStored(KeepsResults):
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
    def searches(self) -> set[Search]:
        """Those of the query whose results are stored."""
        return searches_of_frame(self.stored.made_of)

    @property
    def made_of(self) -> Any:
        """The query whose results are stored."""
        return self.stored.made_of

    @property
    def original_sources(self) -> tuple[Partition, ...]:
        """The splits that each partition was computed from."""
        return tuple(self.stored.origins[number] for number in self._partitions)

    def _filtered_task(self, name: Key, index: int) -> Task:
        stored = self.stored
        part, urls = stored.parts[index], stored.urls[index]
        return Task(name, read_part, stored.output, part, self._meta, urls, _data_producer=True)


def read_part(
    output: OutputStore, part: str | None, meta: DataFrame, urls: Mapping[str, str]
) -> DataFrame:
    """Read the columns of ``meta`` of one partition; for a skipped one, an empty frame."""
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
