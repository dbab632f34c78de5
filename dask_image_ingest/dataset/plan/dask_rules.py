"""Optimiser rules that Dask lacks. Each wraps a method of Dask and falls back to it.

Unused columns: ``len(ddf[mask])`` needs the index of a filtered frame, and Dask computes that frame
with all columns; nor does it push a projection below a ``query``. These rules apply only to frames
of this package's reads.

Masks of mixed dtypes: ``str.contains`` and the like return ``boolean``, comparisons of Arrow
columns ``bool[pyarrow]``. pandas (up to 3.1) computes ``arrow & boolean``, but ``boolean & arrow``
raises a TypeError if there is a null. Dask merges two filters into one mask, so users can't choose
the order. ``&``, ``|`` and ``^`` swap such operands, and cast the result to the dtype of the
unswapped operation. This happens in the client; workers need nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pandas as pd
import pyarrow as pa

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.plan.nodes import AppendsColumns, Read
from dask_image_ingest.dataset.plan.operators import (
    ELEMENTWISE,
    FEWER_ROWS,
    SAME_ROWS,
    is_row_wise_query,
)

# Operations below which a projection can be pushed correctly.
_PROJECTABLE = (Read, AppendsColumns, dx.Drop, *SAME_ROWS, *FEWER_ROWS, *ELEMENTWISE)

_dask_query_up = dx.Query._simplify_up
_dask_index_down = dx.Index._simplify_down


def install_rules() -> None:
    """Wrap Dask's rules for `Index`, `Query` and operations on masks."""
    _install_mask_rules()
    dx.Index._simplify_down = _simplify_index
    dx.Query._simplify_up = _simplify_query


class RowLabels(dx.Projection):
    """A frame without its columns.

    Not length-preserving, or rules would alternate forever: Dask replaces the length of a
    projection by that of its frame, and the length of a frame by that of its index.
    """

    _is_length_preserving = False


def _simplify_index(self: dx.Index) -> dx.Index | None:
    """``frame.index`` → ``frame[[]].index``, so that no column is computed for it."""
    frame = self.frame
    if frame.ndim < 2 or not len(frame.columns) or isinstance(frame, Read) or not _has_read(frame):
        return _dask_index_down(self)
    # Others may push projections wrongly: Dask's nlargest loses the column it sorts by.
    if not all(isinstance(node, _PROJECTABLE) for node in frame.walk()):
        return _dask_index_down(self)
    return dx.Index(RowLabels(frame, []))


def _simplify_query(self: dx.Query, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
    """Push a projection below a ``query``, with the columns that its text names."""
    text = self.operand("_expr")
    if not (isinstance(parent, dx.Projection) and is_row_wise_query(text) and _has_read(self)):
        return _dask_query_up(self, parent, dependents)
    named = [column for column in self.frame.columns if str(column) in text]
    wanted = dx.determine_column_projection(self, parent, dependents, named)
    wanted = wanted if isinstance(wanted, list) else [wanted]
    columns = [column for column in self.frame.columns if column in wanted]
    if columns == self.frame.columns:
        return None
    return type(parent)(dx.Query(self.frame[columns], *self.operands[1:]), *parent.operands[1:])


def _has_read(expr: dx.Expr) -> bool:
    """True for a frame of a read, unless the plan is already optimized (see `is_optimized`)."""
    nodes = list(expr.walk())
    fused = any(isinstance(node, dx.Fused) for node in nodes)
    return not fused and any(isinstance(node, Read) for node in nodes)


_ARROW = pd.ArrowDtype(pa.bool_())

_Rule: TypeAlias = Callable[[Any], dx.Expr | None]


def _install_mask_rules() -> None:
    """Swap operands of mixed dtypes, if this pandas needs it."""
    try:
        pd.array([True], "boolean") & pd.array([None], _ARROW)
    except TypeError:
        for operation in (dx.And, dx.Or, dx.XOr):
            operation._simplify_down = _arrow_first(operation._simplify_down)


def _arrow_first(simplify_down: _Rule) -> _Rule:
    """Add the swap before Dask's own rule."""

    def simplify_mask(self: dx.Binop) -> dx.Expr | None:
        left, right = _dtype(self.left), _dtype(self.right)
        if isinstance(left, pd.BooleanDtype) and right == _ARROW:
            return _MaskAsType(type(self)(self.right, self.left), left)
        return simplify_down(self)

    return simplify_mask


class _MaskAsType(dx.AsType):
    """The cast of a mask.

    No filter passes it: Dask would replace a frame filtered by an ``AsType`` by the filtered mask.
    """

    _filter_passthrough = False


def _dtype(operand: Any) -> Any:
    series = isinstance(operand, dx.Expr) and operand.ndim == 1
    return operand._meta.dtype if series else None
