"""Lineage of partitions: the part of a shard that each is computed from.

That can be said where every step of the query works on one partition alone. Any other is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dask.base import tokenize

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.checkpoint.partition_files import VersionedSplit
from dask_image_ingest.checkpoint.scan import ReadStored
from dask_image_ingest.dataset import Dataset, Decode, ReadWebDataset
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export import operation_name
from dask_image_ingest.storage import Shard

__all__ = ["shards_of", "splits_of", "with_splits"]

# The ways in which dask makes a task of a partition of each operand, and of nothing else.
_BY_PARTITION = {kind._task for kind in (dx.Blockwise, dx.MapPartitions, dx.Apply, dx.Index)}


def splits_of(expr: Any) -> list[VersionedSplit]:
    """The part of a shard of each partition.

    Raises
    ------
    ArgumentError
        If that is not one part of one shard.
    """
    return _splits(expr, {})


def _splits(expr: Any, known: dict[str, list[VersionedSplit]]) -> list[VersionedSplit]:
    if expr._name not in known:
        known[expr._name] = _found_splits(expr, known)
    return known[expr._name]


def _found_splits(expr: Any, known: dict[str, list[VersionedSplit]]) -> list[VersionedSplit]:
    if isinstance(expr, ReadWebDataset):
        if expr.operand("limit") is not None:
            raise _not_by_partition(expr)
        shards = {shard.url: shard for shard in expr.dataset.shards}
        read = (expr.dataset.splits[number] for number in expr._partitions)
        return [VersionedSplit(shards[split.url], split.part, split.parts) for split in read]
    if isinstance(expr, ReadStored):
        return [VersionedSplit(expr.stored.source(number)) for number in expr._partitions]
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


def _is_by_partition(expr: Any) -> bool:
    kind = type(expr)
    return (
        isinstance(expr, dx.Blockwise)
        and kind._task in _BY_PARTITION
        and kind._lower in (dx.Expr._lower, Decode._lower)
        and kind._layer is dx.Expr._layer
        # What a function is told of its partition's number is not the same next time.
        and not (isinstance(expr, dx.MapPartitions) and expr._has_partition_info)
    )


def _not_by_partition(expr: Any) -> ArgumentError:
    if not expr.dependencies():
        return ArgumentError(
            f"checkpoint: the frame begins with {operation_name(expr)}, which does not say of "
            "which shards it is made. Pass a frame of read_webdataset_images, before persist() and "
            "before it is joined with others"
        )
    return ArgumentError(
        f"checkpoint: {operation_name(expr)} does not work on one partition alone, so that "
        "its results cannot be told by their shards. Checkpoint the frame before "
        "that step, and go on with what comes back: "
        "stored = checkpoint(ddf, path), then stored.merge(...)"
    )


def shards_of(read: Any) -> tuple[Shard, ...]:
    """All shards that a read knows, or what stands for them in a checkpoint."""
    if isinstance(read, ReadWebDataset):
        return read.dataset.shards
    return tuple(map(read.stored.source, range(len(read.stored.parts))))


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
    if isinstance(expr, ReadWebDataset):
        dataset = _dataset_of(expr.dataset, splits)
        return expr.substitute_parameters({"dataset": dataset, "_partitions": None})
    if isinstance(expr, ReadStored):
        places = {expr.stored.source(number): number for number in range(len(expr.stored.parts))}
        numbers = [places[split.shard] for split in splits]
        return expr.substitute_parameters({"_partitions": numbers})
    operands = [
        _with_splits(value, splits, known) if isinstance(value, dx.Expr) else value
        for value in expr.operands
    ]
    return type(expr)(*operands)


def _dataset_of(dataset: Dataset, splits: Sequence[VersionedSplit]) -> Dataset:
    # Each shard has an index and a sidecar of its own.
    own = {split.url: split for split in dataset.splits}
    chosen = tuple(replace(own[s.shard.url], part=s.part, parts=s.parts) for s in splits)
    token = tokenize(dataset.token, [(s.url, s.part, s.parts) for s in chosen])
    # A shard that cannot be read leaves its mark in a checkpoint, and no empty partition for good.
    options = replace(dataset.options, shard_errors="raise")
    return replace(dataset, splits=chosen, token=token, options=options)
