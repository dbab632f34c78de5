"""Base classes of this package's expressions, and what the optimiser must know of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, TypeAlias

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.scheduler_plugin import prepare_scheduler_in_use


def is_optimized(expr: dx.Expr, dependents: Any) -> bool:
    """True if an expression must stay as it is, in a query that is optimised a second time.

    ``persist`` does that. Tasks that were fused the first time know the others by their names.
    """
    return any(isinstance(above(), dx.Fused) for above in dependents[expr._name])


#: The expressions that use each one, by its name.
Dependents: TypeAlias = Mapping[str, Collection[Any]]


def post_dominates(expr: dx.Expr, target: dx.Expr, dependents: Dependents) -> bool:
    """True if all that use ``expr`` use it through ``target``."""
    seen = {target._name}
    left = [expr]
    while left:
        node = left.pop()
        if node._name not in seen:
            seen.add(node._name)
            above = used_by(node, dependents)
            if not above:
                return False
            left += above
    return True


def is_dependent(parent: dx.Expr, expr: dx.Expr, dependents: Dependents) -> bool:
    """True if ``parent`` is among the known dependents of ``expr``.

    The optimiser looks for these before each of its rounds. What it makes within a round, such as
    the index of a filtered frame whose length is asked for, is among them from the next one on:
    only then is it known which columns others need of the same read.
    """
    return any(above._name == parent._name for above in used_by(expr, dependents))


def used_by(expr: dx.Expr, dependents: Dependents) -> list[dx.Expr]:
    """The known dependents of an expression."""
    above = (parent() for parent in dependents[expr._name])
    return [parent for parent in above if parent is not None]


class ImageNode(dx.Expr):
    """Base of this package's nodes; has the cluster prepared for their tasks before it gets any."""

    @property
    def step(self) -> str:
        """The name of its tasks on the dashboard: of letters alone, or Dask cuts it off."""
        name = type(self).__name__.lstrip("_")
        return name[0].lower() + name[1:]

    @functools.cached_property
    def _name(self) -> str:
        return f"{self.step}-{self.deterministic_token}"

    def _lower(self) -> dx.Expr | None:
        prepare_scheduler_in_use()
        return super()._lower()


class Read(ImageNode, dx.PartitionsFiltered, dx.BlockwiseIO):
    """Base of the expressions that read: some columns of some partitions of a source.

    The source is the first operand. It has ``meta``, an empty frame of all its columns,
    ``divisions`` as Dask has them, and ``lengths``: the rows of each partition, or None, also in
    place of some of them.
    """

    _parameters: ClassVar = ["source", "columns", "_partitions"]
    _defaults: ClassVar[dict[str, Any]] = {"columns": None, "_partitions": None}
    _absorb_projections = True

    @property
    def columns(self) -> list[Any]:
        """The columns that are read."""
        columns = self.operand("columns")
        return list(self.operands[0].meta.columns) if columns is None else list(columns)

    @functools.cached_property
    def _meta(self) -> Any:
        return self.operands[0].meta[self.columns]

    def _divisions(self) -> tuple[Any, ...]:
        # Of the partitions that are read: dask's Repartition asks for these, past `divisions`.
        whole, wanted = self.operands[0].divisions, self.operand("_partitions")
        if wanted is None:
            return tuple(whole)
        if any(number <= before for before, number in itertools.pairwise(wanted)):
            return (None,) * (len(wanted) + 1)
        return (*(whole[number] for number in wanted), whole[wanted[-1] + 1] if wanted else None)

    @functools.cached_property
    def divisions(self) -> tuple[Any, ...]:
        """Those of the partitions that are read."""
        return self._divisions()

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        if is_optimized(self, dependents):
            return None
        if isinstance(parent, dx.Len):
            return self._counted(parent)
        if isinstance(parent, dx.Index):
            if not is_dependent(parent, self, dependents):
                return None
            columns = dx.determine_column_projection(self, parent, dependents)
            columns = [columns] if isinstance(columns, str) else columns
            return self._with(parent, columns=[c for c in self.columns if c in columns])
        return super()._simplify_up(parent, dependents)

    @property
    def lengths(self) -> list[int | None]:
        """The rows of each partition that is read; None where that is not known."""
        lengths = self.operands[0].lengths
        return [None if lengths is None else lengths[number] for number in self._partitions]

    def _counted(self, parent: dx.Expr) -> dx.Expr | None:
        """The number of rows, for which partitions of a known length are not read."""
        known = [count for count in self.lengths if count is not None]
        if not known and self.npartitions:
            return self._with(parent, columns=[])
        if len(known) == self.npartitions:
            return dx.Literal(sum(known))
        counted = zip(self._partitions, self.lengths, strict=True)
        unknown = [number for number, count in counted if count is None]
        rest = self.substitute_parameters({"columns": [], "_partitions": unknown})
        return dx.Len(rest) + dx.Literal(sum(known))

    def _with(self, parent: dx.Expr, **operands: Any) -> dx.Expr | None:
        """``parent`` over a read with other operands; None where nothing would change."""
        if all(self.operand(name) == value for name, value in operands.items()):
            return None
        return type(parent)(self.substitute_parameters(operands), *parent.operands[1:])

    def __str__(self) -> str:
        given = ((name, self.operand(name)) for name in self._parameters[1:-1])
        told = "".join(f", {name}={value!r}" for name, value in given if value not in (None, False))
        return f"{type(self).__name__}({self.operands[0]}{told})"

    def _tree_repr_argument_construction(self, i: int, op: Any, header: str) -> str:
        if i == 0:
            return f"{header} {op}"
        return super()._tree_repr_argument_construction(i, op, header)


