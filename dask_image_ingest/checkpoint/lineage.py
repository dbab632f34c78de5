"""Lineage of partitions: the shards, or part of one, that each is computed from.

It is known if every step of the query works on single partitions. Any other query is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dask.base import tokenize

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.checkpoint.partition_files import VersionedSplit
from dask_image_ingest.checkpoint.scan import ReadStored
from dask_image_ingest.dataset import (
    Dataset,
    Decode,
    ImageNode,
    Partition,
    Scan,
)
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export import operation_name
from dask_image_ingest.storage import Shard

# Dask's methods that build a task from one partition of each operand, and nothing else.
_BY_PARTITION = {kind._task for kind in (dx.Blockwise, dx.MapPartitions, dx.Apply, dx.Index)}


def splits_of(expr: Any) -> list[VersionedSplit]:
    """The shards that each partition is computed from, or the part of one.

    Raises
    ------
    ArgumentError
        If a partition is computed from anything else, too.
    """
    return _splits(expr, {})


def _splits(expr: Any, cache: dict[str, list[VersionedSplit]]) -> list[VersionedSplit]:
    if expr._name not in cache:
        cache[expr._name] = _compute_splits(expr, cache)
    return cache[expr._name]


def _compute_splits(expr: Any, cache: dict[str, list[VersionedSplit]]) -> list[VersionedSplit]:
    if isinstance(expr, Scan):
        if expr.operand("limit") is not None:
            raise _not_by_partition(expr)
        _refuse_partly_skipped(expr.dataset)
        return [_versioned(expr.dataset.partitions[number]) for number in expr._partitions]
    if isinstance(expr, ReadStored):
        return [VersionedSplit((expr.stored.source(number),)) for number in expr._partitions]
    if isinstance(expr, dx.Partitions):
        splits = _splits(expr.frame, cache)
        return [splits[number] for number in expr.partitions]
    # A shared value, such as those of ``isin``, comes from no shard.
    frames = [each for each in expr.dependencies() if not isinstance(each, dx._DelayedExpr)]
    if not frames or not _is_by_partition(expr):
        raise _not_by_partition(expr)
    splits, *others = (_splits(frame, cache) for frame in frames)
    if any(other != splits for other in others):
        raise ArgumentError(
            f"checkpoint: {operation_name(expr)} combines frames of different shards, but a stored "
            "partition belongs to one shard. Checkpoint each frame, then combine the results"
        )
    return splits


def _refuse_partly_skipped(dataset: Dataset) -> None:
    if dataset.options.shard_errors == "skip" and max(map(len, dataset.partitions)) > 1:
        raise ArgumentError(
            "checkpoint: a partition with a shard that cannot be read is left out as a whole, "
            "the good shards in it too. Pass shard_errors='raise', or shards_per_partition=1"
        )


def _is_by_partition(expr: Any) -> bool:
    """True if a node computes each partition from the same partition of its operands alone.

    Nodes that override how Dask lowers them or builds tasks may do anything.
    """
    class_ = type(expr)
    return (
        isinstance(expr, dx.Blockwise)
        and class_._task in _BY_PARTITION
        and class_._lower in (dx.Expr._lower, ImageNode._lower, Decode._lower)
        and class_._layer is dx.Expr._layer
        # The number of a partition changes when shards are added.
        and not (isinstance(expr, dx.MapPartitions) and expr._has_partition_info)
    )


def _not_by_partition(expr: Any) -> ArgumentError:
    if not expr.dependencies():
        return ArgumentError(
            f"checkpoint: the frame begins with {operation_name(expr)}, whose shards or files are "
            "unknown. Pass a frame of read_webdataset_images, read_images or read_parquet_images, "
            "before persist() and before it is joined with others"
        )
    return ArgumentError(
        f"checkpoint: {operation_name(expr)} does not work on single partitions, so that its "
        "results cannot be assigned to shards. Checkpoint the frame before that step, and continue "
        "with the result: stored = checkpoint(ddf, path), then stored.merge(...)"
    )


def _versioned(partition: Partition) -> VersionedSplit:
    first = partition[0]
    return VersionedSplit(tuple(split.shard for split in partition), first.part, first.parts)


def shards_of(read: Any) -> tuple[tuple[Shard, ...], ...]:
    """The shards of every partition of a read, also of those that are not computed.

    For a checkpoint, the stand-ins of its files.
    """
    if isinstance(read, Scan):
        return tuple(dict.fromkeys(_versioned(each).shards for each in read.dataset.partitions))
    return tuple((read.stored.source(number),) for number in range(len(read.stored.parts)))


def with_splits(expr: Any, splits: Sequence[VersionedSplit]) -> Any:
    """The same query with a partition for each of ``splits``."""
    return _with_splits(expr, splits, {})


def _with_splits(expr: Any, splits: Sequence[VersionedSplit], cache: dict[str, Any]) -> Any:
    if expr._name not in cache:
        cache[expr._name] = _replace_splits(expr, splits, cache)
    return cache[expr._name]


def _replace_splits(expr: Any, splits: Sequence[VersionedSplit], cache: dict[str, Any]) -> Any:
    if isinstance(expr, dx.Partitions):
        return _with_splits(expr.frame, splits, cache)
    if isinstance(expr, Scan):
        dataset = _dataset_with_splits(expr.dataset, splits)
        return expr.substitute_parameters({"dataset": dataset, "_partitions": None})
    if isinstance(expr, ReadStored):
        numbers = [expr.stored.numbers[split.shards[0]] for split in splits]
        return expr.substitute_parameters({"_partitions": numbers})
    operands = [
        _with_splits(value, splits, cache) if isinstance(value, dx.Expr) else value
        for value in expr.operands
    ]
    return type(expr)(*operands)


def _dataset_with_splits(dataset: Dataset, splits: Sequence[VersionedSplit]) -> Dataset:
    partitions_before = {_versioned(partition): partition for partition in dataset.partitions}
    # Any split of the shard, for its index.
    by_url = {split.url: split for partition in dataset.partitions for split in partition}
    partitions = tuple(
        partitions_before.get(s)
        or tuple(replace(by_url[shard.url], part=s.part, parts=s.parts) for shard in s.shards)
        for s in splits
    )
    parts = [[(split.url, split.part, split.parts) for split in splits] for splits in partitions]
    token = tokenize(dataset.token, parts)
    # Raise, so that the runner can skip an unreadable shard and try it again next time; an empty
    # partition would be stored for good.
    options = replace(dataset.options, shard_errors="raise")
    return replace(dataset, partitions=partitions, token=token, options=options)
