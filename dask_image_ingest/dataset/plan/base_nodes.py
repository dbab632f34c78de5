"""Base classes of this package's expressions, and helpers of their optimiser rules."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeAlias

import numpy as np

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.client import check_workers
from dask_image_ingest.dataset.predicates import Predicate, columns_of, holds
from dask_image_ingest.dataset.scan.partitioning import Partition
from dask_image_ingest.frames import backend_of
from dask_image_ingest.storage import Search


def is_optimized(expr: dx.Expr, dependents: Any) -> bool:
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


class ImageNode(dx.Expr):
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
    def label_sources(self) -> tuple[Partition, ...] | None:
        """The splits whose labels each partition has, `unversioned`; None if no label repeats."""
        raise NotImplementedError

    @property
    def columns(self) -> list[Any]:
        """The columns that are read."""
        columns = self.operand("columns")
        return list(self.operands[0].meta.columns) if columns is None else list(columns)

    @functools.cached_property
    def _meta(self) -> Any:
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

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
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

    def _push_len(self, parent: dx.Expr) -> dx.Expr | None:
        """Count rows without columns, and read only partitions whose length is unknown."""
        known = [length for length in self.lengths if length is not None]
        if not known and self.npartitions:
            return self._replace_operands(parent, columns=[])
        if len(known) == self.npartitions:
            return dx.Literal(sum(known))
        lengths = zip(self._partitions, self.lengths, strict=True)
        unknown = [number for number, length in lengths if length is None]
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

    def _tree_repr_argument_construction(self, i: int, op: Any, header: str) -> str:
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

    Not an ``Elemwise``: below those Dask puts the tail of a lowered query without lowering it, and
    it has no tasks. So ``d.fillna(0).repartition(npartitions=n).tail()`` raises
    ``NotImplementedError`` if ``d`` has ``n`` partitions (Dask 2026.8).
    """

    _is_length_preserving = True

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        if isinstance(parent, dx.Head):
            return self._over(type(parent)(self.frame, *parent.operands[1:]))
        if isinstance(parent, dx.Tail):
            return self._over(self._last_rows(parent))
        return super()._simplify_up(parent, dependents)

    def _last_rows(self, tail: dx.Expr) -> dx.Expr:
        if isinstance(tail, dx.Blockwise):  # the query is lowered
            return LastRows(self.frame, tail.n)
        if next(self.frame.find_operations(dx.BaseSetIndexSortValues), None) is not None:
            return TailOfSorted(self.frame, tail.n)
        return _last_partition_tail(self.frame, tail.n)

    def _over(self, frame: dx.Expr) -> dx.Expr:
        return type(self)(frame, *self.operands[1:])


def _filter_rows(frame: Any, predicate: Predicate) -> Any:
    table = backend_of(frame).to_arrow(frame[sorted(columns_of(predicate))])
    return frame.iloc[np.flatnonzero(holds(predicate, table))]


class FilterRows(ImageNode, dx.Blockwise):
    """Filters rows by a predicate, as a scan does, where no scan has all of its columns."""

    _parameters: ClassVar = ["frame", "predicate"]
    _preserves_partitioning_information = True
    operation = staticmethod(_filter_rows)

    @functools.cached_property
    def _meta(self) -> Any:
        return self.frame._meta

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        if isinstance(parent, dx.Projection) and not is_optimized(self, dependents):
            needed = sorted(columns_of(self.predicate))
            return dx.plain_column_projection(self, parent, dependents, needed)
        return None


def _kept_by_text(frame: Any, text: str) -> Any:
    numbered = frame.reset_index(drop=True)
    mask = backend_of(frame).numpy.zeros(len(frame), bool)
    mask[numbered.query(text).index.values] = True
    return type(frame)({"kept": mask}, index=frame.index)["kept"]


class QueryMask(ImageNode, dx.Blockwise):
    """Mask of the rows that a row-wise text of ``query`` keeps."""

    _parameters: ClassVar = ["frame", "text"]
    operation = staticmethod(_kept_by_text)


class TotalQueryMask(QueryMask):
    """The mask of a text that raises for no row."""


def _mask_of_rows(frame: Any, positions: Any) -> Any:
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
    def _meta(self) -> Any:
        return _mask_of_rows(self.frame._meta, np.empty(0, np.int64))

    def _blockwise_arg(self, arg: Any, i: int) -> Any:
        return arg[i] if isinstance(arg, tuple) else super()._blockwise_arg(arg, i)


class TailOfSorted(dx.Tail):
    """A tail above a sort, of which Dask makes an ``NLast`` of all rows where it can.

    Where it can't, the tail of the last partition.
    """

    def _simplify_down(self) -> dx.Expr | None:
        if isinstance(self.frame, dx.Elemwise):
            below = [
                type(self)(each, self.n) if isinstance(each, dx.Expr) else each
                for each in self.frame.operands
            ]
            return type(self.frame)(*below)
        return None

    def _lower(self) -> dx.Expr:
        return _last_partition_tail(self.frame, self.n)


def _last_partition_tail(frame: dx.Expr, n: int) -> dx.Expr:
    return LastRows(dx.Partitions(frame, [frame.npartitions - 1]), n)


def _last_rows(frame: Any, n: int) -> Any:
    return frame.tail(n)


class LastRows(dx.Blockwise):
    """The last rows of each partition. Unlike Dask's own tail, lowering leaves it in place."""

    _parameters: ClassVar = ["frame", "n"]
    _projection_passthrough = True
    _preserves_partitioning_information = True
    operation = staticmethod(_last_rows)

    @functools.cached_property
    def _meta(self) -> Any:
        return self.frame._meta