class AppendsColumns(ImageNode, dx.Blockwise):
    """Adds columns to ``frame``; filters and projections that need none of them go below it."""

    _filter_passthrough = True

    @property
    def added(self) -> frozenset[Any]:
        """The names of the columns."""
        raise NotImplementedError

    def _projected(self, parent: dx.Expr, wanted: set[Any]) -> dx.Expr | None:
        """``parent``, which needs the ``wanted`` columns alone, over less; None if it needs all."""
        raise NotImplementedError

    def _filter_passthrough_available(self, parent: dx.Expr, dependents: Any) -> bool:
        return super()._filter_passthrough_available(parent, dependents) and not looks_at(
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


def looks_at(predicate: dx.Expr, frame: dx.Expr, columns: frozenset[Any]) -> bool:
    """True if a predicate looks at some of these columns of ``frame``, or at all of it.

    Other expressions of its class count as well: the optimiser may have left out columns of
    ``frame`` in the predicate before it does so in the filtered frame.
    """
    if isinstance(predicate, type(frame)):
        return True
    if isinstance(predicate, dx.Projection) and predicate.frame._name == frame._name:
        return bool(columns.intersection(predicate.columns))
    return any(looks_at(part, frame, columns) for part in predicate.dependencies())


class PreservesRows(dx.Blockwise):
    """One row for each of ``frame``, in their order: heads and tails go below it.

    It is no ``Elemwise``: dask puts the tail of a lowered query below each of those as one that is
    not lowered, of which there are no tasks. ``d.fillna(0).repartition(npartitions=n).tail()``
    raises ``NotImplementedError`` where ``d`` has ``n`` partitions (Dask 2026.8).
    """

    _is_length_preserving = True

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        if isinstance(parent, dx.Head):
            return self._of(type(parent)(self.frame, *parent.operands[1:]))
        if isinstance(parent, dx.Tail):
            return self._of(self._last_rows(parent))
        return super()._simplify_up(parent, dependents)

    def _last_rows(self, tail: dx.Expr) -> dx.Expr:
        if isinstance(tail, dx.Blockwise):  # the query is lowered
            return LastRows(self.frame, tail.n)
        if next(self.frame.find_operations(dx.BaseSetIndexSortValues), None) is not None:
            return TailOfSorted(self.frame, tail.n)
        return _last_of_all(self.frame, tail.n)

    def _of(self, frame: dx.Expr) -> dx.Expr:
        return type(self)(frame, *self.operands[1:])


class MapColumns(AppendsColumns, PreservesRows):
    """Columns that a function makes of others, of each row by itself.

    ``function(frame, *operands)`` adds ``outputs`` to a partition, of which it looks at ``inputs``.
    Of an empty frame, and of None for an operand that is an expression, it makes an empty one.
    """

    _parameters: ClassVar = ["frame", "function", "outputs", "inputs"]

    @property
    def step(self) -> str:
        """The function's name."""
        first, *others = self.function.__name__.strip("_").split("_")
        return "".join([first, *map(str.capitalize, others)])

    @staticmethod
    def operation(frame: Any, function: Any, _outputs: Any, _inputs: Any, *operands: Any) -> Any:
        """Map one partition."""
        return function(frame, *operands)

    @functools.cached_property
    def _meta(self) -> Any:
        given = (None if isinstance(op, dx.Expr) else op for op in self.operands[4:])
        return self.function(self.frame._meta, *given)

    @property
    def added(self) -> frozenset[Any]:
        """The outputs."""
        return frozenset(self.outputs)

    def _projected(self, parent: dx.Expr, wanted: set[Any]) -> dx.Expr | None:
        if not wanted & self.added:
            return type(parent)(self.frame, *parent.operands[1:])
        wanted = (wanted - self.added).union(self.inputs)
        needed = [name for name in self.frame.columns if name in wanted]
        if needed == list(self.frame.columns):
            return None
        narrower = type(self)(self.frame[needed], *self.operands[1:])
        return type(parent)(narrower, *parent.operands[1:])


class TailOfSorted(dx.Tail):
    """A tail of which dask makes the last rows of all where it comes to a sort."""

    def _simplify_down(self) -> dx.Expr | None:
        if isinstance(self.frame, dx.Elemwise):
            below = [
                type(self)(each, self.n) if isinstance(each, dx.Expr) else each
                for each in self.frame.operands
            ]
            return type(self.frame)(*below)
        return None

    def _lower(self) -> dx.Expr:
        return _last_of_all(self.frame, self.n)


def _last_of_all(frame: dx.Expr, n: int) -> dx.Expr:
    return LastRows(dx.Partitions(frame, [frame.npartitions - 1]), n)


def _last_rows(frame: Any, n: int) -> Any:
    return frame.tail(n)


class LastRows(dx.Blockwise):
    """The last rows of each partition, which stay where they are when the query is lowered."""

    _parameters: ClassVar = ["frame", "n"]
    _projection_passthrough = True
    _preserves_partitioning_information = True
    operation = staticmethod(_last_rows)

    @functools.cached_property
    def _meta(self) -> Any:
        return self.frame._meta
