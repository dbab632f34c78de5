"""Decode as an expression: references become pixels after everything that only moves rows.

Dask's optimiser asks each expression about the one that uses it. A read, asked about a shuffle, a
sort, a join or the like that only passes its images along, gives references in their place, over
which the move is made, and the decode comes after it. Asked about another move, the decode goes
further up: a chain is decoded once, at its end.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import dask

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset import filters as dnf
from dask_image_ingest.dataset.late.decode import decode_partition, decoded_meta
from dask_image_ingest.dataset.late.fused import decode_in_read
from dask_image_ingest.dataset.late.groups import apply_to_groups
from dask_image_ingest.dataset.late.moves import (
    Moved,
    leads_to_a_move,
    move_rows,
)
from dask_image_ingest.dataset.plan.nodes import (
    AppendsColumns,
    Dependents,
    ImageNode,
    PreservesRows,
    is_optimized,
    looks_at,
    post_dominates,
)
from dask_image_ingest.dataset.plan.operators import RAISES_FOR_NO_ROW, ROW_BY_ROW, ROW_WISE
from dask_image_ingest.dataset.plan.scan_node import HeadOfRead, Scan
from dask_image_ingest.dataset.scan.decode_rows import ImageDecode, Kept
from dask_image_ingest.decode import ImageShape
from dask_image_ingest.frames import backend_of


def move(parent: dx.Expr, child: dx.Expr, dependents: Dependents) -> dx.Expr | None:
    """``parent`` over the rows of ``child`` without their pixels, which are decoded after it.

    None where it needs the pixels, where nothing is known of it, or where nothing is won.
    """
    if not dask.config.get("image-ingest.decode-late", True):
        return None
    if type(parent) is dx.Merge:
        return _decoded(parent, _merged(parent))
    moved = _without_pixels(child)
    if moved is None:
        return None
    if type(parent) is dx.GroupByApply:
        return apply_to_groups(parent, child, *moved)
    if not (
        leads_to_a_move(parent, dependents)
        or (isinstance(parent, ROW_WISE) and post_dominates(child, parent, dependents))
    ):
        return None
    return _decoded(parent, move_rows(parent, child, *moved))


def _without_pixels(expr: dx.Expr) -> Moved | None:
    as_references = getattr(expr, "as_references", None)
    return None if as_references is None else as_references()


def _decoded(parent: dx.Expr, moved: Moved | None) -> dx.Expr | None:
    if moved is None:
        return None
    made = Decode(*moved)
    # Reject if columns or dtypes changed.
    same = list(made.columns) == list(parent.columns) and made._meta.dtypes.equals(
        parent._meta.dtypes
    )
    return made if same else None


def _merged(merge: dx.Expr) -> Moved | None:
    """A merge of pointers, from one side or from both."""
    if merge.how not in ("inner", "left", "right", "outer"):
        return None
    sides = [merge.left, merge.right]
    found: list[ImageDecode] = []
    for number, keys in enumerate((merge.left_on, merge.right_on)):
        side, other = (merge.left, merge.right)[:: 1 if number == 0 else -1]
        keys = keys if isinstance(keys, list) else [] if keys is None else [keys]
        moved = _without_pixels(side)
        if not all(isinstance(key, str) for key in keys):
            return None
        if moved is None or len(set(side.columns)) < len(side.columns):
            continue
        if not all(each.pixels for each in moved[1]):
            continue  # a column that is not asked for may share its name with one of the other side
        made = {name for each in moved[1] for name in each.columns}
        if not made.isdisjoint(keys):
            continue
        sides[number] = moved[0]
        suffix = merge.suffixes[number] or ""
        renamed = {name: f"{name}{suffix}" if name in other.columns else name for name in made}
        found += [each.renamed(renamed.__getitem__) for each in moved[1]]
    if not found:
        return None
    return type(merge)(*sides, *merge.operands[2:]), tuple(found)


class Decode(AppendsColumns, PreservesRows):
    """Makes pixels and errors of references; what needs no pixels goes below it.

    Attributes
    ----------
    keep, limit
        Whether rows of good or of bad images alone are kept, and how many at most.
    """

    _parameters: ClassVar = ["frame", "images", "keep", "limit"]
    _defaults: ClassVar = {"keep": None, "limit": None}
    _preserves_partitioning_information = True
    images: tuple[ImageDecode, ...]
    keep: Kept
    limit: int | None

    operation = staticmethod(decode_partition)

    @functools.cached_property
    def _meta(self) -> Any:
        return decoded_meta(self.frame._meta, self.images)

    @property
    def _is_length_preserving(self) -> bool:  # type: ignore[override] # Dask has it so, too
        return self.keep is None and self.limit is None

    @property
    def added(self) -> frozenset[Any]:
        """The columns of images, and of their errors."""
        return frozenset(name for each in self.images for name in each.columns)

    @property
    def _projection_columns(self) -> list[Any]:
        # A column of references is needed though only their errors are asked for.
        return list(self.frame.columns)

    @property
    def shapes(self) -> dict[Any, ImageShape]:
        """The shape of the images of each column that is decoded."""
        return {each.image: each.decoding.shape for each in self.images}

    def as_references(self) -> Moved | None:
        """The same rows without pixels, and what the references in their place stand for."""
        return (self.frame, self.images) if self._is_length_preserving else None

    def _simplify_down(self) -> dx.Expr | None:
        below = self.frame
        if type(below) is not Decode or not below._is_length_preserving:
            return None
        if self._is_length_preserving:
            return type(self)(below.frame, (*below.images, *self.images))
        # Of the rows that are left, the others.
        made = type(self)(self.substitute_parameters({"frame": below.frame}), below.images)
        return made if made.columns == self.columns else made[self.columns]

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        if is_optimized(self, dependents):
            return None
        if isinstance(parent, dx.Filter):
            return self._filtered(parent, dependents)
        if isinstance(parent, HeadOfRead):
            return None
        if type(parent) is dx.Head:
            limited = self._limited(parent)
            if limited is not None:
                return limited
        if isinstance(parent, (dx.Head, dx.Tail)) and not self._is_length_preserving:
            return None
        made = super()._simplify_up(parent, dependents)
        if made is None and self._is_length_preserving:
            made = move(parent, self, dependents)
        return made

    def _limited(self, head: dx.Head) -> dx.Expr | None:
        """A head of what is limited already; None where the head goes below, or is there."""
        n, scan = head.n, self.frame
        if n < 0:
            return None
        if self._is_length_preserving:
            # In one task with the scan, where the head is of one partition.
            if not isinstance(scan, Scan) or head.operand("npartitions") != 1:
                return None
            limited = scan.limited(n)
            made = None if limited is None else self.substitute_parameters({"frame": limited})
        else:
            done = self.limit is not None and self.limit <= n
            made = None if done else self.substitute_parameters({"limit": n})
        return None if made is None else HeadOfRead(made, *head.operands[1:])

    def _filter_passthrough_available(self, parent: dx.Expr, dependents: Any) -> bool:
        return self._filtered(parent, dependents) is not None

    def _filtered(self, parent: dx.Filter, dependents: Any) -> dx.Expr | None:
        """A filter of what is decoded, of which as much as can be is asked before the decode."""
        if (
            parent.frame._name != self._name
            or self.limit is not None
            or not dx.is_filter_pushdown_available(self, parent, dependents)
        ):
            return None
        return self._kept(parent.predicate)

    def _kept(self, predicate: dx.Expr) -> dx.Expr | None:
        late = dask.config.get("image-ingest.decode-late", True)
        if late and self.keep is None and not looks_at(predicate, self, self.added):
            return self._over(predicate)
        split = self._split(predicate) if late else None
        if split is not None:
            return split
        rows = (self._name, self.frame._name)
        below, above, keep = [], [], self.keep
        for part in conjuncts(predicate):
            kept = self._kept_by(part)
            if kept is not None and keep in (None, kept):
                keep = kept
            elif (
                not looks_at(part, self, self.added)
                and is_total(part, rows)
                and (late or self._takes_up(part))
            ):
                below.append(part)
            elif is_row_wise(part, rows):
                above.append(part)
            else:
                return None
        if not below and keep == self.keep:
            return None
        made = self._over(functools.reduce(dx.And, below)) if below else self
        if made is None:
            return None
        made = made.substitute_parameters({"keep": keep})
        if not above:
            return made
        mask = _over_rows(functools.reduce(dx.And, above), rows, made)
        return dx.Filter(made, mask)

    def _split(self, predicate: dx.Expr) -> dx.Expr | None:
        """A filter by some of the images alone, and the others decoded after it."""
        if not self._is_length_preserving or len(self.images) == 1:
            return None
        rows = (self._name, self.frame._name)
        parts = list(conjuncts(predicate))
        if not all(is_row_wise(part, rows) for part in parts):
            parts = [predicate]
        asked = [{i for i in self.images if looks_at(p, self, frozenset(i.columns))} for p in parts]
        first = next((some for some in asked if 0 < len(some) < len(self.images)), None)
        if first is None:
            return None
        made: dx.Expr = self.frame
        for now in (True, False):
            decode = type(self)(made, tuple(i for i in self.images if (i in first) is now))
            some = [p for p, images in zip(parts, asked, strict=True) if (images <= first) is now]
            made = decode
            if some:
                mask = _over_rows(functools.reduce(dx.And, some), rows, decode)
                if not dx.are_co_aligned(decode, mask):
                    return None
                kept = decode._kept(mask)
                made = dx.Filter(decode, mask) if kept is None else kept
        return made if made.columns == self.columns else made[self.columns]

    def _takes_up(self, part: dx.Expr) -> bool:
        """True if a predicate is simple enough to be one of the scan below."""
        scan = self.frame
        plain = dx.Filter(scan, part.substitute(self, scan))
        return isinstance(scan, Scan) and scan.filtered_by(plain) is not None

    def _over(self, predicate: dx.Expr) -> Decode | None:
        """The same decode of the rows for which a predicate holds."""
        mask = predicate.substitute(self, self.frame)
        if not dx.are_co_aligned(self.frame, mask):
            return None
        return type(self)(dx.Filter(self.frame, mask), *self.operands[1:])

    def _kept_by(self, part: dx.Expr) -> Kept:
        """The rows kept by a predicate that only asks for an error."""
        negated = isinstance(part, dx.Invert)
        part = part.frame if negated else part
        if not isinstance(part, (dx.IsNa, dx.NotNull)) or not self.images[0].error:
            return None
        if len(self.images) > 1:
            return None  # a row is kept by the errors of all its images
        asked = part.frame
        if not (
            isinstance(asked, dx.Projection)
            and asked.frame._name == self._name
            and asked.columns == [self.images[0].error]
            and asked.ndim == 1
        ):
            return None
        return "good" if isinstance(part, dx.IsNa) is not negated else "bad"

    def _lower(self) -> dx.Expr | None:
        frame = self.frame
        if isinstance(frame, dx.Partitions):
            # Made by the lowering of a head above, and not yet a part of the scan.
            frame = frame.simplify()
        made = decode_in_read(frame, self.images, self.keep, self.limit, self.columns)
        return super()._lower() if made is None else made

    def _projected(self, parent: dx.Expr, wanted: set[Any]) -> dx.Expr | None:
        keeps = not self._is_length_preserving
        if not keeps and (isinstance(parent, dx.Index) or self.added.isdisjoint(parent.columns)):
            return type(parent)(self.frame, *parent.operands[1:])
        images = tuple(each for each in self.images if wanted & each.columns or keeps)
        if not images:
            return type(parent)(self.frame, *parent.operands[1:])
        kept = tuple(
            replace(
                each,
                error=each.error if each.error in wanted else None,
                pixels=each.pixels and each.image in wanted,
            )
            for each in images
        )
        # Errors are told by the decode of their images.
        wanted = wanted.union(each.image for each in images)
        needed = [name for name in self.frame.columns if name in wanted]
        if needed == self.frame.columns and kept == self.images:
            return None
        frame = self.frame if needed == self.frame.columns else self.frame[needed]
        narrower = type(self)(frame, kept, self.keep, self.limit)
        return type(parent)(narrower, *parent.operands[1:])


def conjuncts(predicate: dx.Expr) -> Iterator[dx.Expr]:
    """The parts of a predicate that must all hold."""
    if isinstance(predicate, dx.And):
        yield from conjuncts(predicate.left)
        yield from conjuncts(predicate.right)
    else:
        yield predicate


def _over_rows(expr: dx.Expr, old: Sequence[str], new: dx.Expr) -> dx.Expr:
    """An expression over ``new`` in place of those of these names."""
    if expr._name in old:
        return new
    operands = (_over_rows(o, old, new) if isinstance(o, dx.Expr) else o for o in expr.operands)
    return type(expr)(*operands)


def is_total(predicate: dx.Expr, rows: Sequence[str]) -> bool:
    """True if a predicate can be asked of more rows than there are in the end.

    What it says of a row must depend on that row alone, and it must not raise for the others. A
    mask of another frame may say nothing of them. ``rows`` are the names of the frame.
    """
    return _is_of(predicate, rows, RAISES_FOR_NO_ROW)


def is_row_wise(predicate: dx.Expr, rows: Sequence[str]) -> bool:
    """True if the answer of a predicate for a row depends on that row alone."""
    return _is_of(predicate, rows, (*ROW_BY_ROW, dx.Projection))


def _is_of(predicate: Any, rows: Sequence[str], kinds: tuple[type, ...]) -> bool:
    if predicate._name in rows:
        return True
    parts = predicate.dependencies()
    if predicate.ndim == 0 and all(node._name not in rows for node in predicate.walk()):
        return True
    return isinstance(predicate, kinds) and all(_is_of(part, rows, kinds) for part in parts)


def _keep_matching(frame: Any, filters: dnf.Filters) -> Any:
    table = backend_of(frame).to_arrow(frame[sorted(dnf.columns_of(filters))])
    rows = dnf.matching(table, filters)
    return frame if len(rows) == len(frame) else frame.iloc[rows]


class KeepMatching(ImageNode, dx.Blockwise):
    """The rows for which filters in normal form hold, after a decode on which they depend."""

    _parameters: ClassVar = ["frame", "filters"]
    _preserves_partitioning_information = True
    operation = staticmethod(_keep_matching)

    @functools.cached_property
    def _meta(self) -> Any:
        return self.frame._meta

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        if isinstance(parent, dx.Projection) and not is_optimized(self, dependents):
            needed = sorted(dnf.columns_of(self.filters))
            return dx.plain_column_projection(self, parent, dependents, needed)
        return None
