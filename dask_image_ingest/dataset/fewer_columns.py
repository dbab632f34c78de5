"""Columns that nobody asks for are not read: projections that Dask does not make or move.

``len(ddf[mask])`` asks for the index of a filtered frame. Dask makes the frame with all its columns
for that, or moves the index below the filter, which the read then can't take up. And below the text
of a ``query`` it moves no projection.

Both rules are for frames that read shards; others stay as Dask has them.
"""

from __future__ import annotations

from typing import Any

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.adds_columns import AddsColumns
from dask_image_ingest.dataset.movable import FEWER_ROWS, ROW_BY_ROW, SAME_ROWS, is_row_by_row

__all__ = ["install"]

# What makes rows of rows below which projections go.
_KNOWN = (AddsColumns, *SAME_ROWS, *FEWER_ROWS, *ROW_BY_ROW)

_simplify_up = dx.Query._simplify_up
_simplify_down = dx.Index._simplify_down


def install() -> None:
    """Have Dask's expressions ask for fewer columns."""
    dx.Index._simplify_down = _of_no_columns
    dx.Query._simplify_up = _of_named_columns


class RowLabels(dx.Projection):
    """The rows of a frame, without columns.

    Dask takes the length of a projection for that of its frame, and the length of a frame for that
    of its index: it would come back to where it was.
    """

    _is_length_preserving = False


def _of_no_columns(self: dx.Index) -> dx.Index | None:
    frame = self.frame
    if frame.ndim < 2 or not len(frame.columns) or _is_read(frame) or not _reads_shards(frame):
        return _simplify_down(self)
    # Others may have no rule for a projection, or a wrong one: nlargest forgets by what it sorts.
    if not all(isinstance(each, _KNOWN) or _is_read(each) for each in frame.walk()):
        return _simplify_down(self)
    return dx.Index(RowLabels(frame, []))


def _of_named_columns(self: dx.Query, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
    text = self.operand("_expr")
    if not (isinstance(parent, dx.Projection) and is_row_by_row(text) and _reads_shards(self)):
        return _simplify_up(self, parent, dependents)
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
    return hasattr(type(expr), "reads_shards")
