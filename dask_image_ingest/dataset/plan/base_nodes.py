"""Base classes of this package's expressions, and helpers of their optimiser rules."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.client import check_workers
from dask_image_ingest.dataset.predicates import Predicate, columns_of, holds
from dask_image_ingest.dataset.scan.partitioning import Partition
from dask_image_ingest.frames import backend_of
from dask_image_ingest.storage import Search
from dask_image_ingest.typedefs import DataFrame, Series


def is_optimized(expr: dx.Expr, dependents: Dependents) -> bool:
    """True below `Fused`: the plan is already optimized, and must stay as it is.

    ``persist`` optimizes such a plan again. Its fused tasks refer to others by name, so a rule that
    changes a name would break them.
    """
    return any(isinstance(above(), dx.Fused) for above in dependents[expr._name])


#: Name of an expression → weak references to its parents.
Dependents: TypeAlias = Mapping[str, list[Any]]


def post_dominates(expr: dx.Expr, target: dx.Expr, dependents: Dependents) -> bool:
    """True if every path from ``expr`` to the root of the query leads through ``target``."""
    seen = {target._name}
    stack = [expr]
    while stack:
        node = stack.pop()
        if node._name not in seen:
            seen.add(node._name)
            parents = used_by(node, dependents)
            if not parents:
                return False
            stack += parents
    return True


def is_dependent(parent: dx.Expr, expr: dx.Expr, dependents: Dependents) -> bool:
    """True if ``parent`` is among the known dependents of ``expr``.

    The optimiser collects dependents before each pass. An expression that it creates within a pass
    (such as the `Index` of a filtered frame, for ``len``) is missing until the next one, and before
    that the columns that others need of the same read can't be determined.
    """
    return any(dependent._name == parent._name for dependent in used_by(expr, dependents))


def used_by(expr: dx.Expr, dependents: Dependents) -> list[dx.Expr]:
    """The known dependents of an expression."""
    parents = (reference() for reference in dependents[expr._name])
    return [parent for parent in parents if parent is not None]


def _unchanged(mask: dx.Expr) -> dx.Expr:
    return mask


class _TakesAnyMask(dx.Expr):
    def __getitem__(self, other: object) -> dx.Expr:
        """Columns, or rows by a mask: ``ddf[mask]``."""
        return filtered(self, other) if isinstance(other, dx.Expr) else super().__getitem__(other)

    def _simplify_up(self, parent: dx.Expr, dependents: Dependents) -> dx.Expr | None:
        side_by_side = _SIDE_BY_SIDE.get(type(parent))
        if side_by_side is not None:
            sources = [partition_sources(frame, original=True) for frame in parent.args]
            if sources[0] is not None and all(source == sources[0] for source in sources):
                return side_by_side(*parent.operands)
        return super()._simplify_up(parent, dependents)


class ImageNode(_TakesAnyMask):
    """Base of this package's expressions; checks the workers before their tasks are made."""

    @property
    def step(self) -> str:
        """Name of the tasks on the dashboard. Letters only: Dask cuts it at anything else."""
        name = type(self).__name__.lstrip("_")
        return name[0].lower() + name[1:]

    @functools.cached_property
    def _name(self) -> str:
        return f"{self.step}-{self.deterministic_token}"

    def _lower(self) -> dx.Expr | None:
        check_workers()
        return super()._lower()


class Condition(dx.Elemwise):
    """A mask as it is.

    Dask would push the filter below a mask that ends in a cast or a name, and take the mask for the
    filtered frame (dask#12172).
    """

    _parameters: ClassVar = ["frame"]
    operation = staticmethod(_unchanged)


class Filter(_TakesAnyMask, dx.Filter):
    """Dask's filter, whose rows can be filtered by any mask, too."""

    def _simplify_up(self, parent: dx.Expr, dependents: Dependents) -> dx.Expr | None:
        simplified = super()._simplify_up(parent, dependents)
        if simplified is not None and type(simplified) is dx.Filter:
            return filtered(*simplified.operands)
        return simplified


def filtered(frame: dx.Expr, mask: dx.Expr) -> Filter:
    """``frame[mask]``, whatever the mask ends with, and for operands of mixed dtypes."""
    mask = _arrow_first(mask)
    return Filter(frame, Condition(mask) if mask._filter_passthrough else mask)


_ARROW = pd.ArrowDtype(pa.bool_())


