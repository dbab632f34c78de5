"""Expressions that append computed columns, and the filters that run before them.

A filter that uses none of these columns goes below all row-wise operations at once: to the frame
from whose rows they are computed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import dask

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.plan.base_nodes import (
    Dependents,
    ImageNode,
    PreservesRows,
    QueryMask,
    Read,
    RowsAt,
    TotalQueryMask,
    is_optimized,
    used_by,
)
from dask_image_ingest.dataset.plan.operators import (
    COLUMNS_CHANGED,
    COLUMNS_USED,
    ELEMENTWISE,
    RENAMES,
    SAME_ROWS,
    text_conjuncts,
)
from dask_image_ingest.dataset.plan.pushdown import conjuncts, is_row_wise, is_total


class AppendsColumns(ImageNode, dx.Blockwise):
    """Base of expressions that append columns; filters and projections without them go below."""

    #: True if it decides itself where a filter above it runs.
    places_filters: ClassVar[bool] = False

    @property
    def added(self) -> frozenset[Any]:
        """The names of the appended columns."""
        raise NotImplementedError

    def _projected(self, parent: dx.Expr, wanted: set[Any]) -> dx.Expr | None:
        """``parent`` over a narrower node, with the ``wanted`` columns; None if that is all."""
        raise NotImplementedError

    def filtered_by(self, mask: dx.Expr) -> dx.Expr:
        """The frame filtered, as far below this expression as the filter may run."""
        return dx.Filter(self, mask)

    def _filter_passthrough_available(self, parent: dx.Expr, dependents: Any) -> bool:
        return parent.frame._name == self._name and will_move(parent, dependents)

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        if is_optimized(self, dependents):
            return None
        if isinstance(parent, FILTERS):
            return filter_first(self, parent, dependents)
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


#: Operations that keep rows by their values.
FILTERS = (dx.Filter, dx.Loc, dx.DropnaFrame, dx.Query)

# Operations that compute each row from that row of their operands, or from its position.
_ROW_WISE = (*SAME_ROWS, *RENAMES, *ELEMENTWISE, RowsAt, dx.Drop, dx.Index, dx._DeepCopy)


def filter_first(top: dx.Expr, parent: dx.Expr, dependents: Dependents) -> dx.Expr | None:
    """Filter before columns are computed that the filter does not use; None if it stays.

    ``parent`` filters ``top``. All operations from ``top`` down to the frame with these rows, the
    *foot*, are repeated over the filtered foot. A column of ``top`` that is computed from columns
    of the foot, such as ``ddf.width / ddf.height``, is computed once more for the filter.

    ===========================================================  =============================
    part of the filter                                           runs
    ===========================================================  =============================
    the whole, if it uses no column that a function appends      at the foot
    a conjunct that uses none either, and raises for no row      at the foot
    another conjunct, if it is row-wise                          above
    another: an aggregate, another frame                         above, with all others
    ===========================================================  =============================
    """
    if parent.frame._name != top._name:
        return None
    moved = _moved(parent, dependents)
    if moved is not None:
        _replace_dependents(parent, moved, dependents)
    return moved


def _moved(parent: dx.Expr, dependents: Dependents) -> dx.Expr | None:
    top = parent.frame
    if is_optimized(top, dependents):
        return None
    mask = _mask_of(parent) if _RowWiseTree.of(top).compute_columns else None
    if mask is None:
        return None
    late = dask.config.get("image-ingest.decode-late", True)
    found = (
        _RowWiseTree.of(top, mask, through_decodes=through) for through in (False, True)[: 1 + late]
    )
    tree = next((each for each in found if each.foot is not None), None)
    if tree is None or tree.are_shared(parent, dependents):
        return None
    try:
        below, above = tree.place(mask)
        on_foot = functools.reduce(dx.And, below)
        if not dx.are_co_aligned(tree.foot, on_foot):
            return None
        filtered = _filtered(tree.foot, on_foot)
        computes = any(isinstance(node, AppendsColumns) for node in tree.nodes.values())
        if not computes and filtered._name == dx.Filter(tree.foot, on_foot)._name:
            return None  # it would stay above the decode, where projections go below it again
        result = tree.over(filtered, top)
        if above:
            result = dx.Filter(result, tree.over(filtered, functools.reduce(dx.And, above)))
    except _NotMovableError:
        # As a mask it can be joined with other filters, one of which may move.
        return None if isinstance(parent, dx.Filter) else dx.Filter(top, mask)
    return result


def will_move(parent: dx.Expr, dependents: Dependents) -> bool:
    """True if a filter goes below computed columns, now or after another filter below it."""
    top = parent.frame
    if _moved(parent, dependents) is not None:
        return True
    feet = [top] if isinstance(top, FILTERS) else _RowWiseTree.of(top).feet.values()
    return any(isinstance(foot, FILTERS) and will_move(foot, dependents) for foot in feet)


def _filtered(frame: dx.Expr, mask: dx.Expr) -> dx.Expr:
    """A filtered frame, the filter below its decode if possible.

    At once: before the next pass of the optimiser, projections could go below the filter, each with
    other columns, and the decode would have several filters.
    """
    if isinstance(frame, dx.Filter) and is_total(mask, [frame._name]):
        below = frame.frame
        return _filtered(below, dx.And(frame.predicate, mask.substitute(frame, below)))
    if isinstance(frame, AppendsColumns):
        return frame.filtered_by(mask)
    return dx.Filter(frame, mask)


def _replace_dependents(old: dx.Expr, new: dx.Expr, dependents: Dependents) -> None:
    """Tell the pass of the optimiser, which has collected dependents, of a replaced expression.

    Otherwise operations that are gone would block the next filter, and projections would not know
    of those that are new.
    """
    nodes = {node._name: node for node in new.walk()}
    gone = {old._name}
    rest = {node._name: node for node in old.walk() if node._name not in nodes}
    while unused := [
        name
        for name, node in rest.items()
        if name == old._name or all(user._name in gone for user in used_by(node, dependents))
    ]:
        for name in unused:
            gone.add(name)
            for operand in rest.pop(name).dependencies():
                users = dependents[operand._name]
                users[:] = [each for each in users if each() is None or each()._name != name]
    for node in nodes.values():
        for operand in node.dependencies():
            if all(user._name != node._name for user in used_by(operand, dependents)):
                dependents[operand._name].append(weakref.ref(node))


def _mask_of(parent: dx.Expr) -> dx.Expr | None:
    """The rows that one of `FILTERS` keeps, as a mask; None if it has another way."""
    if isinstance(parent, dx.Filter):
        return parent.predicate
    if isinstance(parent, dx.Loc):
        mask = parent.iindexer
        return mask if isinstance(mask, dx.Expr) and parent.cindexer is None else None
    if isinstance(parent, dx.DropnaFrame):
        columns = list(COLUMNS_USED[dx.DropnaFrame](parent) or ())
        given = (parent.operand("how"), parent.operand("thresh"))
        if not columns or given not in ((dx.no_default, dx.no_default), ("any", dx.no_default)):
            return None
        return functools.reduce(dx.And, (dx.NotNull(parent.frame[name]) for name in columns))
    if not isinstance(parent, dx.Query) or parent.operand("expr_kwargs"):
        return None  # also of frames whose rows Dask has to pair first
    texts = text_conjuncts(parent.operand("_expr"))
    if texts is None or not all({*each.names} <= {*parent.frame.columns} for each in texts):
        return None
    masks = (
        (TotalQueryMask if each.is_total else QueryMask)(
            dx.Projection(parent.frame, list(each.names)), each.text
        )
        for each in texts
    )
    return functools.reduce(dx.And, masks)


class _NotMovableError(Exception):
    """An expression uses computed columns, or an operation whose rows are not known."""


@dataclass(frozen=True)
class _RowWiseTree:
    """Row-wise operations by name, and the frames from whose rows they are computed."""

    nodes: Mapping[str, dx.Expr]
    feet: Mapping[str, dx.Expr]

    @classmethod
    def of(cls, *tops: dx.Expr, through_decodes: bool = False) -> _RowWiseTree:
        """The operations below ``tops``."""
        nodes: dict[str, dx.Expr] = {}
        feet: dict[str, dx.Expr] = {}
        stack = list(tops)
        while stack:
            node = stack.pop()
            if node._name in nodes or not node.ndim:
                continue
            appends = (
                isinstance(node, AppendsColumns)
                and (through_decodes or not node.places_filters)
                and node._is_length_preserving
            )
            if appends or isinstance(node, _ROW_WISE):
                nodes[node._name] = node
                stack += _row_operands(node)
            else:
                feet[node._name] = node
        return cls(nodes, feet)

    @functools.cached_property
    def foot(self) -> dx.Expr | None:
        """The frame with all rows; None if there are several, or no operation above it."""
        first, *others = self.feet.values()
        if not others:
            return first if self.nodes else None
        # The optimiser has narrowed a read by what different operations use of it.
        if not all(isinstance(foot, Read) for foot in self.feet.values()):
            return None
        used = {name for foot in self.feet.values() for name in foot.columns}
        wide = [foot.substitute_parameters({"columns": None}) for foot in self.feet.values()]
        if len({each._name for each in wide}) > 1:
            return None
        columns = [name for name in wide[0].columns if name in used]
        return first.substitute_parameters({"columns": columns})

    @functools.cached_property
    def frames(self) -> list[str]:
        """Names of the frames with these rows."""
        return [*self.feet, *(name for name, node in self.nodes.items() if node.ndim == 2)]

    @property
    def compute_columns(self) -> bool:
        """True if some append columns, or use those that a decode appends."""
        return any(
            isinstance(node, AppendsColumns)
            or (
                node.ndim == 1
                and isinstance(node, dx.Projection)
                and isinstance(foot := self.feet.get(node.frame._name), AppendsColumns)
                and not foot.added.isdisjoint(node.columns)
            )
            for node in self.nodes.values()
        )

    def are_shared(self, parent: dx.Expr, dependents: Dependents) -> bool:
        """True if another part of the query needs some of them, without this filter."""
        inside = {node._name for node in parent.walk()}
        rows = (*self.nodes.values(), *self.feet.values())
        return any(user._name not in inside for node in rows for user in used_by(node, dependents))

    def place(self, mask: dx.Expr) -> tuple[list[dx.Expr], list[dx.Expr]]:
        """Conjuncts for the foot, over it, and those for above.

        Raises
        ------
        _NotMovableError
            If none can move.
        """
        try:
            return [self.on_foot(mask)], []
        except _NotMovableError:
            pass
        below: list[dx.Expr] = []
        above: list[dx.Expr] = []
        for part in conjuncts(mask):
            try:
                if not is_total(part, self.frames):
                    raise _NotMovableError
                below.append(self.on_foot(part))
            except _NotMovableError:
                if not is_row_wise(part, self.frames):
                    raise
                above.append(part)
        if not below:
            raise _NotMovableError
        return below, above

    def on_foot(self, expr: dx.Expr) -> dx.Expr:
        """A mask or value over columns of the foot alone.

        Raises
        ------
        _NotMovableError
            If it needs computed columns.
        """
        if isinstance(expr, (dx.Projection, dx.Index)) and expr.frame._name in self.frames:
            if isinstance(expr, dx.Index):
                return dx.Index(self.foot)
            if expr.ndim == 1:
                return self._column(expr.frame, expr.columns[0])
            return self._columns(expr)
        if expr._name in self.frames and not isinstance(expr, ELEMENTWISE):
            raise _NotMovableError
        operands = [self.on_foot(op) if isinstance(op, dx.Expr) else op for op in expr.operands]
        same = all(new is old for new, old in zip(operands, expr.operands, strict=True))
        return expr if same else type(expr)(*operands)

    def _columns(self, expr: dx.Projection) -> dx.Expr:
        columns = {name: self._column(expr.frame, name) for name in expr.columns}
        own = [n for n, c in columns.items() if c._name == dx.Projection(self.foot, n)._name]
        others = [op for name, c in columns.items() if name not in own for op in (name, c)]
        frame = dx.Projection(self.foot, own)
        return dx.Projection(dx.Assign(frame, *others), expr.columns) if others else frame

    def _column(self, frame: dx.Expr, name: Any) -> dx.Expr:
        """A column of one of the frames, over the foot."""
        columns = list(frame.columns)
        if columns.count(name) != 1:
            raise _NotMovableError
        if frame._name in self.feet:
            return dx.Projection(self.foot, name)
        if isinstance(frame, dx.Assign):
            value = dict(zip(frame.keys, frame.vals, strict=True)).get(name, self)
            if value is not self:
                is_series = isinstance(value, dx.Expr) and value.ndim == 1
                if not is_series or isinstance(value, dx.Index) or self._calls_functions(value):
                    raise _NotMovableError
                return self.on_foot(value)
        elif isinstance(frame, AppendsColumns):
            if name in frame.added:
                raise _NotMovableError
        elif isinstance(frame, RENAMES):
            if frame.frame.ndim == 1:
                raise _NotMovableError
            name = frame.frame.columns[columns.index(name)]
        elif type(frame) in COLUMNS_CHANGED:
            changed = COLUMNS_CHANGED[type(frame)](frame)
            if changed is None or isinstance(frame, dx.ExplodeFrame):
                raise _NotMovableError
            if name in changed:
                column, (_, changes, *options) = self._column(frame.frame, name), frame.operands
                return type(frame)(column, changes[name], *options)
        elif not isinstance(frame, (dx.Projection, dx.Drop, dx._DeepCopy)):
            raise _NotMovableError
        return self._column(frame.frame, name)

    def _calls_functions(self, value: dx.Expr) -> bool:
        """True if a user's function makes a value: it is called once for each row, not twice."""
        return any(
            isinstance(node, dx.Apply) or (isinstance(node, dx.Map) and callable(node.arg))
            for node in value.find_operations((dx.Apply, dx.Map))
            if node._name in self.nodes
        )

    def over(self, foot: dx.Expr, expr: dx.Expr) -> dx.Expr:
        """``expr`` with another foot, except in aggregates.

        Raises
        ------
        _NotMovableError
            If aggregates need computed columns, and so all rows of the foot.
        """
        done = {
            name: foot if each.columns == foot.columns else dx.Projection(foot, each.columns)
            for name, each in self.feet.items()
        }

        def replaced(node: dx.Expr) -> dx.Expr:
            if node._name not in done:
                done[node._name] = repeated(node) if node.ndim else self._alone(node)
            return done[node._name]

        def repeated(node: dx.Expr) -> dx.Expr:
            rows = {operand._name for operand in _row_operands(node)}
            return type(node)(
                *(
                    replaced(op) if isinstance(op, dx.Expr) and op._name in rows else op
                    for op in node.operands
                )
            )

        return replaced(expr)

    def _alone(self, aggregate: dx.Expr) -> dx.Expr:
        """An aggregate as it is computed by itself: of all rows, and without pixels.

        Raises
        ------
        _NotMovableError
            If it needs computed columns of all rows.
        """
        if all(node._name not in self.frames for node in aggregate.walk()):
            return aggregate
        alone = aggregate.simplify()
        if next(alone.find_operations(AppendsColumns), None) is not None:
            raise _NotMovableError
        return alone


def _row_operands(node: dx.Expr) -> list[dx.Expr]:
    """The operands with a row for each row of the result, and aggregates."""
    if isinstance(node, (AppendsColumns, dx.Map)):
        return [node.frame]
    return list(node.dependencies())
