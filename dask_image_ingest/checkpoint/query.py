"""Query of a checkpoint: its fingerprint, and the shards that each partition is computed from.

A partition is identified by the query, its shard, and its part of the shard, independently of other
partitions. This needs each partition to be computed from one part of one shard, or from some files,
alone; any other query is an error.

The name of a partition's file is a digest of the shard, its version and the operations on it, and
the number of the part. So no file can be mistaken for another, and a listing of the folder tells
what is stored.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dask.base import tokenize

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.checkpoint.stored_frame import ReadStored
from dask_image_ingest.dask_internals import convert_legacy_graph, new_collection
from dask_image_ingest.dataset.plan import ImageNode, Read, Scan, partition_sources
from dask_image_ingest.dataset.references import Decode
from dask_image_ingest.dataset.scan import Partition
from dask_image_ingest.errors import ArgumentError, FunctionError
from dask_image_ingest.export import QueryStep, digest_of, operation_name, query_steps
from dask_image_ingest.storage import Shard

_NAME = re.compile(r"([0-9a-f]{32})-(\d{5,})-of-(\d{5,})\.parquet")


def shard_prefix(query: str, shards: Iterable[Shard]) -> str:
    """Prefix of the files of a shard's partitions (or of several shards together) in a query."""
    return digest_of(query, *(shard.identity for shard in shards))


def part_name(query: str, partition: Partition) -> str:
    """The file name of a partition."""
    first = partition[0]
    return _name(shard_prefix(query, shards_of(partition)), first.part, first.parts)


def shards_of(partition: Partition) -> tuple[Shard, ...]:
    """The shards of a partition."""
    return tuple(split.shard for split in partition)


def _name(shard: str, part: int, parts: int) -> str:
    return f"{shard}-{part:05d}-of-{parts:05d}.parquet"


def is_part(name: str, shards: Iterable[str] | None = None) -> bool:
    """True if the name is that of a partition file; with ``shards``, of one of these prefixes."""
    match = _NAME.fullmatch(name)
    return match is not None and (shards is None or match[1] in shards)


def choose_splits(
    splits: Sequence[Partition], query: str, files: Mapping[str, int], keep_own: bool
) -> list[Partition]:
    """Choose the partition boundaries of a checkpoint: stored ones, or those of the frame.

    A frame's boundaries depend on the memory of the machine. If a whole shard is needed, and more
    of it is stored in other parts, these are used, so that nothing is computed twice, unless
    ``keep_own``. ``query`` is the digest of the query, ``files`` are those that are stored.
    """
    if keep_own:
        return list(splits)
    # Prefix of a shard → number of its parts → how many of these are stored.
    stored: dict[str, dict[int, int]] = {}
    for match in filter(None, map(_NAME.fullmatch, files)):
        counts = stored.setdefault(match[1], {})
        counts[int(match[3])] = counts.get(int(match[3]), 0) + 1
    chosen: list[Partition] = []
    start = 0
    while start < len(splits):
        first = splits[start]
        all_parts = _parts(first, first[0].parts)
        if list(splits[start : start + len(all_parts)]) != all_parts:
            chosen.append(first)
            start += 1
            continue
        counts = stored.get(shard_prefix(query, shards_of(first)), {})
        # Prefer the boundaries of which most is stored; if equal, the frame's own.
        parts = max(
            [len(all_parts), *counts],
            key=lambda parts: (counts.get(parts, 0) / parts, parts == len(all_parts)),
        )
        chosen += _parts(first, parts)
        start += len(all_parts)
    return chosen


def _parts(partition: Partition, parts: int) -> list[Partition]:
    """The shards of a partition in so many parts."""
    return [
        tuple(replace(split, part=part, parts=parts) for split in partition)
        for part in range(parts)
    ]


# Dask's methods that build a task from one partition of each operand, and nothing else.
_BY_PARTITION = {kind._task for kind in (dx.Blockwise, dx.MapPartitions, dx.Apply, dx.Index)}


