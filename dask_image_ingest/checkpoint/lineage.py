"""Lineage of partitions: the shards, or part of one, that each is computed from.

That can be said where every step of the query works on one partition alone. Any other is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
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
    ReadImageFiles,
    Scan,
)
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export import operation_name
from dask_image_ingest.storage import Shard

# The ways in which dask makes a task of a partition of each operand, and of nothing else.
_BY_PARTITION = {kind._task for kind in (dx.Blockwise, dx.MapPartitions, dx.Apply, dx.Index)}


def splits_of(expr: Any) -> list[VersionedSplit]:
    """The shards of each partition, or the part of one.

    Raises
    ------
    ArgumentError
        If a partition is not made of these alone.
    """
    return _splits(expr, {})


def _splits(expr: Any, known: dict[str, list[VersionedSplit]]) -> list[VersionedSplit]:
    if expr._name not in known:
        known[expr._name] = _found_splits(expr, known)
    return known[expr._name]


def _found_splits(expr: Any, known: dict[str, list[VersionedSplit]]) -> list[VersionedSplit]:
    if isinstance(expr, Scan):
        if expr.operand("limit") is not None:
            raise _not_by_partition(expr)
        _refuse_partly_skipped(expr.dataset)
        shards = {shard.url: shard for shard in expr.dataset.shards}
        return [_versioned(expr.dataset.partitions[number], shards) for number in expr._partitions]
    if isinstance(expr, ReadImageFiles):
        splits = _file_splits(expr)
        return [splits[number] for number in expr._partitions]
    if isinstance(expr, ReadStored):
        return [VersionedSplit((expr.stored.source(number),)) for number in expr._partitions]
    if isinstance(expr, dx.Partitions):
        splits = _splits(expr.frame, known)
        return [splits[number] for number in expr.partitions]
    frames = expr.dependencies()
    if not frames or not _is_by_partition(expr):
        raise _not_by_partition(expr)
    splits, *others = (_splits(frame, known) for frame in frames)
    if any(other != splits for other in others):
        raise ArgumentError(
            f"checkpoint: {operation_name(expr)} puts frames of different shards side by "
            "side, and a partition is known by one shard. Checkpoint each of them, "
            "then bring them together"
        )
    return splits


def _file_splits(read: ReadImageFiles) -> list[VersionedSplit]:
    """The files of each partition of a read, told apart by the number of the first as well."""
    files, edges = read.files.files, read.files.edges
    return [VersionedSplit(files[a:b], a) for a, b in itertools.pairwise(edges)]


def _refuse_partly_skipped(dataset: Dataset) -> None:
    if dataset.options.shard_errors == "skip" and max(map(len, dataset.partitions)) > 1:
        raise ArgumentError(
            "checkpoint: a partition with a shard that cannot be read is left out as a whole, "
            "the good shards in it too. Pass shard_errors='raise', or shards_per_partition=1"
        )


def _is_by_partition(expr: Any) -> bool:
    kind = type(expr)
    return (
        isinstance(expr, dx.Blockwise)
        and kind._task in _BY_PARTITION
        and kind._lower in (dx.Expr._lower, ImageNode._lower, Decode._lower)
        and kind._layer is dx.Expr._layer
        # What a function is told of its partition's number is not the same next time.
        and not (isinstance(expr, dx.MapPartitions) and expr._has_partition_info)
    )


def _not_by_partition(expr: Any) -> ArgumentError:
    if not expr.dependencies():
        return ArgumentError(
            f"checkpoint: the frame begins with {operation_name(expr)}, which does not say of "
            "which shards or files it is made. Pass a frame of read_webdataset_images, read_images "
            "or read_parquet_images, before persist() and before it is joined with others"
        )
    return ArgumentError(
        f"checkpoint: {operation_name(expr)} does not work on one partition alone, so that "
        "its results cannot be told by their shards. Checkpoint the frame before "
        "that step, and go on with what comes back: "
        "stored = checkpoint(ddf, path), then stored.merge(...)"
    )


def _versioned(partition: Partition, shards: Mapping[str, Shard]) -> VersionedSplit:
    first = partition[0]
    return VersionedSplit(tuple(shards[s.url] for s in partition), first.part, first.parts)


def shards_of(read: Any) -> tuple[tuple[Shard, ...], ...]:
    """The shards of each partition of a read, or what stands for them in a checkpoint.

    Those of partitions that are not computed included.
    """
    if isinstance(read, ReadImageFiles):
        return tuple(split.shards for split in _file_splits(read))
    if isinstance(read, Scan):
        shards = {shard.url: shard for shard in read.dataset.shards}
        every = (_versioned(partition, shards).shards for partition in read.dataset.partitions)
        return tuple(dict.fromkeys(every))
    return tuple((read.stored.source(number),) for number in range(len(read.stored.parts)))


def with_splits(expr: Any, splits: Sequence[VersionedSplit]) -> Any:
    """A query whose partitions are made of these splits."""
    return _with_splits(expr, splits, {})


def _with_splits(expr: Any, splits: Sequence[VersionedSplit], known: dict[str, Any]) -> Any:
    if expr._name not in known:
        known[expr._name] = _made_with_splits(expr, splits, known)
    return known[expr._name]


def _made_with_splits(expr: Any, splits: Sequence[VersionedSplit], known: dict[str, Any]) -> Any:
    if isinstance(expr, dx.Partitions):
        return _with_splits(expr.frame, splits, known)
    if isinstance(expr, Scan):
        dataset = _dataset_of(expr.dataset, splits)
        return expr.substitute_parameters({"dataset": dataset, "_partitions": None})
    if isinstance(expr, ReadImageFiles):
        whole = _file_splits(expr)
        return expr.substitute_parameters({"_partitions": [whole.index(s) for s in splits]})
    if isinstance(expr, ReadStored):
        places = {expr.stored.source(number): number for number in range(len(expr.stored.parts))}
        numbers = [places[split.shards[0]] for split in splits]
        return expr.substitute_parameters({"_partitions": numbers})
    operands = [
        _with_splits(value, splits, known) if isinstance(value, dx.Expr) else value
        for value in expr.operands
    ]
    return type(expr)(*operands)


def _dataset_of(dataset: Dataset, splits: Sequence[VersionedSplit]) -> Dataset:
    # Each shard has an index and a sidecar of its own.
    own = {split.url: split for partition in dataset.partitions for split in partition}
    chosen = tuple(
        tuple(replace(own[shard.url], part=s.part, parts=s.parts) for shard in s.shards)
        for s in splits
    )
    told = [[(split.url, split.part, split.parts) for split in each] for each in chosen]
    token = tokenize(dataset.token, told)
    # A shard that cannot be read leaves its mark in a checkpoint, and no empty partition for good.
    options = replace(dataset.options, shard_errors="raise")
    return replace(dataset, partitions=chosen, token=token, options=options)
