"""Patches of Dask's optimiser rules that give wrong answers or raise.

Each wraps a method of Dask and falls back to it. They apply only to frames with expressions of
this package, and to persisted frames, whose query is gone.

Filters: Dask pushes a filter through operations such as ``astype`` and ``rename``, and takes the
mask of ``ddf[mask.astype(bool)]`` for the filtered frame (dask#12172). It also applies a predicate
to values before an ``astype`` instead of those after it, and to labels before a ``reset_index``.
These rules, and that of ``nlargest``, apply to all frames: where references come from a frame of
Dask's own, the decode rises above the operation, and nothing of this package is left below.

They also stop at columns that are assigned; `filter_first` moves them below those from pixels.

Heads and tails: Dask pushes them into the operands of ``ddf.width / ddf.width.mean()``, and a
scalar has none, which raises. So this rule applies to all frames, too.

Projections: Dask's ``nlargest`` and the head of sorted rows lose the column they sort by.
Operations with a value for each column, such as ``fillna({"cls": 0})``, get a series instead of a
frame. Below a ``query`` nothing is projected, so that all members of the samples are read.

Lengths: ``len(ddf[one][other])`` needs the index of a filtered frame, and Dask narrows the scan of
the index apart from that of the masks, so that each shard is walked twice.

Partitions: ``ddf.partitions[1:]`` of one partition raises, or has rows of the first.

Masks of mixed dtypes: ``str.contains`` and the like return ``boolean``, comparisons of Arrow
columns ``bool[pyarrow]``. pandas (up to 3.1) computes ``arrow & boolean``, but ``boolean & arrow``
raises a TypeError if there is a null. Dask merges two filters into one mask, so users can't choose
the order. ``&``, ``|`` and ``^`` swap such operands, and cast the result to the dtype of the
unswapped operation. This happens in the client; workers need nothing.

Stored images, references and nested values: ``dd.read_parquet(filesystem="arrow")`` takes dtypes of
its meta from the metadata of pandas, which its tasks ignore. They would give dicts and lists.

Locks of Python 3.11, where a cached property of an expression has one lock for all objects: a query
that computes within one, as ``repartition(partition_size=)`` does for ``divisions``, waited forever
for a scheduler in the same process, which needs ``divisions`` of others. Later versions of Python
have no such locks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pandas as pd
import pyarrow as pa

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.plan.base_nodes import ImageNode, Read, is_dependent
from dask_image_ingest.dataset.plan.computed_columns import (
    FILTERS,
    AppendsColumns,
    filter_first,
    will_move,
)
from dask_image_ingest.dataset.plan.operators import (
    CHANGES,
    COLUMNS_USED,
    ELEMENTWISE,
    FEWER_ROWS,
    SAME_ROWS,
)

# Operations below which a projection without columns can be pushed.
_PROJECTABLE = (Read, AppendsColumns, dx.Drop, *SAME_ROWS, *FEWER_ROWS, *ELEMENTWISE)

# Operations below which filters go, if columns below them are computed.
_FILTERED_FIRST = (*SAME_ROWS, *CHANGES, dx.Drop, dx.Index)

_dask_passthrough = dx.Expr._filter_passthrough_available
_dask_filter_below_cast = dx.AsType._filter_simplification
_dask_index_down = dx.Index._simplify_down
_dask_partition_divisions = dx.Partitions._divisions
_dask_partitions_down = dx.Partitions._simplify_down


def install_patches() -> None:
    """Wrap Dask's rules for filters, projections, and operations on masks; remove its locks."""
    dx.Expr._filter_passthrough_available = _filter_passthrough_available
    dx.AsType._filter_simplification = _push_filter_below_cast
    for kind in (dx.Blockwise, dx.DropnaFrame, dx.NLargest):
        kind._simplify_up = _projects_frames(kind._simplify_up)
    for kind in _FILTERED_FIRST:
        kind._simplify_up = _filters_first(kind._simplify_up)
    for kind in (dx.Head, dx.Tail):
        kind._simplify_down = _spares_scalars(kind._simplify_down)
    dx.Index._simplify_down = _simplify_index
    dx.Partitions._divisions = _partition_divisions
    dx.Partitions._simplify_down = _simplify_partitions
    _install_mask_rules()
    dx.ReadParquetPyarrowFS.arrow_to_pandas = property(_with_own_types)
    _unlock_cached_properties(dx.Expr)


