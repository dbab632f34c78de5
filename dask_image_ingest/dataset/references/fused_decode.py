"""Fuse a decode with its scan and the row-wise operations between them into one task.

The shard is opened once: scan, apply the operations to the metadata, decode the remaining rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.plan.base_nodes import QueryMask
from dask_image_ingest.dataset.plan.operators import ELEMENTWISE, ROW_WISE, is_row_wise_query
from dask_image_ingest.dataset.plan.scan_node import READS, Scan
from dask_image_ingest.dataset.references.fetch import decoded_meta
from dask_image_ingest.dataset.scan.decode_rows import ColumnDecode, ErrorFilter, FusedDecode
from dask_image_ingest.dataset.scan.task import read_partition
from dask_image_ingest.dataset.schema.columns import HEADERS
from dask_image_ingest.frames import backend_of

#: Task names of a scan with images of one shape. After ``persist`` only the name is left to tell.
SHAPE_IN_NAME = rf"{READS[1]}-(\d+)x(\d+)x(\d+)-[0-9a-f]+"

_STEPS = (*ROW_WISE, dx.Filter)


class ScanPlaceholder(dx.Expr):
    """Placeholder for the metadata of a partition, with row positions in place of images."""

    _parameters: ClassVar = ["empty"]

    @functools.cached_property
    def _meta(self) -> Any:
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
        texts = [node.frame for node in nodes if isinstance(node, QueryMask)]
        used = {name for node in (*series, *texts) for name in node.columns}
        return tuple(name for name in HEADERS if name not in used)


@dataclass(frozen=True)
class _FusedTask:
    task: Callable[[dict[Any, Any]], Any]
    source: tuple[str, int]

    def __call__(self, frame: Any) -> Any:
        """Apply the operations."""
        return self.task({self.source: frame})


def decode_in_read(
    frame: dx.Expr,
    images: Sequence[ColumnDecode],
    only: ErrorFilter,
    limit: int | None,
    columns: Sequence[Any],
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
    if not {each.image for each in images} <= {*scanned_images} and not only_one:
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
        for each in scans:
            same = each.columns == scan.columns
            frame = frame.substitute(each, rows if same else dx.Projection(rows, each.columns))
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
        each.image in schema.images and each.error in (None, schema.field(each.image, "error"))
        for each in images
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
    """True if a node is row-wise and uses no reference.

    Steps run shard by shard. ``query("nbytes > nbytes.mean()")`` is about a whole partition.
    """
    if isinstance(node, dx.Query) and not is_row_wise_query(node.operand("_expr")):
        return False
    if node.ndim == 2:
        return type(node) in _STEPS
    if isinstance(node, dx.Projection):
        return not backend_of(node.frame._meta).is_references(node._meta.dtype)
    return isinstance(node, QueryMask) or (
        isinstance(node, (*ELEMENTWISE, dx.Index))
        and all(each.ndim == 1 for each in node.dependencies())
    )


class ReadAndDecode(Scan):
    """Scans and decodes in one task per partition. Made by lowering: no rule changes it."""

    _parameters: ClassVar = [
        *(name for name in Scan._parameters if name != "_partitions"),
        "scan",
        "decode",
        "after",
        "_partitions",
    ]
    _defaults: ClassVar = {**Scan._defaults, "after": None}
    _absorb_projections = False
    _filter_passthrough = False

    step = READS[1]
    scan: type[Scan]
    decode: FusedDecode
    after: Steps | None

    @functools.cached_property
    def _name(self) -> str:
        height, width, channels = shape = self.decode.images[0].decoding.shape
        if len(self.decode.images) == 1 and self.decode.images[0].pixels and None not in shape:
            return f"{self.step}-{height}x{width}x{channels}-{self.deterministic_token}"
        return f"{self.step}-{self.deterministic_token}"

    @property
    def columns(self) -> list[Any]:
        """The columns of the decoded result."""
        return list(self.decode.columns)

    @property
    def rows(self) -> dx.Expr:
        """The rows before the decode: the scan, and the operations above it."""
        scan = self.scan(*(self.operand(name) for name in Scan._parameters))
        if self.after is None:
            return scan
        steps = self.after.operations
        (source,) = {n._name: n for n in steps.find_operations(ScanPlaceholder)}.values()
        return steps.substitute(source, scan)

    @functools.cached_property
    def _meta(self) -> Any:
        return decoded_meta(self.rows._meta, self.decode.images)[self.columns]

    def _filtered_task(self, name: Any, index: int) -> dx.Task:
        decode, steps, options = self.decode, self.after, self.dataset.options
        if steps is not None:
            passed_on = () if options.other_images else steps.passed_on
            decode = replace(decode, steps=steps.function, passed_on=passed_on)
        # The decode's options override those of the scan.
        decodings = {each.image: each.decoding for each in decode.images}
        others = tuple(
            replace(each, decoding=decodings.get(each.column, each.decoding))
            for each in options.other_images
        )
        first = decodings.get(options.image, options.decoding)
        if not others:  # the only image, which may have been renamed since the scan
            first = decode.images[0].decoding
        options = replace(
            options,
            decoding=first,
            other_images=others,
            storage_options=decode.images[0].storage_options or options.storage_options,
        )
        spec = replace(self.spec, options=options, decode=decode)
        partition = self.dataset.partitions[index]
        return dx.Task(name, read_partition, partition, spec, _data_producer=True)

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> None:
        return None