def _arrow_first(mask: dx.Expr) -> dx.Expr:
    """A mask whose operands of dtype ``bool[pyarrow]`` stand left of those of ``boolean``.

    pandas (up to 3.1) computes ``arrow & boolean``, but ``boolean & arrow`` raises a TypeError if
    there is a null. Dask makes one mask of two filters, so that users can't choose the order.
    """
    if not isinstance(mask, (dx.And, dx.Or, dx.XOr)):
        return mask
    left, right = map(_arrow_first, mask.operands)
    if isinstance(_dtype(left), pd.BooleanDtype) and _dtype(right) == _ARROW:
        left, right = right, left
    return type(mask)(left, right)


def _dtype(operand: object) -> Any:
    return operand._meta.dtype if isinstance(operand, dx.Expr) and operand.ndim == 1 else None


#: Whether another part of the query needs the rows of an expression, too.
IsShared: TypeAlias = Callable[[dx.Expr], bool]


def never(_: dx.Expr) -> bool:
    """The default of `IsShared`."""
    return False


class TakesFilters(ImageNode):
    """Base of expressions below which, or into which, a filter of their rows may go."""

    def filtered_by(self, mask: dx.Expr, is_shared: IsShared = never) -> dx.Expr:
        """The rows by a mask over this expression, the filter as far below as it may run.

        At once, through all expressions of this package: if it went down step by step, projections
        would narrow some expressions and not others meanwhile, and images were decoded twice.
        """
        raise NotImplementedError

    def _filter_passthrough_available(self, parent: dx.Expr, dependents: Dependents) -> bool:
        # A rule of Dask's filter asks for it, too: projections then wait.
        return self._take_filter(parent, dependents) is not None

    def _take_filter(self, parent: dx.Filter, dependents: Dependents) -> dx.Expr | None:
        if (
            is_optimized(self, dependents)
            or parent.frame._name != self._name
            or not dx.is_filter_pushdown_available(self, parent, dependents)
        ):
            return None
        inside = {node._name for node in parent.walk()}

        def is_shared(node: dx.Expr) -> bool:
            return any(user._name not in inside for user in used_by(node, dependents))

        taken = self.filtered_by(parent.predicate, is_shared)
        return None if taken._name == parent._name else taken

    def _simplify_up(self, parent: dx.Expr, dependents: Dependents) -> dx.Expr | None:
        if isinstance(parent, dx.Filter):
            if parent.frame._name != self._name or is_optimized(self, dependents):
                return None
            same = filtered(self, parent.predicate)
            return self._take_filter(parent, dependents) if same._name == parent._name else same
        return super()._simplify_up(parent, dependents)


def keep_rows(frame: dx.Expr, mask: dx.Expr, is_shared: IsShared) -> dx.Expr:
    """``frame[mask]``, the filter as far below ``frame`` as it may run."""
    if isinstance(frame, TakesFilters) and not is_shared(frame):
        return frame.filtered_by(mask, is_shared)
    return filtered(frame, mask)


