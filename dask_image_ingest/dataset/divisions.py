"""Into which partitions a sort falls."""

from __future__ import annotations

from dask_image_ingest import dask_internals as dx

__all__ = ["copy_divisions"]


def copy_divisions(expr: dx.BaseSetIndexSortValues, other: dx.BaseSetIndexSortValues) -> None:
    """Have ``other``, which sorts the same rows, fall into the partitions of ``expr``.

    Dask draws divisions from a sample of the rows, whose seed is the name of the sorted frame.
    """
    if not _draws_divisions(expr):
        return
    if isinstance(expr, dx.SortValues):
        column, its = expr.frame[expr.by[0]], other.frame[other.by[0]]
        ascending = expr._divisions_ascending
    else:
        column, its, ascending = expr.other, other.other, expr.ascending
    partitions, upsample = expr._npartitions_input, expr.upsample
    found = dx._get_divisions(expr.frame, column, partitions, ascending, upsample=upsample)
    dx.divisions_lru[(its._name, partitions, ascending, 128e6, upsample)] = found


def _draws_divisions(expr: dx.BaseSetIndexSortValues) -> bool:
    """Whether a sort's divisions are drawn from a sample of its rows."""
    if isinstance(expr, dx.SetIndex) and expr.operand("user_divisions") is not None:
        return False
    return bool(expr._npartitions_input > 1 and expr.frame.npartitions > 1)
