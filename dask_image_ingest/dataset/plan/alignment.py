"""Align frames of different reads partition by partition if they read the same shards, else raise.

For frames that do not come from one read (``ddf[stored.score > 0.5]``,
``ddf.assign(score=stored.score)``), Dask shuffles both by index label. Labels begin at 0 in each
shard, so it would pair rows of different shards that have equal labels.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.plan.operators import MOVES_ROWS
from dask_image_ingest.errors import ArgumentError

#: What a partition reads: (shard URL, part, number of parts) of each shard.
RowSource: TypeAlias = tuple[tuple[str, int, int], ...]

# Lineage of index labels: what each partition read, or "moved" if rows with repeating labels were
# moved to other partitions, or None if the labels are not those of a read.
_Labels: TypeAlias = Sequence[RowSource] | Literal["moved"] | None

#: Task names of a scan and of a scan with decode. After ``persist`` only the name is left to tell.
READS = ("readMetadata", "readDecode")

_OF_READ = re.compile(rf"({'|'.join(READS)})-(\d+x\d+x\d+-)?[0-9a-f]+")

_dask_lower = dx.MaybeAlignPartitions._lower
_dask_lower_operation = dx.OpAlignPartitions._lower
_dask_simplify_filter = dx.FilterAlign._simplify_up


def install_alignment() -> None:
    """Wrap Dask's two alignments, and the rule that skips one of them."""
    dx.MaybeAlignPartitions._lower = _lower_alignment
    dx.OpAlignPartitions._lower = _lower_operation
    dx.FilterAlign._simplify_up = _simplify_filter


def row_sources(expr: dx.Expr) -> Sequence[RowSource] | None:
    """The sources of each partition, if an expression keeps the partitions of a read; else None.

    Starts from the attribute ``row_sources`` of reads.
    """
    labels = _labels(expr, {})
    return None if labels == "moved" else labels


def _lower_alignment(self: dx.MaybeAlignPartitions) -> dx.Expr:
    labels = _operand_labels(self)
    if not any(map(_may_repeat, labels)):
        return _dask_lower(self)
    if not _same_rows(labels):
        raise _not_paired(labels)
    return self._expr_cls(*self.operands)


def _lower_operation(self: dx.OpAlignPartitions) -> dx.Expr:
    # If both have equally many partitions, Dask pairs these here whatever they hold.
    labels = _operand_labels(self)
    if any(map(_may_repeat, labels)) and None not in labels and not _same_rows(labels):
        raise _not_paired(labels)
    return _dask_lower_operation(self)


def _simplify_filter(self: dx.FilterAlign, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
    # For an index, and so for a length, Dask replaces an aligned filter by one without alignment.
    if isinstance(parent, dx.Index) and any(map(_may_repeat, _operand_labels(self))):
        return None
    return _dask_simplify_filter(self, parent, dependents)


def _operand_labels(expr: dx.MaybeAlignPartitions) -> list[_Labels]:
    """Label lineage of the operands that Dask would align by index; empty if it won't."""
    frames = expr.args
    if len(frames) == 1 or expr.divisions[0] is not None or len(expr.divisions) == 2:
        return []
    return [_labels(frame, {}) for frame in frames]


def _same_rows(labels: Sequence[_Labels]) -> bool:
    return labels[0] != "moved" and all(each == labels[0] for each in labels)


def _not_paired(labels: Sequence[_Labels]) -> ArgumentError:
    why = (
        "Their rows can't be paired: labels begin anew in each shard, so rows with equal labels "
        "may be different samples. Merge the frames"
    )
    if any(each is None or each == "moved" for each in labels):
        return ArgumentError(
            "a frame is combined with one whose rows may be in other partitions, as after "
            f"groupby(...).transform, shuffle, sort_values or repartition. {why}: "
            "ddf.merge(other, on='__key__'), or with one row of each group, "
            "ddf.merge(ddf.groupby('cls').height.max().reset_index(), on='cls')"
        )
    return ArgumentError(
        "two frames of different reads are combined, as in ddf[other.score > 0.5] or "
        f"ddf.assign(score=other.score). {why}, ddf.merge(other, on='__key__'), or derive both "
        "from one: kept = scored.persist(), then kept[kept.score > 0.5]"
    )


def _may_repeat(labels: _Labels) -> bool:
    """True if a label may occur twice."""
    return labels == "moved" or len({source[0][0] for source in labels or ()}) > 1


def _labels(expr: dx.Expr, cache: dict[str, _Labels]) -> _Labels:
    if expr._name not in cache:
        cache[expr._name] = _find_labels(expr, cache)
    return cache[expr._name]


def _find_labels(expr: dx.Expr, cache: dict[str, _Labels]) -> _Labels:
    # Of a read, of a persisted read (whose shards are not known any more), or of its operands.
    sources: Sequence[RowSource] | None = getattr(expr, "row_sources", None)
    if sources is not None:
        return sources
    if isinstance(expr, dx.FromGraph):
        name, *_ = expr.operand("keys")[0]
        persisted = _OF_READ.fullmatch(str(name)) and expr.npartitions > 1
        return "moved" if persisted else None
    if isinstance(expr, dx.Partitions):
        labels = _labels(expr.frame, cache)
        if labels is None or labels == "moved":
            return labels
        return [labels[number] for number in expr.partitions]
    frames = [frame for frame in expr.dependencies() if frame.ndim and _same_index(frame, expr)]
    below = [_labels(frame, cache) for frame in frames]
    if isinstance(expr, (dx.Blockwise, dx.MaybeAlignPartitions)):
        if below and all(each == below[0] for each in below):
            return below[0]
    elif not isinstance(expr, MOVES_ROWS):
        return None
    return "moved" if any(map(_may_repeat, below)) else None


def _same_index(frame: Any, expr: dx.Expr) -> bool:
    """True if the index may be that of ``frame``: name and dtype are equal."""
    before, after = (getattr(each._meta, "index", each._meta) for each in (frame, expr))
    return all(
        getattr(before, name, None) == getattr(after, name, None) for name in ("dtype", "name")
    )