class Read(ImageNode, dx.PartitionsFiltered, dx.BlockwiseIO):
    """Base of the expressions that read columns and partitions of a source, the first operand.

    A source has ``meta``, an empty frame of all its columns, ``divisions`` as in Dask,
    ``partitions``: what each is read from, and ``lengths``: the rows of each partition (None for an
    unknown one), or None.
    """

    _parameters: ClassVar = ["source", "columns", "_partitions"]
    _defaults: ClassVar[dict[str, Any]] = {"columns": None, "_partitions": None}
    _absorb_projections = True

    @property
    def files_read(self) -> Iterable[str]:
        """Paths and URLs of the files that are read."""
        raise NotImplementedError

    @property
    def searches(self) -> Iterable[Search]:
        """The folders and globs where they were found."""
        raise NotImplementedError

    @property
    def sources(self) -> tuple[Partition, ...]:
        """The splits that each partition is read from."""
        return tuple(self.operands[0].partitions[number] for number in self._partitions)

    @property
    def original_sources(self) -> tuple[Partition, ...]:
        """The same, for the stored results of a query those that it read."""
        return self.sources

    @property
    def columns(self) -> list[Any]:
        """The columns that are read."""
        columns = self.operand("columns")
        return list(self.operands[0].meta.columns) if columns is None else list(columns)

    @functools.cached_property
    def _meta(self) -> DataFrame:
        return self.operands[0].meta[self.columns]

    def _divisions(self) -> tuple[Any, ...]:
        # Of the selected partitions: Dask's Repartition calls this method, not ``divisions``.
        divisions, selected = self.operands[0].divisions, self.operand("_partitions")
        if selected is None:
            return tuple(divisions)
        if any(number <= before for before, number in itertools.pairwise(selected)):
            return (None,) * (len(selected) + 1)
        last = divisions[selected[-1] + 1] if selected else None
        return (*(divisions[number] for number in selected), last)

    @functools.cached_property
    def divisions(self) -> tuple[Any, ...]:
        """Divisions of the selected partitions."""
        return self._divisions()

    def _simplify_up(self, parent: dx.Expr, dependents: Dependents) -> dx.Expr | None:
        if is_optimized(self, dependents):
            return None
        if isinstance(parent, dx.Len):
            return self._push_len(parent)
        if isinstance(parent, dx.Index):
            if not is_dependent(parent, self, dependents):
                return None
            columns = dx.determine_column_projection(self, parent, dependents)
            columns = [columns] if isinstance(columns, str) else columns
            return self._replace_operands(parent, columns=[c for c in self.columns if c in columns])
        return super()._simplify_up(parent, dependents)

    @property
    def lengths(self) -> list[int | None]:
        """The rows of each selected partition; None if unknown."""
        lengths = self.operands[0].lengths
        return [None if lengths is None else lengths[number] for number in self._partitions]

    @property
    def counted(self) -> list[int | None]:
        """The same, with what requests tell faster than tasks would."""
        return self.lengths

    def _push_len(self, parent: dx.Expr) -> dx.Expr | None:
        """Count rows without columns, and read only partitions whose length is unknown."""
        # A read without columns is what this rule has made, after it has asked for those unknown.
        counted = self.counted if self.columns else self.lengths
        known = [length for length in counted if length is not None]
        if not known and self.npartitions:
            return self._replace_operands(parent, columns=[])
        if len(known) == self.npartitions:
            return dx.Literal(sum(known))
        unknown = [n for n, length in zip(self._partitions, counted, strict=True) if length is None]
        to_count = self.substitute_parameters({"columns": [], "_partitions": unknown})
        return dx.Len(to_count) + dx.Literal(sum(known))

    def _replace_operands(self, parent: dx.Expr, **operands: Any) -> dx.Expr | None:
        """``parent`` over this read with other operands; None if nothing would change."""
        if all(self.operand(name) == value for name, value in operands.items()):
            return None
        return type(parent)(self.substitute_parameters(operands), *parent.operands[1:])

    def __str__(self) -> str:
        operands = ((name, self.operand(name)) for name in self._parameters[1:-1])
        shown = [
            f", {name}={value!r}"
            for name, value in operands
            if value not in (None, False) and not isinstance(value, type)
        ]
        return f"{type(self).__name__}({self.operands[0]}{''.join(shown)})"

    def _tree_repr_argument_construction(self, i: int, op: object, header: str) -> str:
        if i == 0:
            return f"{header} {op}"
        if isinstance(op, type):  # the kind of scan, which the source names
            return header
        return super()._tree_repr_argument_construction(i, op, header)


class KeepsResults(Read):
    """Base of expressions that read the stored results of a query."""

    @property
    def made_of(self) -> dx.Expr:
        """The query whose results they are."""
        raise NotImplementedError


class PreservesRows(dx.Blockwise):
    """Base of expressions with the rows of ``frame``, in order: heads and tails go below.

    Not an ``Elemwise``: into the operands of those Dask puts heads and tails, also of scalars.
    """

    _is_length_preserving = True

    def _simplify_up(self, parent: dx.Expr, dependents: Dependents) -> dx.Expr | None:
        if isinstance(parent, dx.Tail):
            return self._over(_tail(self.frame, parent))
        if isinstance(parent, dx.Head):
            return self._over(type(parent)(self.frame, *parent.operands[1:]))
        return super()._simplify_up(parent, dependents)

    def _over(self, frame: dx.Expr) -> dx.Expr | None:
        """The same of other rows; None if they can't be replaced."""
        return type(self)(frame, *self.operands[1:])


def _tail(frame: dx.Expr, tail: dx.Tail) -> dx.Expr:
    if isinstance(tail, dx.Blockwise):  # the query is lowered
        return LastRows(frame, tail.n)
    if next(frame.find_operations(dx.BaseSetIndexSortValues), None) is not None:
        return dx.Tail(frame, tail.n)  # of which Dask makes an `NLast` of all rows
    return LastRows(dx.Partitions(frame, [frame.npartitions - 1]), tail.n)


def _last_rows(frame: DataFrame, n: int) -> DataFrame:
    return frame.tail(n)


