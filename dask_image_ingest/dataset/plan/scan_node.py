"""The scan node, its source, the head of a scan, and the scan with a decode in one task.

In that task the shard is opened once: scan, apply the row-wise operations between scan and decode
to the metadata, decode the remaining rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dask.typing import Key

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import Task
from dask_image_ingest.dataset.plan.base_nodes import (
    Dependents,
    IsShared,
    KeepsResults,
    Read,
    TakesFilters,
    filtered,
    is_optimized,
    never,
)
from dask_image_ingest.dataset.plan.operations import ELEMENTWISE, ROW_WISE, as_predicate
from dask_image_ingest.dataset.predicates import Predicate, all_of, columns_of
from dask_image_ingest.dataset.read_options import ReadOptions
from dask_image_ingest.dataset.scan.partitioning import Partition, count_checked, known_rows
from dask_image_ingest.dataset.scan.rows import (
    ColumnDecode,
    ErrorFilter,
    FusedDecode,
    decoded_meta,
)
from dask_image_ingest.dataset.scan.task import ScanSpec, read_partition
from dask_image_ingest.dataset.schema.columns import HEADERS, Schema, region_field
from dask_image_ingest.frames import REFERENCE, backend_of, get_backend
from dask_image_ingest.storage import Search, Shard
from dask_image_ingest.typedefs import DataFrame
from dask_image_ingest.url_secrets import without_secrets


class HeadOfRead(dx.Head):
    """A head that stays above its read, whose limit it has set; projections pass below it.

    Dask's own head goes below projections, which then can't reach the read.
    """

    def _simplify_down(self) -> None:
        return None

    def _simplify_up(self, parent: dx.Expr, dependents: Dependents) -> dx.Expr | None:
        if isinstance(parent, dx.Projection):
            return dx.plain_column_projection(self, parent, dependents)
        return super()._simplify_up(parent, dependents)


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

    @property
    def on_host(self) -> Dataset:
        """The same source of pandas frames."""
        if self.options.backend == "pandas":
            return self
        options = replace(self.options, backend="pandas")
        return replace(self, options=options, token=f"{self.token} on the host")

    @functools.cached_property
    def lengths(self) -> tuple[int | None, ...]:
        """The rows of each partition by the shards' indexes; None if unknown."""
        if self.are_numbered:
            return tuple(1 + files[-1].part - files[0].part for files in self.partitions)
        return tuple(map(known_rows, self.partitions))

    @functools.cached_property
    def divisions(self) -> tuple[None, ...]:
        """Unknown: labels ascend in each shard only."""
        return (None,) * (len(self.partitions) + 1)

    @functools.cached_property
    def meta(self) -> DataFrame:
        """An empty frame, with references in place of images."""
        types = {**self.schema.types, **dict.fromkeys(self.schema.images, REFERENCE)}
        return get_backend(self.options.backend).meta(types)


class Scan(TakesFilters, Read):
    """Scans shards without decoding: image columns hold references, error columns nulls.

    Absorbs projections (``columns``), filters (a `Predicate`), lengths, and limits (rows of each
    partition at most, counted after the filters).
    """

    _parameters: ClassVar = [
        "dataset",
        "columns",
        "filters",
        "limit",
        "_partitions",
    ]
    _defaults: ClassVar = {
        "columns": None,
        "filters": None,
        "limit": None,
        "_partitions": None,
    }

    dataset: Dataset

    step = "readMetadata"

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
        return super().lengths if self._has_all_rows else [None] * self.npartitions

    @property
    def _has_all_rows(self) -> bool:
        return not self.operand("filters") and self.operand("limit") is None

    @property
    def counted(self) -> list[int | None]:
        """The same, after the content of remote shards was checked."""
        lengths = self.lengths
        if not self._has_all_rows:
            return lengths
        unknown = [part for part, n in zip(self.sources, lengths, strict=True) if n is None]
        samples = count_checked(unknown, self.dataset.options.storage_options)
        return [known_rows(part, samples) for part in self.sources] if samples else lengths

    @property
    def on_host(self) -> Scan:
        """The same scan into pandas frames."""
        return self.substitute_parameters({"dataset": self.dataset.on_host})

    @functools.cached_property
    def spec(self) -> ScanSpec:
        """The specification of each task."""
        dataset = self.dataset
        filters = self.operand("filters")
        used = {*self.scanned, *(columns_of(filters) if filters else ())}
        # A user who named members or columns needs no warning about others.
        warns = self.operand("columns") is None and dataset.schema.inferred
        known_extensions = dataset.schema.extensions if warns else None
        return ScanSpec(
            options=dataset.options,
            columns=tuple(self.scanned),
            filters=filters,
            limit=self.operand("limit"),
            member_columns=tuple(m for m in dataset.schema.member_columns if m.column in used),
            sidecar=tuple(c for c in dataset.schema.sidecar if c.column in {*used, "__key__"}),
            made={name: dataset.schema.types[name] for name in dataset.schema.made},
            known_extensions=known_extensions,
        )

    def _filtered_task(self, name: Key, index: int) -> Task:
        partition = self.dataset.partitions[index]
        return Task(name, read_partition, partition, self.spec, _data_producer=True)

    def filtered_by(self, mask: dx.Expr, is_shared: IsShared = never) -> dx.Expr:
        """The scan with a mask over it as one of its filters, or below a filter."""
        predicate = self._predicate(mask)
        if predicate is None:
            return filtered(self, mask)
        return self.substitute_parameters({"filters": all_of([self.operand("filters"), predicate])})

    def absorbs(self, mask: dx.Expr) -> bool:
        """True if a mask over this scan can become one of its filters."""
        return self._predicate(mask) is not None

    def _predicate(self, mask: dx.Expr) -> Predicate | None:
        if self.operand("limit") is not None:
            return None
        schema, backend = self.dataset.schema, self.dataset.options.backend
        # These have values only after a decode.
        decoded = schema.made.union(schema.images)
        types = {name: type_ for name, type_ in schema.types.items() if name not in decoded}
        return as_predicate(mask, self, types, backend)

    def _simplify_up(self, parent: dx.Expr, dependents: Dependents) -> dx.Expr | None:
        if is_optimized(self, dependents):
            return None
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


