"""Masks of pandas' two nullable booleans, put in the order in which pandas can combine them.

``str.contains`` and its kind give ``boolean``, comparisons of Arrow's numbers ``bool[pyarrow]``.
pandas (3.1 and older) combines the second with the first; the other way round it raises a TypeError
as soon as there is a null. Dask makes one mask of two filters, one after the other, so whoever
writes a query does not choose the order. ``&``, ``|`` and ``^`` give the same values both ways, so
their Dask expressions swap such operands and cast the mask to the dtype it has unswapped. Workers
need nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pandas as pd
import pyarrow as pa

from dask_image_ingest import dask_internals as dx

__all__ = ["install"]

_ARROW = pd.ArrowDtype(pa.bool_())

_Rule: TypeAlias = Callable[[Any], dx.Expr | None]


def install() -> None:
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
