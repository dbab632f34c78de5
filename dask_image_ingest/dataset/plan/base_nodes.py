"""Base classes of this package's expressions, and helpers of their optimiser rules."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, TypeAlias

import numpy as np

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.predicates import Predicate, columns_of, holds
from dask_image_ingest.dataset.scan.partitioning import Partition
from dask_image_ingest.frames import backend_of
from dask_image_ingest.scheduler_plugin import check_cluster_in_use
from dask_image_ingest.storage import Search


def is_optimized(expr: dx.Expr, dependents: Any) -> bool:
    """True below `Fused`: the plan is already optimized, and must stay as it is.

    ``persist`` optimizes such a plan again. Its fused tasks refer to others by name, so a rule that
    changes a name would break them.
    """
    return any(isinstance(above(), dx.Fused) for above in dependents[expr._name])


#: Name of an expression → weak references to its parents.
Dependents: TypeAlias = Mapping[str, Collection[Any]]


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
    """Base of this package's expressions; prepares the scheduler before their tasks are made."""

    @property
    def step(self) -> str:
        """Name of the tasks on the dashboard. Letters only: Dask cuts it at anything else."""
        name = type(self).__name__.lstrip("_")
        return name[0].lower() + name[1:]

    @functools.cached_property
    def _name(self) -> str:
        return f"{self.step}-{self.deterministic_token}"

    def _lower(self) -> dx.Expr | None:
        check_cluster_in_use()
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


class AppendsColumns(ImageNode, dx.Blockwise):
    """Base of expressions that append columns; filters and projections without them go below."""

    _filter_passthrough = True

    @property
    def added(self) -> frozenset[Any]:
        """The names of the appended columns."""
        raise NotImplementedError

    def _projected(self, parent: dx.Expr, wanted: set[Any]) -> dx.Expr | None:
        """``parent`` over a narrower node, with the ``wanted`` columns; None if that is all."""
        raise NotImplementedError

    def _filter_passthrough_available(self, parent: dx.Expr, dependents: Any) -> bool:
        return super()._filter_passthrough_available(parent, dependents) and not uses_columns(
            parent.predicate, self, self.added
        )

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        if is_optimized(self, dependents):
            return None
        if isinstance(parent, dx.Filter) and self._filter_passthrough_available(parent, dependents):
            return self._filter_simplification(parent)
        if isinstance(parent, (dx.Projection, dx.Index)):
            wanted = dx.determine_column_projection(self, parent, dependents)
            return self._projected(parent, set(wanted) if isinstance(wanted, list) else {wanted})
        return super()._simplify_up(parent, dependents)


def uses_columns(predicate: dx.Expr, frame: dx.Expr, columns: frozenset[Any]) -> bool:
    """True if a predicate uses some of these columns of ``frame``, or ``frame`` as a whole.

    Any expression of the same class counts as ``frame``: the optimiser may have narrowed it in the
    predicate, and not yet in the filtered frame.
    """
    if isinstance(predicate, type(frame)):
        return True
    if isinstance(predicate, dx.Projection) and predicate.frame._name == frame._name:
        return bool(columns.intersection(predicate.columns))
    return any(uses_columns(part, frame, columns) for part in predicate.dependencies())


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
    def operation(frame: Any, function: Any, _outputs: Any, _inputs: Any, *operands: Any) -> Any:
        """Apply the function to one partition."""
        return function(frame, *operands)

    @functools.cached_property
    def _meta(self) -> Any:
        operands = (None if isinstance(op, dx.Expr) else op for op in self.operands[4:])
        return self.function(self.frame._meta, *operands)

    @property
    def added(self) -> frozenset[Any]:
        """The outputs."""
        return frozenset(self.outputs)

    def _projected(self, parent: dx.Expr, wanted: set[Any]) -> dx.Expr | None:
        if not wanted & self.added:
            return type(parent)(self.frame, *parent.operands[1:])
        # All outputs stay: the function computes them together.
        wanted = (wanted - self.added).union(self.inputs)
        needed = [name for name in self.frame.columns if name in wanted]
        if needed == list(self.frame.columns):
            return None
        narrower = type(self)(self.frame[needed], *self.operands[1:])
        return type(parent)(narrower, *parent.operands[1:])


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
