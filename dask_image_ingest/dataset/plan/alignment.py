"""Frames put side by side: partition by partition if they are of the same shards, else refused.

Labels begin at 0 in each partition. Where two frames do not come of one read
(``ddf[kept.score > 0.5]``, ``ddf.assign(score=stored.score)``), Dask brings rows of equal labels
together by a shuffle, and then pairs those of different shards in the order in which they arrive.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.plan.operators import MOVES_ROWS
from dask_image_ingest.errors import ArgumentError

#: The shards of a partition, each with which of how many parts of it.
RowSource: TypeAlias = tuple[tuple[str, int, int], ...]

_Labels: TypeAlias = Sequence[RowSource] | Literal["moved"] | None

#: Steps of reads, of metadata and with a decode: all that is known of one once it is persisted.
READS = ("readMetadata", "readDecode")

_OF_READ = re.compile(rf"({'|'.join(READS)})-(\d+x\d+x\d+-)?[0-9a-f]+")

_lower_by_labels = dx.MaybeAlignPartitions._lower
_lower_operation = dx.OpAlignPartitions._lower


def install_alignment() -> None:
    """Have Dask's expressions look at what they put side by side."""
    dx.MaybeAlignPartitions._lower = _by_partition
    dx.OpAlignPartitions._lower = _by_partition_already


def row_sources(expr: dx.Expr) -> Sequence[RowSource] | None:
    """The shards that each partition of an expression is made of; None if it is made of others.

    A read has them as its attribute ``row_sources``.
    """
    labels = _labels(expr, {})
    return None if labels == "moved" else labels


def _by_partition(self: dx.MaybeAlignPartitions) -> dx.Expr:
    labels = _labels_side_by_side(self)
    if not any(map(_repeat, labels)):
        return _lower_by_labels(self)
    if not _same_rows(labels):
        raise _not_to_be_paired()
    return self._expr_cls(*self.operands)


def _by_partition_already(self: dx.OpAlignPartitions) -> dx.Expr:
    # Of as many partitions each, Dask pairs them one by one here, whatever is in them.
    labels = _labels_side_by_side(self)
    if any(map(_repeat, labels)) and None not in labels and not _same_rows(labels):
        raise _not_to_be_paired()
    return _lower_operation(self)


def _labels_side_by_side(expr: dx.MaybeAlignPartitions) -> list[_Labels]:
    """Partition lineage of the operands that Dask would align by labels; empty if it won't."""
    frames = expr.args
    if len(frames) == 1 or expr.divisions[0] is not None or len(expr.divisions) == 2:
        return []
    return [_labels(frame, {}) for frame in frames]


def _same_rows(labels: Sequence[_Labels]) -> bool:
    return labels[0] != "moved" and all(each == labels[0] for each in labels)


def _not_to_be_paired() -> ArgumentError:
    return ArgumentError(
        "two frames that do not come of one read are put side by side, as in "
        "ddf[other.score > 0.5] or ddf.assign(score=other.score). Their rows can't be paired: "
        "labels begin anew in each shard, so that rows of equal labels are not the same sample. "
        "Merge them, ddf.merge(other, on='__key__'), or make both of one frame: "
        "kept = scored.persist(), then kept[kept.score > 0.5]"
    )


def _repeat(labels: _Labels) -> bool:
    """True if there may be a label twice."""
    return labels == "moved" or len({source[0][0] for source in labels or ()}) > 1


def _labels(expr: dx.Expr, known: dict[str, _Labels]) -> _Labels:
    if expr._name not in known:
        known[expr._name] = _found(expr, known)
    return known[expr._name]


def _found(expr: dx.Expr, known: dict[str, _Labels]) -> _Labels:
    sources: Sequence[RowSource] | None = getattr(expr, "row_sources", None)
    if sources is not None:
        return sources
    if isinstance(expr, dx.FromGraph):
        name, *_ = expr.operand("keys")[0]
        persisted = _OF_READ.fullmatch(str(name)) and expr.npartitions > 1
        return "moved" if persisted else None
    if isinstance(expr, dx.Partitions):
        whole = _labels(expr.frame, known)
        if whole is None or whole == "moved":
            return whole
        return [whole[number] for number in expr.partitions]
    frames = [frame for frame in expr.dependencies() if frame.ndim and _same_index(frame, expr)]
    below = [_labels(frame, known) for frame in frames]
    if isinstance(expr, (dx.Blockwise, dx.MaybeAlignPartitions)):
        if below and all(each == below[0] for each in below):
            return below[0]
    elif not isinstance(expr, MOVES_ROWS):
        return None
    return "moved" if any(map(_repeat, below)) else None


def _same_index(frame: Any, expr: dx.Expr) -> bool:
    """True if labels may still be those of ``frame``."""
    before, after = (getattr(each._meta, "index", each._meta) for each in (frame, expr))
    return all(
        getattr(before, name, None) == getattr(after, name, None) for name in ("dtype", "name")
    )
