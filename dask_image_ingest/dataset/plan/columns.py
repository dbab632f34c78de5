"""Computed columns, below which filters and projections go; the operations behind each column."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.plan.base_nodes import (
    Dependents,
    ImageNode,
    IsShared,
    KeepsResults,
    PreservesRows,
    TakesFilters,
    filtered,
    is_optimized,
    keep_rows,
    never,
)
from dask_image_ingest.dataset.plan.operations import (
    CHANGES,
    RENAMES,
    SELECTS_ROWS,
    columns_changed,
    conjuncts,
    is_row_wise,
    is_total,
    over_rows,
)
from dask_image_ingest.typedefs import AnyFrame, AnySeries, DataFrame

# Operations of Dask that fail, or lose the columns that they sort by, if a projection goes below.
# One that leaves out the other frame of an alignment has its rows in other partitions.
_BADLY_PROJECTED = (dx.Fillna, dx.MaybeAlignPartitions, dx.NLargest, dx.Replace, dx.Round)


class AppendsColumns(TakesFilters, dx.Blockwise):
    """Base of expressions that append columns."""

    @property
    def added(self) -> frozenset[Any]:
        """The names of the appended columns."""
        raise NotImplementedError

    def _projected(self, parent: dx.Expr, wanted: set[Hashable]) -> dx.Expr | None:
        """``parent`` over a narrower node, with the ``wanted`` columns; None if that is all."""
        raise NotImplementedError

    def _over(self, frame: dx.Expr) -> dx.Expr | None:
        """The same over some rows of ``frame``; None if they can't be replaced."""
        return type(self)(frame, *self.operands[1:])

    def filtered_by(self, mask: dx.Expr, is_shared: IsShared = never) -> dx.Expr:
        """The rows by a mask, whose conjuncts run below if they use no appended column."""
        below, above = self._place(mask)
        if below:
            on_frame = functools.reduce(dx.And, below).substitute(self, self.frame)
            if dx.are_co_aligned(self.frame, on_frame):
                rows = self._over(keep_rows(self.frame, on_frame, is_shared))
                if rows is not None:
                    return rows if not above else filtered(rows, self._mask_of(above, rows))
        return filtered(self, mask)

    def _place(self, mask: dx.Expr) -> tuple[list[dx.Expr], list[dx.Expr]]:
        """The conjuncts of a mask that run below, and those that run above."""
        if not uses_columns(mask, self, self.added):
            return [mask], []
        rows = (self._name, self.frame._name)
        below, above = [], []
        for part in conjuncts(mask):
            if not uses_columns(part, self, self.added) and is_total(part, rows):
                below.append(part)
            elif is_row_wise(part, rows):
                above.append(part)
            else:
                return [], []
        return below, above

    def _mask_of(self, parts: Sequence[dx.Expr], rows: dx.Expr) -> dx.Expr:
        """The conjunction of ``parts`` of a mask, over ``rows`` in place of this expression."""
        return over_rows(functools.reduce(dx.And, parts), (self._name, self.frame._name), rows)

    def _simplify_up(self, parent: dx.Expr, dependents: Dependents) -> dx.Expr | None:
        if is_optimized(self, dependents):
            return None
        if isinstance(parent, (dx.Projection, dx.Index)):
            if is_badly_projected(self.frame):
                return None
            wanted = dx.determine_column_projection(self, parent, dependents)
            return self._projected(parent, set(wanted) if isinstance(wanted, list) else {wanted})
        if isinstance(parent, dx.Loc) and parent.frame._name == self._name:
            mask = parent.iindexer  # of `loc[mask]`, which is a filter
            is_mask = isinstance(mask, dx.Expr) and parent.cindexer is None
            return filtered(self, mask) if is_mask else None
        return super()._simplify_up(parent, dependents)


def is_badly_projected(frame: dx.Expr) -> bool:
    """True if a projection of Dask's may reach an operation that it does not fit."""
    sorts = heads = False
    for node in frame.walk():
        if isinstance(node, _BADLY_PROJECTED) and node.ndim == 2:
            return True
        heads = heads or isinstance(node, (dx.Head, dx.Tail))
        sorts = sorts or isinstance(node, dx.SortValues)
    return heads and sorts  # of which Dask makes an `NFirst` or `NLast`


class Columns(ImageNode, dx.Blockwise):
    """Columns of a frame below which Dask would push a projection wrongly."""

    _parameters: ClassVar = ["frame", "columns"]
    _is_length_preserving = True
    _preserves_partitioning_information = True
    operation = staticmethod(operator.getitem)


def select_columns(frame: AnyFrame, columns: Iterable[Hashable]) -> AnyFrame:
    """``frame[columns]``, for functions of this package, after which users may do anything."""
    columns = list(columns)
    if not isinstance(frame, dx.FrameBase) or not is_badly_projected(frame.expr):
        return frame[columns]
    return dx.new_collection(Columns(frame.expr, columns))


