"""Rules that Dask lacks, installed where each calls the one that was there.

Columns that nobody asks for: ``len(ddf[mask])`` asks for the index of a filtered frame, and Dask
makes that frame with all its columns; below the text of a ``query`` it moves no projection. These
rules are for frames of this package's reads; others stay as Dask has them.

Masks of both of pandas' nullable booleans: ``str.contains`` and its kind give ``boolean``,
comparisons of Arrow's numbers ``bool[pyarrow]``. pandas (3.1 and older) combines the second with
the first; the other way round it raises a TypeError as soon as there is a null. Dask makes one mask
of two filters, so whoever writes a query does not choose the order. ``&``, ``|`` and ``^`` swap
such operands and cast the mask to the dtype it has unswapped. Workers need nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pandas as pd
import pyarrow as pa

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.plan.nodes import AppendsColumns, Read
from dask_image_ingest.dataset.plan.operators import (
    FEWER_ROWS,
    ROW_BY_ROW,
    SAME_ROWS,
    is_row_by_row,
)

# What makes rows of rows below which projections go.
_KNOWN = (Read, AppendsColumns, dx.Drop, *SAME_ROWS, *FEWER_ROWS, *ROW_BY_ROW)

_simplify_up = dx.Query._simplify_up
_simplify_down = dx.Index._simplify_down


def install_rules() -> None:
    """Have Dask's expressions ask for fewer columns, and combine masks of both booleans."""
    _install_masks()
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
    if frame.ndim < 2 or not len(frame.columns) or isinstance(frame, Read) or not _has_read(frame):
        return _simplify_down(self)
    # Others may have no rule for a projection, or a wrong one: nlargest forgets by what it sorts.
    if not all(isinstance(each, _KNOWN) for each in frame.walk()):
        return _simplify_down(self)
    return dx.Index(RowLabels(frame, []))


def _of_named_columns(self: dx.Query, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
    text = self.operand("_expr")
    if not (isinstance(parent, dx.Projection) and is_row_by_row(text) and _has_read(self)):
        return _simplify_up(self, parent, dependents)
    named = [column for column in self.frame.columns if str(column) in text]
    wanted = dx.determine_column_projection(self, parent, dependents, named)
    wanted = wanted if isinstance(wanted, list) else [wanted]
    columns = [column for column in self.frame.columns if column in wanted]
    if columns == self.frame.columns:
        return None
    return type(parent)(dx.Query(self.frame[columns], *self.operands[1:]), *parent.operands[1:])


def _has_read(expr: dx.Expr) -> bool:
    """True for a frame of a read; not in a plan that is optimised for a second time.

    That stays as it is: tasks know each other by their names.
    """
    below = list(expr.walk())
    fused = any(isinstance(each, dx.Fused) for each in below)
    return not fused and any(isinstance(each, Read) for each in below)


_ARROW = pd.ArrowDtype(pa.bool_())

_Rule: TypeAlias = Callable[[Any], dx.Expr | None]


def _install_masks() -> None:
    """Have Dask's expressions swap them, if this pandas needs it."""
    try:
        pd.array([True], "boolean") & pd.array([None], _ARROW)
    except TypeError:
        for operation in (dx.And, dx.Or, dx.XOr):
            operation._simplify_down = _arrow_first(operation._simplify_down)


def _arrow_first(simplify_down: _Rule) -> _Rule:
    """Dask's own rule, and before it the one that swaps."""

    def swapped(self: dx.Binop) -> dx.Expr | None:
        left, right = _dtype(self.left), _dtype(self.right)
        if isinstance(left, pd.BooleanDtype) and right == _ARROW:
            return _MaskAsType(type(self)(self.right, self.left), left)
        return simplify_down(self)

    return swapped


class _MaskAsType(dx.AsType):
    """A mask of another dtype.

    Of a frame filtered by an ``AsType``, Dask makes the mask filtered by it, in the frame's place.
    """

    _filter_passthrough = False


def _dtype(operand: Any) -> Any:
    series = isinstance(operand, dx.Expr) and operand.ndim == 1
    return operand._meta.dtype if series else None
