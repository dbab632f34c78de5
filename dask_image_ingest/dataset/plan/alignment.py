"""Align frames of different reads partition by partition if they read the same shards, else raise.

For frames that do not come from one read (``ddf[stored.score > 0.5]``,
``ddf.assign(score=stored.score)``), Dask shuffles both by index label. Labels begin at 0 in each
shard, so it would pair rows of different shards that have equal labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.plan.lineage import Sources, may_repeat, partition_sources
from dask_image_ingest.errors import ArgumentError

_dask_lower = dx.MaybeAlignPartitions._lower
_dask_lower_operation = dx.OpAlignPartitions._lower
_dask_simplify_filter = dx.FilterAlign._simplify_up


def install_alignment() -> None:
    """Wrap Dask's two alignments, and the rule that skips one of them."""
    dx.MaybeAlignPartitions._lower = _lower_alignment
    dx.OpAlignPartitions._lower = _lower_operation
    dx.FilterAlign._simplify_up = _simplify_filter


def _lower_alignment(self: dx.MaybeAlignPartitions) -> dx.Expr:
    labels = _operand_sources(self)
    if not any(map(may_repeat, labels)):
        return _dask_lower(self)
    if not _same_rows(labels):
        raise _not_paired(labels)
    return self._expr_cls(*self.operands)


def _lower_operation(self: dx.OpAlignPartitions) -> dx.Expr:
    # If both have equally many partitions, Dask pairs these here whatever they hold.
    labels = _operand_sources(self)
    if any(map(may_repeat, labels)) and None not in labels and not _same_rows(labels):
        raise _not_paired(labels)
    return _dask_lower_operation(self)


def _simplify_filter(self: dx.FilterAlign, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
    # For an index, and so for a length, Dask replaces an aligned filter by one without alignment.
    if isinstance(parent, dx.Index) and any(map(may_repeat, _operand_sources(self))):
        return None
    return _dask_simplify_filter(self, parent, dependents)


def _operand_sources(expr: dx.MaybeAlignPartitions) -> list[Sources]:
    """Lineage of the labels of the operands that Dask would align by index; empty if it won't."""
    frames = expr.args
    if len(frames) == 1 or expr.divisions[0] is not None or len(expr.divisions) == 2:
        return []
    return [partition_sources(frame, labels=True) for frame in frames]


def _same_rows(labels: Sequence[Sources]) -> bool:
    return labels[0] != "moved" and all(each == labels[0] for each in labels)


def _not_paired(labels: Sequence[Sources]) -> ArgumentError:
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
