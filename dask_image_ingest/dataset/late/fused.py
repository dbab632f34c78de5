"""A decode in the task of the read below it, with what is done to each row in between.

The shard is open once: it is scanned, the steps between both are taken over its metadata, and the
images of the rows that are left are decoded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.late.decode import decoded_meta
from dask_image_ingest.dataset.plan.alignment import READS
from dask_image_ingest.dataset.plan.operators import ROW_BY_ROW, ROW_WISE
from dask_image_ingest.dataset.plan.scan_node import Scan
from dask_image_ingest.dataset.scan.decode_rows import DecodeInRead, ImageDecode, Kept
from dask_image_ingest.dataset.scan.task import read_partition
from dask_image_ingest.frames import backend_of

#: The name of a read whose images are of one shape: all that is known of it once it is persisted.
SHAPE_IN_NAME = rf"{READS[1]}-(\d+)x(\d+)x(\d+)-[0-9a-f]+"

_STEPS = (*ROW_WISE, dx.Filter)


class Rows(dx.Expr):
    """Stands for the metadata of a partition, with positions in place of images."""

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
    """Operations on the rows of a read before their decode: an expression over `Rows`."""

    expr: dx.Expr

    def __dask_tokenize__(self) -> str:
        return self.expr._name

    def __repr__(self) -> str:
        return str(self.expr)

    @functools.cached_property
    def function(self) -> Callable[[Any], Any]:
        """The same as a function of a pandas or cuDF frame."""
        nodes = {node._name: node for node in self.expr.walk()}
        (source,) = (node for node in nodes.values() if isinstance(node, Rows))
        del nodes[source._name]
        tasks = [node._task((name, 0), 0) for name, node in nodes.items()]
        return _Graph(dx.Task.fuse(*tasks), (source._name, 0))


@dataclass(frozen=True)
class _Graph:
    task: Callable[[dict[Any, Any]], Any]
    source: tuple[str, int]

    def __call__(self, frame: Any) -> Any:
        return self.task({self.source: frame})


def decode_in_read(
    frame: dx.Expr,
    images: Sequence[ImageDecode],
    keep: Kept,
    limit: int | None,
    columns: Sequence[Any],
) -> ReadAndDecode | None:
    """A decode of ``frame`` as one with its read; None where it needs more than its own rows."""
    nodes = {node._name: node for node in frame.walk()}
    reads = [node for node in nodes.values() if isinstance(node, Scan)]
    if any(isinstance(node, ReadAndDecode) for node in reads):
        return None
    if not reads:
        return None
    read = _together(reads)
    if read is None:
        return None
    those = read.dataset.schema.images
    alone = len(those) == 1
    if not {each.image for each in images} <= {*those} and not alone:
        return None
    if not {*those}.intersection(read.columns) or (alone and len(images) > 1):
        return None
    steps = None
    if not isinstance(frame, Scan):
        if not all(isinstance(node, Scan) or _is_step(node) for node in nodes.values()):
            return None
        if not alone and any(isinstance(node, dx.RenameFrame) for node in nodes.values()):
            return None  # which image is which is told by its name
        rows = Rows(read._meta)
        for each in reads:
            mine = rows if each.columns == read.columns else dx.Projection(rows, each.columns)
            frame = frame.substitute(each, mine)
        steps = Steps(frame.lower_completely())
    elif not _under_its_names(read, images):
        return None
    step = DecodeStep(tuple(images), tuple(columns), keep, limit, steps)
    *scan, partitions = (read.operand(name) for name in Scan._parameters)
    return ReadAndDecode(*scan, step, partitions)


def _under_its_names(read: Scan, images: Sequence[ImageDecode]) -> bool:
    """True if a decode makes images and errors of a scan under its names."""
    schema = read.dataset.schema
    return all(
        each.image in schema.images and each.error in (None, schema.field(each.image, "error"))
        for each in images
    )


def _together(reads: Sequence[Scan]) -> Scan | None:
    """One read for several that differ in their columns alone."""
    columns = [
        name for name in reads[0].dataset.schema.types if any(name in r.columns for r in reads)
    ]
    whole = [each for each in reads if set(each.columns) == set(columns)]
    made = whole[0] if whole else reads[0].substitute_parameters({"columns": columns})
    same = {each.substitute_parameters({"columns": columns})._name for each in reads}
    return made if len(same) == 1 else None


def _is_step(node: dx.Expr) -> bool:
    """True if a node works on the rows of a partition alone, and looks at no reference."""
    if node.ndim == 2:
        return type(node) in _STEPS
    if isinstance(node, dx.Projection):
        return not backend_of(node.frame._meta).is_references(node._meta.dtype)
    return isinstance(node, (*ROW_BY_ROW, dx.Index)) and all(
        each.ndim == 1 for each in node.dependencies()
    )


@dataclass(frozen=True, repr=False)
class DecodeStep:
    """A decode in a read: as `DecodeInRead`, before it is sent to workers."""

    images: tuple[ImageDecode, ...]
    columns: tuple[Any, ...]
    keep: Kept
    limit: int | None
    steps: Steps | None

    def __repr__(self) -> str:
        names = ", ".join(repr(each.image) for each in self.images)
        told = {"after": self.steps, "keep": self.keep, "limit": self.limit}
        return names + "".join(f" {k}={value}" for k, value in told.items() if value is not None)


class ReadAndDecode(Scan):
    """Scans shards and decodes their images, in one task a partition; the optimiser's last word."""

    _parameters: ClassVar = [
        *(name for name in Scan._parameters if name != "_partitions"),
        "decode",
        "_partitions",
    ]
    _absorb_projections = False
    _filter_passthrough = False

    step = READS[1]
    decode: DecodeStep

    @functools.cached_property
    def _name(self) -> str:
        height, width, channels = shape = self.decode.images[0].decoding.shape
        if len(self.decode.images) == 1 and self.decode.images[0].pixels and None not in shape:
            return f"{self.step}-{height}x{width}x{channels}-{self.deterministic_token}"
        return f"{self.step}-{self.deterministic_token}"

    @property
    def columns(self) -> list[Any]:
        """The columns of the rows that are decoded."""
        return list(self.decode.columns)

    @functools.cached_property
    def _meta(self) -> Any:
        steps, meta = self.decode.steps, self.dataset.meta[self.scanned]
        meta = decoded_meta(meta if steps is None else steps.expr._meta, self.decode.images)
        return meta[self.columns]

    def _filtered_task(self, name: Any, index: int) -> dx.Task:
        decode, options = self.decode, self.dataset.options
        steps = None if decode.steps is None else decode.steps.function
        made = DecodeInRead(decode.images, decode.columns, decode.keep, decode.limit, steps)
        # Decoded as they are asked for; the shard is opened as the scan does, if need be.
        of = {each.image: each.decoding for each in decode.images}
        others = tuple(
            replace(each, decoding=of.get(each.column, each.decoding))
            for each in options.other_images
        )
        first = decode.images[0].decoding if not others else of.get(options.image, options.decoding)
        options = replace(
            options,
            decoding=first,
            other_images=others,
            storage_options=decode.images[0].storage_options or options.storage_options,
        )
        query = replace(self.query, options=options)
        partition = self.dataset.partitions[index]
        return dx.Task(name, read_partition, partition, query, made, _data_producer=True)

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> None:
        return None