def uses_columns(predicate: dx.Expr, frame: dx.Expr, columns: frozenset[Hashable]) -> bool:
    """True if a predicate uses some of these columns of ``frame``, or ``frame`` as a whole.

    Any expression of the same class counts as ``frame``: the optimiser may have narrowed it in the
    predicate, and not yet in the filtered frame.
    """
    if isinstance(predicate, type(frame)):
        return True
    if isinstance(predicate, dx.Projection) and predicate.frame._name == frame._name:
        return bool(columns.intersection(predicate.columns))
    return any(uses_columns(part, frame, columns) for part in predicate.dependencies())


class MapColumns(AppendsColumns, PreservesRows):
    """Appends columns that a row-wise function computes from others.

    Attributes
    ----------
    function
        ``function(frame, *operands)`` returns a partition with the outputs appended. For the meta
        it is called with an empty frame, and None for each operand that is an expression.
    outputs, inputs
        The columns that it appends, and those that it uses.
    """

    _parameters: ClassVar = ["frame", "function", "outputs", "inputs"]

    @property
    def step(self) -> str:
        """The function's name, in camel case."""
        first, *others = self.function.__name__.strip("_").split("_")
        return "".join([first, *map(str.capitalize, others)])

    @staticmethod
    def operation(
        frame: DataFrame,
        function: Callable[..., Any],
        _outputs: object,
        _inputs: object,
        *operands: Any,
    ) -> DataFrame:
        """Apply the function to one partition."""
        return function(frame, *operands)

    @functools.cached_property
    def _meta(self) -> DataFrame:
        operands = (None if isinstance(op, dx.Expr) else op for op in self.operands[4:])
        return self.function(self.frame._meta, *operands)

    @property
    def added(self) -> frozenset[Any]:
        """The outputs."""
        return frozenset(self.outputs)

    def _projected(self, parent: dx.Expr, wanted: set[Hashable]) -> dx.Expr | None:
        if not wanted & self.added:
            return type(parent)(self.frame, *parent.operands[1:])
        # All outputs stay: the function computes them together.
        wanted = (wanted - self.added).union(self.inputs)
        needed = [name for name in self.frame.columns if name in wanted]
        if needed == list(self.frame.columns):
            return None
        narrower = type(self)(self.frame[needed], *self.operands[1:])
        return type(parent)(narrower, *parent.operands[1:])


class AssignColumns(AppendsColumns, PreservesRows):
    """Assigns columns that this package computes from others: ``frame.assign``.

    Filters go below, also those that use columns of ``names``: their values are computed once more,
    of columns below. Aggregates in the values stay those of all rows.
    """

    _parameters: ClassVar = ["frame", "names"]
    names: tuple[str, ...]

    @staticmethod
    def operation(frame: DataFrame, names: tuple[str, ...], *values: Any) -> DataFrame:
        """Assign the values to one partition."""
        return frame.assign(**dict(zip(names, values, strict=True)))

    @functools.cached_property
    def values(self) -> dict[str, dx.Expr]:
        """The value of each name, over ``frame``."""
        return dict(zip(self.names, self.operands[2:], strict=True))

    @property
    def added(self) -> frozenset[Any]:
        """The assigned columns."""
        return frozenset(self.names)

    def filtered_by(self, mask: dx.Expr, is_shared: IsShared = never) -> dx.Expr:
        """The rows by a mask, if it goes below ``frame``, too."""
        on_frame = self._on_frame(mask)
        if on_frame is not None and dx.are_co_aligned(self.frame, on_frame):
            kept = keep_rows(self.frame, on_frame, is_shared)
            rows = self._over(kept)
            if rows is not None and kept._name != filtered(self.frame, on_frame)._name:
                return rows
        return filtered(self, mask)

    def _on_frame(self, mask: dx.Expr) -> dx.Expr | None:
        """A mask of columns of ``frame``; None if it uses all columns together."""
        if mask._name == self._name:
            return None
        if isinstance(mask, dx.Projection) and mask.frame._name == self._name:
            if mask.ndim == 1:
                column = mask.columns[0]
                return self.values.get(column, dx.Projection(self.frame, column))
            used = self.added.intersection(mask.columns)
            return None if used else dx.Projection(self.frame, mask.columns)
        operands = []
        for operand in mask.operands:
            new = self._on_frame(operand) if isinstance(operand, dx.Expr) else operand
            if new is None and operand is not None:
                return None
            operands.append(new)
        return type(mask)(*operands)

    def _over(self, frame: dx.Expr) -> dx.Expr | None:
        rows = [self.frame._name]
        values = self.operands[2:]
        if not all(is_row_wise(value, rows) for value in values):
            return None
        return type(self)(frame, self.names, *(over_rows(value, rows, frame) for value in values))

    def _projected(self, parent: dx.Expr, wanted: set[Hashable]) -> dx.Expr | None:
        names = tuple(name for name in self.names if name in wanted)
        if not names:
            return type(parent)(self.frame, *parent.operands[1:])
        needed = [name for name in self.frame.columns if name in wanted.difference(names)]
        if names == self.names and needed == list(self.frame.columns):
            return None
        values = [self.values[name] for name in names]
        return type(parent)(type(self)(self.frame[needed], names, *values), *parent.operands[1:])