def datasets_of(expr: dx.Expr) -> Iterator[Dataset]:
    """The datasets that a query reads; none for persisted frames, whose query is gone."""
    for read in expr.find_operations((Scan, KeepsResults)):
        if isinstance(read, KeepsResults):
            yield from datasets_of(read.made_of)
        else:
            yield read.dataset


class ScanPlaceholder(dx.Expr):
    """Placeholder for the metadata of a partition, with row positions in place of images."""

    _parameters: ClassVar = ["empty"]

    @functools.cached_property
    def _meta(self) -> DataFrame:
        return self.operand("empty")

    def _divisions(self) -> tuple[None, None]:
        return (None, None)

    def __str__(self) -> str:
        return "rows"


@dataclass(frozen=True, eq=False)
class Steps:
    """Operations between a scan and its decode: an expression over `ScanPlaceholder`."""

    operations: dx.Expr  # not ``expr``: Dask takes an operand with that attribute for a collection

    def __dask_tokenize__(self) -> str:
        return self.operations._name

    def __repr__(self) -> str:
        return str(self.operations)

    @functools.cached_property
    def function(self) -> Callable[[Any], Any]:
        """The operations as one function of a pandas or cuDF frame."""
        nodes = {node._name: node for node in self.operations.walk()}
        (source,) = (node for node in nodes.values() if isinstance(node, ScanPlaceholder))
        del nodes[source._name]
        tasks = [node._task((name, 0), 0) for name, node in nodes.items()]
        return _FusedTask(dx.Task.fuse(*tasks), (source._name, 0))

    @property
    def passed_on(self) -> tuple[str, ...]:
        """Header columns that these operations select at most; none if there are many images."""
        nodes = list(self.operations.walk())
        frames = [node for node in nodes if node.ndim == 2]
        if not all(
            isinstance(node, (ScanPlaceholder, dx.Projection, dx.Filter)) for node in frames
        ):
            return ()
        series = [node for node in nodes if isinstance(node, dx.Projection) and node.ndim == 1]
        used = {name for node in series for name in node.columns}
        return tuple(name for name in HEADERS if name not in used)


@dataclass(frozen=True)
class _FusedTask:
    task: Callable[[dict[Any, Any]], Any]
    source: tuple[str, int]

    def __call__(self, frame: DataFrame) -> DataFrame:
        """Apply the operations."""
        return self.task({self.source: frame})


