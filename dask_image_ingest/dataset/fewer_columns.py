"""Columns that nobody asks for are not read: projections that Dask does not make or move.

``len(ddf[mask])`` asks for the index of a filtered frame. Dask makes the frame with all its columns
for that, or moves the index below the filter, which the read then can't take up. And below the text
of a ``query`` it moves no projection.

Both rules are for frames that read shards; others stay as Dask has them.
"""

from __future__ import annotations

from typing import Any

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.movable import is_row_by_row

__all__ = ["install"]

# Columns for which no image is looked at.
_CHEAP = ("nbytes", "offset", "__key__", "__url__")

_simplify_up = dx.Query._simplify_up


def install() -> None:
    """Have Dask's expressions ask for fewer columns."""
    dx.Index._simplify_down = _of_few_columns
    dx.Query._simplify_up = _of_named_columns


class RowLabels(dx.Projection):
    """The rows of a frame, with as few columns as can be.

    Dask takes the length of a projection for that of its frame, and the length of a frame for that
    of its index: it would come back to where it was.
    """

    _is_length_preserving = False


def _of_few_columns(self: dx.Index) -> dx.Index | None:
    frame = self.frame
    if frame.ndim < 2 or _is_read(frame) or not _reads_shards(frame):
        return None
    kept: list[str] = []
    if next(frame.find_operations(dx.Concat), None) is not None:
        # Dask leaves out frames of which no column is wanted, and fails if none is left.
        kept = [column for column in _CHEAP if column in frame.columns][:1]
        if not kept:
            return None
    if len(frame.columns) <= len(kept):
        return None
    return dx.Index(RowLabels(frame, kept))


def _of_named_columns(self: dx.Query, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
    text = self.operand("_expr")
    if not (isinstance(parent, dx.Projection) and is_row_by_row(text) and _reads_shards(self)):
        return _simplify_up(self, parent, dependents)
    if _is_read(self.frame) and self.frame.takes_up(self, dependents):
        return None  # the read asks for no column of the text then
    named = [column for column in self.frame.columns if str(column) in text]
    wanted = dx.determine_column_projection(self, parent, dependents, named)
    wanted = wanted if isinstance(wanted, list) else [wanted]
    columns = [column for column in self.frame.columns if column in wanted]
    if columns == self.frame.columns:
        return None
    return type(parent)(dx.Query(self.frame[columns], *self.operands[1:]), *parent.operands[1:])


def _reads_shards(expr: dx.Expr) -> bool:
    """Whether shards are read below; not so in a plan that is optimised for a second time.

    That stays as it is: tasks know each other by their names.
    """
    below = list(expr.walk())
    return any(map(_is_read, below)) and not any(isinstance(each, dx.Fused) for each in below)


def _is_read(expr: dx.Expr) -> bool:
    return hasattr(type(expr), "takes_up")