def assign_columns(frame: AnyFrame, columns: Mapping[str, AnySeries]) -> AnyFrame:
    """``frame.assign(**columns)``; of a lazy frame, one below which filters go."""
    if not isinstance(frame, dx.FrameBase):
        return frame.assign(**columns)
    values = [column.expr for column in columns.values()]
    return dx.new_collection(AssignColumns(frame.expr, tuple(columns), *values))


Names: TypeAlias = tuple[Any, ...]

#: An expression that made or changed the values of some columns, and their names there.
Change: TypeAlias = tuple[Any, Names]


def backtrack(expr: dx.Expr, columns: Names) -> Iterator[list[Change]]:
    """Trace the values of some columns back to their origins.

    An operation that is not known, such as a user's function, may change values. A merge that
    combines the columns from different rows changes them, too; where one side of a merge has no
    row, the columns are null, except two keys at most.

    Yields
    ------
    list of (expression, columns)
        For each origin, the expressions that made or changed the values, the last one first; those
        of a checkpoint's query after the checkpoint.
    """
    operands = _unchanged(expr, columns)
    for operand in operands:
        yield from backtrack(*operand)
    if operands:
        return
    below = expr.made_of if isinstance(expr, KeepsResults) else getattr(expr, "frame", None)
    known = isinstance(below, dx.Expr) and {*columns} <= {*below.columns}
    for changes in backtrack(below, columns) if known else [[]]:
        yield [(expr, columns), *changes]


def value_sources(expr: dx.Expr, columns: Names) -> Iterator[Change]:
    """The last expressions that made or changed values, also where their results were stored."""
    for changes in backtrack(expr, columns):
        yield next(change for change in changes if not isinstance(change[0], KeepsResults))


def _unchanged(expr: dx.Expr, columns: Names) -> list[Change]:
    """Operands from which each row's values of the columns come; empty if ``expr`` changes them."""
    names = list(expr.columns)
    if any(names.count(column) != 1 for column in columns):
        return []
    if isinstance(expr, AppendsColumns):
        return [] if expr.added.intersection(columns) else [(expr.frame, columns)]
    if isinstance(expr, SELECTS_ROWS) and expr.dependencies():
        return [(expr.frame, columns)]
    if type(expr) in CHANGES:
        changed = columns_changed(expr)
        kept = changed is not None and not {*changed}.intersection(columns)
        return [(expr.frame, columns)] if kept else []
    if isinstance(expr, RENAMES):
        return [(expr.frame, tuple(expr.frame.columns[names.index(name)] for name in columns))]
    if isinstance(expr, dx.Assign):
        return _assigned(expr, columns)
    if isinstance(expr, dx.Concat):
        present = [(frame, set(columns).intersection(frame.columns)) for frame in expr._frames]
        # A frame without the columns contributes nulls, which are no images.
        all_or_none = all(not names or len(names) == len(columns) for _, names in present)
        return [(frame, columns) for frame, names in present if names] if all_or_none else []
    if isinstance(expr, dx.Merge):
        for side in ("left", "right"):
            names_before = tuple(_name_before(expr, side, column) for column in columns)
            if None not in names_before and _is_null_without_row(expr, side, columns):
                return [(getattr(expr, side), names_before)]
    return []


def _assigned(expr: dx.Assign, columns: Names) -> list[Change]:
    values = dict(zip(expr.keys, expr.vals, strict=True))
    if not values.keys() & set(columns):
        return [(expr.frame, columns)]
    value = values.get(columns[0])
    # Of several columns, the others come from other rows.
    if len(columns) > 1 or not isinstance(value, dx.Expr):
        return []
    series = value.ndim == 1 and len(value.columns) == 1
    return [(value, (value.columns[0],))] if series else []


def _name_before(merge: dx.Merge, side: str, column: Hashable) -> Any | None:
    """The name that a merge's column has on one side; None if it comes from the other side."""
    own, other, suffix = merge.left.columns, merge.right.columns, merge.suffixes[0]
    if side == "right":
        own, other, suffix = other, own, merge.suffixes[1]
    keys = _shared_keys(merge)
    if column in own and column not in other:
        return column
    if column in keys:
        return column
    name = str(column).removesuffix(suffix) if suffix else column
    in_both = name in own and name in other and name not in keys
    return name if in_both and (name != column or not suffix) else None


def _is_null_without_row(merge: dx.Merge, side: str, columns: Names) -> bool:
    """True if one of the columns is null wherever that side of a merge has no row.

    Keys then have the values of the other side. One null among the three columns that locate an
    image is enough.
    """
    return merge.how in ("inner", side) or len(_shared_keys(merge).intersection(columns)) < 3


def _shared_keys(merge: dx.Merge) -> set[Any]:
    """Keys with the same name on both sides, which become one column."""
    sides = [on if isinstance(on, list) else [on] for on in (merge.left_on, merge.right_on)]
    pairs = zip(*sides, strict=False)
    return {one for one, other in pairs if isinstance(one, str) and one == other}