@dataclass(frozen=True)
class FingerprintedQuery:
    """A query with its fingerprint."""

    expr: Any
    steps: tuple[QueryStep, ...]  # its operations, in order
    splits: tuple[Partition, ...]  # what each partition is computed from
    #: Of every partition of the read, including partitions that the query leaves out.
    shards: frozenset[tuple[Shard, ...]]
    version: str | None  # identifies the user's functions; None to digest their code

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


def fingerprint_query(expr: dx.Expr, version: str | None) -> FingerprintedQuery:
    """Fingerprint a frame's query; ``version`` as of `FingerprintedQuery`."""
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
    files = (f for several in shards for shard in several for f in (shard, shard.sidecar) if f)
    unversioned = next((file for file in files if not file.version), None)
    if unversioned and version is None:
        raise ArgumentError(
            f"checkpoint: {unversioned.url} has neither an ETag nor a time, so that a change would "
            "go undetected. If it never changes, pass version='1'; to compute all again, another "
            "version"
        )
    return FingerprintedQuery(expr, steps, splits, shards, version)


def _splits_of(expr: dx.Expr) -> tuple[Partition, ...]:
    """The splits that each partition is computed from; raises if it needs anything else, too."""
    for step in expr.walk():
        _check_step(step)
    splits = partition_sources(expr)
    if splits is None:
        raise ArgumentError(
            "checkpoint: the frame combines frames of different shards, but a stored partition "
            "belongs to one shard. Checkpoint each frame, then combine the results"
        )
    return splits


def _check_step(step: dx.Expr) -> None:
    if isinstance(step, Scan):
        options, partitions = step.dataset.options, step.dataset.partitions
        if options.shard_errors == "drop" and max(map(len, partitions)) > 1:
            raise ArgumentError(
                "checkpoint: a partition with a shard that cannot be read is left out as a whole, "
                "the good shards in it too. Pass shard_errors='raise', or shards_per_partition=1"
            )
    if not _is_by_partition(step):
        raise _not_by_partition(step)


def _is_by_partition(step: dx.Expr) -> bool:
    """True if a node computes each partition from the same partition of its operands alone.

    Nodes that override how Dask lowers them or builds tasks may do anything.
    """
    if isinstance(step, Read):
        return not isinstance(step, Scan) or step.operand("limit") is None
    class_ = type(step)
    return isinstance(step, (dx.Partitions, dx._DelayedExpr)) or (
        isinstance(step, dx.Blockwise)
        and any(operand.ndim for operand in step.dependencies())
        and class_._task in _BY_PARTITION
        and class_._lower in (dx.Expr._lower, ImageNode._lower, Decode._lower)
        and class_._layer is dx.Expr._layer
        # The number of a partition changes when shards are added.
        and not (isinstance(step, dx.MapPartitions) and step._has_partition_info)
    )


def _not_by_partition(step: dx.Expr) -> ArgumentError:
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


def _of_all_partitions(expr: dx.Expr) -> dx.Expr:
    """The same query without selections of partitions."""
    while (selection := next(expr.find_operations(dx.Partitions), None)) is not None:
        expr = expr.substitute(selection, selection.frame)
    return expr


def _with_splits(expr: dx.Expr, splits: Sequence[Partition]) -> dx.Expr:
    """The same query with a partition for each of ``splits``."""
    expr = _of_all_partitions(expr)
    for read in list(expr.find_operations(Read)):
        expr = expr.substitute(read, _read_of_splits(read, splits))
    return expr


def _read_of_splits(read: dx.Expr, splits: Sequence[Partition]) -> dx.Expr:
    if isinstance(read, ReadStored):
        numbers = [read.stored.numbers[split] for split in splits]
        return read.substitute_parameters({"_partitions": numbers})
    dataset = read.dataset
    parts = [[(s.url, s.part, s.parts) for s in partition] for partition in splits]
    # Raise, so that the runner can skip an unreadable shard and try it again next time; an empty
    # partition would be stored for good.
    dataset = replace(
        dataset,
        partitions=tuple(splits),
        token=tokenize(dataset.token, parts),
        options=replace(dataset.options, shard_errors="raise"),
    )
    return read.substitute_parameters({"dataset": dataset, "_partitions": None})
