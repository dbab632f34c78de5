"""Query of a checkpoint: its fingerprint, and the shards that each partition is computed from.

A partition is identified by the query, its shard, and its part of the shard, independently of other
partitions. This needs each partition to be computed from one part of one shard, or from some files,
alone; any other query is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dask.base import tokenize

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.checkpoint.partition_files import shards_of
from dask_image_ingest.checkpoint.scan import ReadStored
from dask_image_ingest.dask_internals import convert_legacy_graph, new_collection
from dask_image_ingest.dataset import Decode, ImageNode, Partition, Read, Scan, partition_sources
from dask_image_ingest.errors import ArgumentError, FunctionError
from dask_image_ingest.export import QueryStep, digest_of, operation_name, query_steps
from dask_image_ingest.storage import Shard

# Dask's methods that build a task from one partition of each operand, and nothing else.
_BY_PARTITION = {kind._task for kind in (dx.Blockwise, dx.MapPartitions, dx.Apply, dx.Index)}


@dataclass(frozen=True)
class FingerprintedQuery:
    """A query with its fingerprint.

    Attributes
    ----------
    expr
        The frame's query.
    steps
        Its operations, in order.
    splits
        What each partition is computed from.
    shards
        The shards of every partition of the read, including partitions that the query leaves out.
    version
        Identifies the user's functions; None to digest their code.
    """

    expr: Any
    steps: tuple[QueryStep, ...]
    splits: tuple[Partition, ...]
    shards: frozenset[tuple[Shard, ...]]
    version: str | None

    @functools.cached_property
    def digest(self) -> str:
        """Digest of everything that is done to each partition."""
        return digest_of(self.steps[-1].digest, repr(self.version))

    @property
    def has_divisions(self) -> bool:
        """True if divisions are known, so that partition boundaries must be kept."""
        return bool(self.expr.known_divisions)

    def tasks_of(self, splits: Sequence[Partition]) -> tuple[dict[Any, Any], list[Any]]:
        """A graph that computes these splits, whatever the frame's own partitions, and its keys."""
        if self.has_divisions:
            numbers = {split: number for number, split in enumerate(self.splits)}
            frame = new_collection(self.expr).partitions[[numbers[split] for split in splits]]
        else:
            frame = new_collection(_with_splits(self.expr, splits))
        if _splits_of(frame.optimize(fuse=False).expr) != tuple(splits):
            raise ArgumentError(
                "checkpoint: Dask combines rows of several partitions for this frame, so that its "
                "results cannot be assigned to shards"
            )
        optimized = frame.optimize()
        return convert_legacy_graph(optimized.__dask_graph__()), optimized.__dask_keys__()


def fingerprint_query(expr: Any, version: str | None) -> FingerprintedQuery:
    """Fingerprint a frame's query.

    Parameters
    ----------
    expr
        The query.
    version
        Identifies the user's functions; None to digest their code.

    Raises
    ------
    ArgumentError
        If a partition is not computed from one part of one shard, or from some files, alone.
    FunctionError
        If a function cannot be digested.
    """
    splits = _splits_of(expr)
    try:
        steps = query_steps(_of_all_partitions(expr), functions=version is None)
    except FunctionError as error:
        raise FunctionError(
            f"checkpoint: {error}. Pass version='1' to vouch for the functions yourself, and "
            "another one when they change"
        ) from error
    read = next(expr.find_operations(Read))
    shards = frozenset(map(shards_of, read.operands[0].partitions))
    files = (file for each in shards for shard in each for file in (shard, shard.sidecar) if file)
    unversioned = next((file for file in files if not file.version), None)
    if unversioned and version is None:
        raise ArgumentError(
            f"checkpoint: {unversioned.url} has neither an ETag nor a time, so that a change would "
            "go undetected. If it never changes, pass version='1'; to compute all again, another "
            "version"
        )
    return FingerprintedQuery(expr, steps, splits, shards, version)


def _splits_of(expr: Any) -> tuple[Partition, ...]:
    """The splits that each partition is computed from; raises if it needs anything else, too."""
    for step in expr.walk():
        _check_step(step)
    splits = partition_sources(expr)
    if not isinstance(splits, tuple):
        raise ArgumentError(
            "checkpoint: the frame combines frames of different shards, but a stored partition "
            "belongs to one shard. Checkpoint each frame, then combine the results"
        )
    return splits


def _check_step(step: Any) -> None:
    if isinstance(step, Scan):
        options, partitions = step.dataset.options, step.dataset.partitions
        if options.shard_errors == "skip" and max(map(len, partitions)) > 1:
            raise ArgumentError(
                "checkpoint: a partition with a shard that cannot be read is left out as a whole, "
                "the good shards in it too. Pass shard_errors='raise', or shards_per_partition=1"
            )
    if not _is_by_partition(step):
        raise _not_by_partition(step)


def _is_by_partition(step: Any) -> bool:
    """True if a node computes each partition from the same partition of its operands alone.

    Nodes that override how Dask lowers them or builds tasks may do anything.
    """
    if isinstance(step, Read):
        return not isinstance(step, Scan) or step.operand("limit") is None
    class_ = type(step)
    return isinstance(step, (dx.Partitions, dx._DelayedExpr)) or (
        isinstance(step, dx.Blockwise)
        and any(each.ndim for each in step.dependencies())
        and class_._task in _BY_PARTITION
        and class_._lower in (dx.Expr._lower, ImageNode._lower, Decode._lower)
        and class_._layer is dx.Expr._layer
        # The number of a partition changes when shards are added.
        and not (isinstance(step, dx.MapPartitions) and step._has_partition_info)
    )


def _not_by_partition(step: Any) -> ArgumentError:
    if not step.dependencies():
        return ArgumentError(
            f"checkpoint: the frame begins with {operation_name(step)}, whose shards or files are "
            "unknown. Pass a frame of read_webdataset_images, read_images or read_parquet_images, "
            "before persist() and before it is joined with others"
        )
    return ArgumentError(
        f"checkpoint: {operation_name(step)} does not work on single partitions, so that its "
        "results cannot be assigned to shards. Checkpoint the frame before that step, and continue "
        "with the result: stored = checkpoint(ddf, path), then stored.merge(...)"
    )


def _of_all_partitions(expr: Any) -> Any:
    """The same query without selections of partitions."""
    while (selection := next(expr.find_operations(dx.Partitions), None)) is not None:
        expr = expr.substitute(selection, selection.frame)
    return expr


def _with_splits(expr: Any, splits: Sequence[Partition]) -> Any:
    """The same query with a partition for each of ``splits``."""
    expr = _of_all_partitions(expr)
    for read in list(expr.find_operations(Read)):
        expr = expr.substitute(read, _read_of_splits(read, splits))
    return expr


def _read_of_splits(read: Any, splits: Sequence[Partition]) -> Any:
    if isinstance(read, ReadStored):
        numbers = [read.stored.numbers[split] for split in splits]
        return read.substitute_parameters({"_partitions": numbers})
    dataset = read.dataset
    parts = [[(split.url, split.part, split.parts) for split in each] for each in splits]
    # Raise, so that the runner can skip an unreadable shard and try it again next time; an empty
    # partition would be stored for good.
    dataset = replace(
        dataset,
        partitions=tuple(splits),
        token=tokenize(dataset.token, parts),
        options=replace(dataset.options, shard_errors="raise"),
    )
    return read.substitute_parameters({"dataset": dataset, "_partitions": None})
