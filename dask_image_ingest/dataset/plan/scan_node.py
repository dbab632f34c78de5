"""The scan node, its source, and the head of a scan."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import Task
from dask_image_ingest.dataset.plan.base_nodes import Read, is_optimized
from dask_image_ingest.dataset.plan.dask_patches import install_patches
from dask_image_ingest.dataset.plan.pushdown import as_predicate
from dask_image_ingest.dataset.predicates import all_of, columns_of
from dask_image_ingest.dataset.read_options import ReadOptions
from dask_image_ingest.dataset.scan.partitioning import Partition, known_rows, unversioned
from dask_image_ingest.dataset.scan.task import ScanSpec, read_partition
from dask_image_ingest.dataset.schema.columns import Schema
from dask_image_ingest.frames import REFERENCE
from dask_image_ingest.storage import Search, Shard
from dask_image_ingest.url_secrets import without_secrets


class HeadOfRead(dx.Head):
    """A head that stays above its read, whose limit it has set; projections pass below it.

    Dask's own head goes below projections, which then can't reach the read.
    """

    def _simplify_down(self) -> None:
        return None

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        if isinstance(parent, dx.Projection):
            return dx.plain_column_projection(self, parent, dependents)
        return super()._simplify_up(parent, dependents)


install_patches()

#: Task names of a scan and of a scan with decode. After ``persist`` only the name is left to tell.
READS: Final = ("readMetadata", "readDecode")


@dataclass(frozen=True, eq=False)
class Dataset:
    """The source of a `Scan`: shards, their partitions, and what all tasks have in common.

    ``searches`` are the folders and globs where the shards were found. ``token`` is a digest of all
    of this, with sizes and modification times of the shards.
    """

    partitions: tuple[Partition, ...]
    shards: tuple[Shard, ...]
    schema: Schema
    options: ReadOptions
    searches: tuple[Search, ...]
    token: str

    def __dask_tokenize__(self) -> str:
        return self.token

    def __str__(self) -> str:
        return without_secrets(f"{len(self.partitions)} partitions from {self.shards[0].url}")

    __repr__ = __str__

    @property
    def are_numbered(self) -> bool:
        """True for image files, whose rows are numbered across partitions."""
        return self.options.root is not None

    @functools.cached_property
    def lengths(self) -> tuple[int | None, ...]:
        """The rows of each partition by the shards' indexes; None if unknown."""
        if self.are_numbered:
            return tuple(1 + files[-1].part - files[0].part for files in self.partitions)
        return tuple(map(known_rows, self.partitions))

    @functools.cached_property
    def divisions(self) -> tuple[int | None, ...]:
        """Known for image files; labels begin anew in each shard."""
        if self.are_numbered:
            return (*(files[0].part for files in self.partitions), self.partitions[-1][-1].part)
        return (None,) * (len(self.partitions) + 1)

    @functools.cached_property
    def meta(self) -> Any:
        """An empty frame, with references in place of images."""
        types = {**self.schema.types, **dict.fromkeys(self.schema.images, REFERENCE)}
        return self.options.get_backend().meta(types)


class Scan(Read):
    """Scans shards without decoding: image columns hold references, error columns nulls.

    Absorbs projections (``columns``), filters (a `Predicate`), lengths, and limits (rows of each
    partition at most, counted after the filters). With ``keeps_scan``, tasks cache the index of
    their shard for an export in the same task.
    """

    _parameters: ClassVar = [
        "dataset",
        "columns",
        "filters",
        "limit",
        "keeps_scan",
        "_partitions",
    ]
    _defaults: ClassVar = {
        "columns": None,
        "filters": None,
        "limit": None,
        "keeps_scan": False,
        "_partitions": None,
    }
    _filter_passthrough = True

    dataset: Dataset

    step = READS[0]

    @property
    def first_url(self) -> str:
        """The first of the shards."""
        return self.dataset.shards[0].url

    @property
    def files_read(self) -> Iterator[str]:
        """The shards, with their sidecars and indexes."""
        for shard in self.dataset.shards:
            yield shard.url
            if shard.sidecar is not None:
                yield shard.sidecar.url
        splits = itertools.chain.from_iterable(self.dataset.partitions)
        yield from {split.index.url for split in splits if split.index is not None}

    @property
    def searches(self) -> tuple[Search, ...]:
        """The folders and globs where its shards were found."""
        return self.dataset.searches

    @property
    def scanned(self) -> list[str]:
        """The columns of the scan, also in a subclass whose ``columns`` are those of a decode."""
        return super().columns

    @property
    def lengths(self) -> list[int | None]:
        """The rows of each partition; None if unknown, or if filters or a limit drop some."""
        all_rows = not self.operand("filters") and self.operand("limit") is None
        return super().lengths if all_rows else [None] * self.npartitions

    @functools.cached_property
    def spec(self) -> ScanSpec:
        """The specification of each task."""
        dataset = self.dataset
        filters = self.operand("filters")
        used = {*self.scanned, *columns_of(filters)}
        # A user who named components or columns needs no warning about others.
        warns = self.operand("columns") is None and dataset.schema.inferred
        known_extensions = dataset.schema.extensions if warns else None
        return ScanSpec(
            options=dataset.options,
            columns=tuple(self.scanned),
            filters=filters,
            limit=self.operand("limit"),
            components=dataset.schema.select(used),
            sidecar=dataset.schema.select_sidecar({*used, "__key__"}),
            errors=dataset.schema.errors,
            known_extensions=known_extensions,
            keeps_scan=self.operand("keeps_scan"),
        )

    @functools.cached_property
    def label_sources(self) -> tuple[Partition, ...] | None:
        """The splits that each partition reads; None for image files, whose labels are unique."""
        return None if self.dataset.are_numbered else tuple(map(unversioned, self.sources))

    def _filtered_task(self, name: Any, index: int) -> Task:
        partition = self.dataset.partitions[index]
        return Task(name, read_partition, partition, self.spec, _data_producer=True)

    def _filter_passthrough_available(self, parent: dx.Expr, dependents: Any) -> bool:
        return super()._filter_passthrough_available(parent, dependents) and (
            self.filtered_by(parent.predicate) is not None
        )

    def filtered_by(self, mask: dx.Expr) -> Scan | None:
        """The scan with a mask over it as a filter; None if it can't evaluate that."""
        if self.operand("limit") is not None:
            return None
        schema, backend = self.dataset.schema, self.dataset.options.backend
        # These have values only after a decode.
        decoded = schema.errors.union(schema.images)
        types = {name: type_ for name, type_ in schema.types.items() if name not in decoded}
        predicate = as_predicate(mask, self, types, backend)
        if predicate is None:
            return None
        return self.substitute_parameters({"filters": all_of([self.operand("filters"), predicate])})

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        if is_optimized(self, dependents):
            return None
        if isinstance(parent, dx.Filter):
            passes = self._filter_passthrough_available(parent, dependents)
            return self.filtered_by(parent.predicate) if passes else None
        if type(parent) is dx.Head:
            if parent.n < 0:
                return None
            limited = self.limited(parent.n)
            return HeadOfRead(self if limited is None else limited, *parent.operands[1:])
        return super()._simplify_up(parent, dependents)

    def limited(self, n: int) -> Scan | None:
        """The scan with a limit of ``n``; None if its limit is that low already."""
        limit = self.operand("limit")
        if limit is not None and limit <= n:
            return None
        return self.substitute_parameters({"limit": n})


class ScanShards(Scan):
    """Scans tar shards."""


class ScanTables(Scan):
    """Scans parquet files of images."""


class ScanFiles(Scan):
    """Scans image files."""