def fuse_with_scan(
    frame: dx.Expr,
    images: Sequence[ColumnDecode],
    only: ErrorFilter,
    limit: int | None,
    columns: Sequence[Hashable],
) -> ReadAndDecode | None:
    """Fuse a decode with the scan below ``frame``; None unless only row-wise steps are between."""
    nodes = {node._name: node for node in frame.walk()}
    scans = [node for node in nodes.values() if isinstance(node, Scan)]
    if not scans or any(isinstance(node, ReadAndDecode) for node in scans):
        return None
    scan = _merge_scans(scans)
    if scan is None:
        return None
    scanned_images = scan.dataset.schema.images
    only_one = len(scanned_images) == 1
    if not {column.image for column in images} <= {*scanned_images} and not only_one:
        return None
    if not {*scanned_images}.intersection(scan.columns) or (only_one and len(images) > 1):
        return None
    steps = None
    if not isinstance(frame, Scan):
        if not all(isinstance(node, Scan) or _is_step(node) for node in nodes.values()):
            return None
        if not only_one and any(isinstance(node, dx.RenameFrame) for node in nodes.values()):
            return None  # of several images, only the name says which is which
        rows = ScanPlaceholder(scan._meta)
        for read in scans:
            same = read.columns == scan.columns
            frame = frame.substitute(read, rows if same else dx.Projection(rows, read.columns))
        steps = Steps(frame.lower_completely())
    elif not _keeps_names(scan, images):
        return None
    fused = FusedDecode(tuple(images), tuple(columns), only, limit)
    *operands, partitions = (scan.operand(name) for name in Scan._parameters)
    return ReadAndDecode(*operands, type(scan), fused, steps, partitions)


def _keeps_names(scan: Scan, images: Sequence[ColumnDecode]) -> bool:
    """True if the decoded columns have the names that the scan gives them."""
    schema = scan.dataset.schema
    return all(
        column.image in schema.images
        and column.error in (None, schema.field(column.image, "error"))
        and column.region in (None, region_field(column.image))
        for column in images
    )


def _merge_scans(scans: Sequence[Scan]) -> Scan | None:
    """One scan with the columns of all; None if they differ in more than their columns."""
    scanned = {name for scan in scans for name in scan.columns}
    columns = [name for name in scans[0].dataset.schema.types if name in scanned]
    complete = [scan for scan in scans if set(scan.columns) == set(columns)]
    merged = complete[0] if complete else scans[0].substitute_parameters({"columns": columns})
    names = {scan.substitute_parameters({"columns": columns})._name for scan in scans}
    return merged if len(names) == 1 else None


def _is_step(node: dx.Expr) -> bool:
    """True if a node is row-wise and uses no reference."""
    if node.ndim == 2:
        return type(node) in ROW_WISE or isinstance(node, dx.Filter)
    if isinstance(node, dx.Projection):
        return not backend_of(node.frame._meta).is_references(node._meta.dtype)
    return isinstance(node, (*ELEMENTWISE, dx.Index)) and all(
        operand.ndim == 1 for operand in node.dependencies()
    )


class ReadAndDecode(Scan):
    """Scans and decodes in one task per partition. Made by lowering: no rule changes it."""

    _parameters: ClassVar = [
        *(name for name in Scan._parameters if name != "_partitions"),
        "scan",
        "decode",
        "steps",
        "_partitions",
    ]
    _defaults: ClassVar = {**Scan._defaults, "steps": None}
    _absorb_projections = False

    step = "readDecode"
    scan: type[Scan]
    decode: FusedDecode
    steps: Steps | None

    @property
    def columns(self) -> list[Any]:
        """The columns of the decoded result."""
        return list(self.decode.columns)

    @property
    def rows(self) -> dx.Expr:
        """The rows before the decode: the scan, and the operations above it."""
        scan = self.scan(*(self.operand(name) for name in Scan._parameters))
        if self.steps is None:
            return scan
        operations = self.steps.operations
        (source,) = {n._name: n for n in operations.find_operations(ScanPlaceholder)}.values()
        return operations.substitute(source, scan)

    @functools.cached_property
    def _meta(self) -> DataFrame:
        return decoded_meta(self.rows._meta, self.decode.images)[self.columns]

    def _filtered_task(self, name: Key, index: int) -> dx.Task:
        decode, steps, options = self.decode, self.steps, self.dataset.options
        if steps is not None:
            passed_on = steps.passed_on if len(options.images) == 1 else ()
            decode = replace(decode, steps=steps.function, passed_on=passed_on)
        # The decode's options override those of the scan.
        decodings = {column.image: column.decoding for column in decode.images}
        if len(options.images) == 1:  # which may have been renamed since the scan
            decodings = {options.images[0].column: decode.images[0].decoding}
        options = replace(
            options,
            images=tuple(
                replace(member, decoding=decodings.get(member.column, member.decoding))
                for member in options.images
            ),
            storage_options=decode.images[0].storage_options or options.storage_options,
        )
        spec = replace(self.spec, options=options, decode=decode)
        partition = self.dataset.partitions[index]
        return dx.Task(name, read_partition, partition, spec, _data_producer=True)

    def _filter_passthrough_available(self, parent: dx.Expr, dependents: Dependents) -> bool:
        return False

    def _simplify_up(self, parent: dx.Expr, dependents: Dependents) -> None:
        return None