def _filter_passthrough_available(self: dx.Expr, parent: dx.Expr, dependents: Any) -> bool:
    """False if ``self`` is the mask of a filter, or if the mask uses labels that it changes."""
    is_mask = parent.frame._name != self._name
    relabels = isinstance(self, dx.ResetIndex) and any(
        isinstance(node, dx.Index) and node.frame._name == self._name
        for node in parent.predicate.walk()
    )
    if is_mask or relabels:
        return False
    if isinstance(self, (*_FILTERED_FIRST, *FILTERS)) and will_move(parent, dependents):
        return True
    return bool(_dask_passthrough(self, parent, dependents))


def _push_filter_below_cast(
    self: dx.AsType, parent: dx.Expr, predicate: dx.Expr | None = None
) -> dx.Expr | None:
    """Push a filter below a cast; its mask still uses the values after it."""
    mask = parent.predicate if predicate is None else predicate
    return _dask_filter_below_cast(self, parent, mask)


_RuleUp: TypeAlias = Callable[[Any, Any, Any], dx.Expr | None]
_RuleDown: TypeAlias = Callable[[Any], dx.Expr | None]


def _filters_first(simplify_up: _RuleUp) -> _RuleUp:
    """Filter before computed columns, if the filter uses none of them."""

    def filter_rows(self: Any, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        first = filter_first(self, parent, dependents) if isinstance(parent, FILTERS) else None
        return simplify_up(self, parent, dependents) if first is None else first

    return filter_rows


def _spares_scalars(simplify_down: _RuleDown) -> _RuleDown:
    """Push a head or tail into the operands of an operation, except scalars, which have none."""

    def push_below(self: Any) -> dx.Expr | None:
        below = self.frame
        if not isinstance(below, dx.Elemwise) or all(op.ndim for op in below.dependencies()):
            return simplify_down(self)
        return type(below)(
            *(
                type(self)(op, *self.operands[1:]) if isinstance(op, dx.Expr) and op.ndim else op
                for op in below.operands
            )
        )

    return push_below


def _projects_frames(simplify_up: _RuleUp) -> _RuleUp:
    """Push projections as frames, together with the columns that the operation uses."""

    def push_projection(self: Any, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        used: Any = None
        if isinstance(self, FILTERS) and will_move(self, dependents):
            return None  # projections would block it
        if isinstance(self, (dx.NLargest, dx.Query)):
            if isinstance(parent, dx.Projection) or (
                isinstance(parent, dx.Index) and is_dependent(parent, self, dependents)
            ):
                used = COLUMNS_USED[type(self)](self)
        elif self._projection_passthrough and isinstance(parent, dx.Projection):
            used = []
        applies = isinstance(self, dx.NLargest) or _is_ours(self)
        if used is None or self.ndim < 2 or not applies:
            return simplify_up(self, parent, dependents)
        wanted = dx.determine_column_projection(self, parent, dependents, list(used))
        wanted = wanted if isinstance(wanted, list) else [wanted]
        columns = [column for column in self.frame.columns if column in wanted]
        if columns == self.frame.columns:
            return None
        return type(parent)(
            type(self)(self.frame[columns], *self.operands[1:]), *parent.operands[1:]
        )

    return push_projection


class _RowLabels(dx.Projection):
    """A frame without its columns.

    Not length-preserving, or rules would alternate forever: Dask replaces the length of a
    projection by that of its frame, and the length of a frame by that of its index.
    """

    _is_length_preserving = False


def _simplify_index(self: dx.Index) -> dx.Index | None:
    """``frame.index`` → ``frame[[]].index``, so that one scan serves it and the masks."""
    frame = self.frame
    if frame.ndim < 2 or not len(frame.columns) or isinstance(frame, Read) or not _is_ours(frame):
        return _dask_index_down(self)
    if not all(isinstance(node, _PROJECTABLE) for node in _with_rows(frame)):
        return _dask_index_down(self)
    return dx.Index(_RowLabels(frame, []))


def _with_rows(expr: dx.Expr) -> Iterator[dx.Expr]:
    """The expressions below a frame, without aggregates."""
    seen: set[str] = set()
    stack = [expr]
    while stack:
        node = stack.pop()
        if node.ndim and node._name not in seen:
            seen.add(node._name)
            stack += node.dependencies()
            yield node


def _partition_divisions(self: dx.Partitions) -> tuple[Any, ...]:
    return (None, None) if _is_empty(self) else tuple(_dask_partition_divisions(self))


def _simplify_partitions(self: dx.Partitions) -> dx.Expr | None:
    """No partitions are one without rows."""
    return dx.LocEmpty(self._meta, None) if _is_empty(self) else _dask_partitions_down(self)


def _is_empty(partitions: dx.Partitions) -> bool:
    return not len(partitions.partitions) and _is_ours(partitions)


def _is_ours(expr: dx.Expr) -> bool:
    """True for a query with our expressions or a persisted frame, unless it is optimized."""
    nodes = list(expr.walk())
    fused = any(isinstance(node, dx.Fused) for node in nodes)
    return not fused and any(isinstance(node, (ImageNode, dx.FromGraph)) for node in nodes)


def _with_own_types(self: dx.ReadParquetPyarrowFS) -> dict[str, Any] | None:
    """Options of `pyarrow.Table.to_pandas`, with the dtypes of nested values that the meta has."""
    options: dict[str, Any] | None = self.operand("arrow_to_pandas")
    dtypes = [dtype for dtype in self._meta.dtypes if isinstance(dtype, pd.ArrowDtype)]
    own = {t: dtype for dtype in dtypes if pa.types.is_nested(t := dtype.pyarrow_dtype)}
    if not own:
        return options
    theirs = (options or {}).get("types_mapper")
    return {**(options or {}), "types_mapper": functools.partial(_mapped, own, theirs)}


def _mapped(own: dict[pa.DataType, Any], theirs: Any, type_: pa.DataType) -> Any:
    return own.get(type_) or (theirs and theirs(type_))


_ARROW = pd.ArrowDtype(pa.bool_())


def _install_mask_rules() -> None:
    """Swap operands of mixed dtypes, if this pandas needs it."""
    try:
        pd.array([True], "boolean") & pd.array([None], _ARROW)
    except TypeError:
        for operation in (dx.And, dx.Or, dx.XOr):
            operation._simplify_down = _arrow_first(operation._simplify_down)


def _arrow_first(simplify_down: _RuleDown) -> _RuleDown:
    """Add the swap before Dask's own rule."""

    def simplify_mask(self: dx.Binop) -> dx.Expr | None:
        left, right = _dtype(self.left), _dtype(self.right)
        if isinstance(left, pd.BooleanDtype) and right == _ARROW and _is_ours(self):
            return dx.AsType(type(self)(self.right, self.left), left)
        return simplify_down(self)

    return simplify_mask


def _dtype(operand: Any) -> Any:
    series = isinstance(operand, dx.Expr) and operand.ndim == 1
    return operand._meta.dtype if series else None


def _unlock_cached_properties(kind: type[dx.Expr]) -> None:
    for value in vars(kind).values():
        if isinstance(value, functools.cached_property):
            value.lock = contextlib.nullcontext()  # type: ignore[attr-defined]
    for narrower in kind.__subclasses__():
        _unlock_cached_properties(narrower)