class LastRows(dx.Blockwise):
    """The last rows of each partition.

    Dask's own goes into the operands of an ``Elemwise`` after lowering, and then has no tasks.
    """

    _parameters: ClassVar = ["frame", "n"]
    _projection_passthrough = True
    _preserves_partitioning_information = True
    operation = staticmethod(_last_rows)

    @functools.cached_property
    def _meta(self) -> DataFrame:
        return self.frame._meta


def partition_sources(expr: dx.Expr, original: bool = False) -> tuple[Partition, ...] | None:
    """The splits that each partition of a query is computed from; None if unknown.

    With ``original``, those of a checkpoint are the splits that its query read.
    """
    return _sources(expr, original, {})


_Sources: TypeAlias = tuple[Partition, ...] | None


def _sources(expr: dx.Expr, original: bool, known: dict[str, _Sources]) -> _Sources:
    if expr._name not in known:
        known[expr._name] = _find_sources(expr, original, known)
    return known[expr._name]


def _find_sources(expr: dx.Expr, original: bool, known: dict[str, _Sources]) -> _Sources:
    if isinstance(expr, Read):
        return expr.original_sources if original else expr.sources
    if isinstance(expr, dx.Partitions):
        sources = _sources(expr.frame, original, known)
        return None if sources is None else tuple(sources[number] for number in expr.partitions)
    if not isinstance(expr, (dx.Blockwise, SideBySide)):
        return None
    # A scalar, such as the values of ``isin``, comes from no partition.
    below = [_sources(frame, original, known) for frame in expr.dependencies() if frame.ndim]
    return below[0] if below and all(source == below[0] for source in below) else None


def shard_of_partition(expr: dx.Expr, number: int) -> str | None:
    """The shard that a partition is read from; None if unknown, or if there are several."""
    sources = partition_sources(expr, original=True)
    return None if sources is None or len(sources[number]) > 1 else sources[number][0].url


class SideBySide(ImageNode):
    """An operation on two frames whose partitions are read from the same splits.

    Dask would move all rows of both to pair them by their labels.
    """

    def _lower(self) -> dx.Expr:
        check_workers()
        return self._expr_cls(*self.operands)

    def _simplify_up(self, parent: dx.Expr, dependents: Dependents) -> dx.Expr | None:
        if isinstance(parent, dx.Tail):
            return _tail(self, parent)
        return super()._simplify_up(parent, dependents)


class FilterSideBySide(SideBySide, dx.FilterAlign):
    """``frame[mask]``, of a mask of another frame."""


class AssignSideBySide(SideBySide, dx.AssignAlign):
    """``frame.assign(column=value)``, of a value of another frame."""


_SIDE_BY_SIDE = {dx.FilterAlign: FilterSideBySide, dx.AssignAlign: AssignSideBySide}


def _filter_rows(frame: DataFrame, predicate: Predicate) -> DataFrame:
    table = backend_of(frame).to_arrow(frame[sorted(columns_of(predicate))])
    return frame.iloc[np.flatnonzero(holds(predicate, table))]


class FilterRows(ImageNode, dx.Blockwise):
    """Filters rows by a predicate, as a scan does, where no scan has all of its columns."""

    _parameters: ClassVar = ["frame", "predicate"]
    _preserves_partitioning_information = True
    operation = staticmethod(_filter_rows)

    @functools.cached_property
    def _meta(self) -> DataFrame:
        return self.frame._meta

    def _simplify_up(self, parent: dx.Expr, dependents: Dependents) -> dx.Expr | None:
        if isinstance(parent, dx.Projection) and not is_optimized(self, dependents):
            needed = sorted(columns_of(self.predicate))
            return dx.plain_column_projection(self, parent, dependents, needed)
        return None


def _mask_of_rows(frame: DataFrame, positions: np.ndarray) -> Series:
    mask = backend_of(frame).numpy.zeros(len(frame), bool)
    mask[positions] = True
    return type(frame)({"kept": mask}, index=frame.index)["kept"]


class RowsAt(ImageNode, dx.Blockwise):
    """Mask of the rows at some positions: ``positions`` has an array for each partition.

    Below operations that keep all rows it is the same mask, and below those that drop some it is
    not: it is not row-wise.
    """

    _parameters: ClassVar = ["frame", "positions"]
    operation = staticmethod(_mask_of_rows)

    @functools.cached_property
    def _meta(self) -> DataFrame:
        return _mask_of_rows(self.frame._meta, np.empty(0, np.int64))

    def _blockwise_arg(self, arg: object, i: int) -> Any:
        return arg[i] if isinstance(arg, tuple) else super()._blockwise_arg(arg, i)
