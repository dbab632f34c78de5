"""Decode as an expression: references become pixels after everything that only moves rows.

Dask's optimiser asks each expression about the one that uses it. A read, asked about a shuffle, a
sort, a join or the like that only passes its images along, gives references in their place, over
which the move is made, and the decode comes after it. Asked about another move, the decode goes
further up: a chain is decoded once, at its end.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, ClassVar

import dask
import numpy as np

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.adds_columns import AddsColumns
from dask_image_ingest.dataset.every_row import EveryRow
from dask_image_ingest.dataset.late.decode import ImageDecode, decode_partition
from dask_image_ingest.dataset.late.groups import apply_to_groups
from dask_image_ingest.dataset.late.moves import (
    Dependents,
    Moved,
    leads_to_a_move,
    move_rows,
)
from dask_image_ingest.dataset.late.pointers import POINTER, references_of_pointers
from dask_image_ingest.dataset.settled import is_settled
from dask_image_ingest.decode import ImageShape, Pixels
from dask_image_ingest.frames import backend_of, reference_array

__all__ = ["Decode", "DecodeOrDrop", "PointersToReferences", "move"]


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
    if not leads_to_a_move(parent, dependents):
        return None
    return _decoded(parent, move_rows(parent, child, *moved))


def _without_pixels(expr: dx.Expr) -> Moved | None:
    as_references = getattr(expr, "as_references", None)
    return None if as_references is None else as_references()


def _decoded(parent: dx.Expr, moved: Moved | None) -> dx.Expr | None:
    if moved is None:
        return None
    made = Decode(*moved)
    # What looks otherwise than before is not the same.
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


class Decode(AddsColumns, EveryRow):
    """Makes pixels and errors of references; what needs no pixels goes below it."""

    _parameters: ClassVar = ["frame", "images"]
    _preserves_partitioning_information = True
    images: tuple[ImageDecode, ...]

    operation = staticmethod(decode_partition)

    @functools.cached_property
    def _meta(self) -> Any:
        meta = self.frame._meta
        for each in self.images:
            nothing = Pixels(np.empty(0, np.uint8), np.empty((0, 3), np.int32), [])
            meta = backend_of(meta).with_images(meta, nothing, *each.names)
        return meta

    @property
    def added(self) -> frozenset[Any]:
        """The columns of images, and of their errors."""
        return frozenset(name for each in self.images for name in each.columns)

    @property
    def shapes(self) -> dict[Any, ImageShape]:
        """The shape of the images of each column that is decoded."""
        return {each.image: each.decoding.shape for each in self.images}

    def as_references(self) -> Moved | None:
        """The same rows without pixels, and what the references in their place stand for."""
        return self.frame, self.images

    def _simplify_down(self) -> dx.Expr | None:
        if type(self.frame) is Decode:
            return type(self)(self.frame.frame, (*self.frame.images, *self.images))
        return None

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        made = super()._simplify_up(parent, dependents)
        if made is not None or is_settled(self, dependents):
            return made
        return move(parent, self, dependents)

    def _lower(self) -> dx.Expr | None:
        # Directly above a read both are one task, which has the shard open already.
        decoding = getattr(self.frame, "decoding", None)
        made = None if decoding is None else decoding(self.images)
        if made is None or list(made.columns) != list(self.columns):
            return super()._lower()
        return made

    def _projected(self, parent: dx.Expr, wanted: set[Any]) -> dx.Expr | None:
        images = tuple(each for each in self.images if wanted & each.columns)
        if not images:
            return type(parent)(self.frame, *parent.operands[1:])
        # Errors are told by the decode of their images.
        wanted = wanted.union(each.image for each in images)
        needed = [name for name in self.frame.columns if name in wanted]
        if needed == self.frame.columns:
            return None
        kept = tuple(each if each.error in wanted else replace(each, error=None) for each in images)
        return type(parent)(type(self)(self.frame[needed], kept), *parent.operands[1:])

    def __str__(self) -> str:
        names = ", ".join(str(each.image) for each in self.images)
        return f"{type(self).__name__}({self.frame}, {names})"

    def _tree_repr_argument_construction(self, i: int, op: Any, header: str) -> str:
        if self._parameters[i] == "images":
            names = ", ".join(repr(each.image) for each in self.images)
            return f"{header} decodes={names}"
        return super()._tree_repr_argument_construction(i, op, header)


class DecodeOrDrop(Decode):
    """A decode that drops the rows of bad images.

    A filter of its result would do as well, but dask joins it with those that follow, and then none
    of them goes below the decode.
    """

    _is_length_preserving = False

    def as_references(self) -> None:
        """Nothing: only the decode tells which rows there are."""

    def _simplify_down(self) -> None:
        return None

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        if isinstance(parent, (dx.Head, dx.Tail)):
            return None
        return super()._simplify_up(parent, dependents)

    def _projected(self, parent: dx.Expr, wanted: set[Any]) -> dx.Expr | None:
        return super()._projected(parent, wanted | self.added)

    def _filter_passthrough_available(self, parent: dx.Expr, dependents: Any) -> bool:
        # Whatever counts or adds up rows has to count those that are left.
        return super()._filter_passthrough_available(parent, dependents) and row_by_row(
            parent.predicate, self
        )


# What raises for no row, whatever is in it, as astype("int64") does of a null.
_RAISE_FOR_NO_ROW = (
    *(dx.EQ, dx.NE, dx.LT, dx.LE, dx.GT, dx.GE),
    *(dx.And, dx.Or, dx.XOr, dx.Invert),
    *(dx.IsNa, dx.NotNull, dx.Isin, dx.Projection),
)


def row_by_row(predicate: dx.Expr, frame: dx.Expr) -> bool:
    """Whether a predicate can be asked of more rows of ``frame`` than there are in the end.

    What it says of a row must depend on that row alone, and it must not raise for the others. A
    mask of another frame may say nothing of them.
    """
    if predicate._name == frame._name:
        return True
    if predicate.ndim == 0 and all(node._name != frame._name for node in predicate.walk()):
        return True
    return isinstance(predicate, _RAISE_FOR_NO_ROW) and all(
        row_by_row(part, frame) for part in predicate.dependencies()
    )


def _to_references(frame: Any, image: Any, error: Any) -> Any:
    references = references_of_pointers(frame)
    return backend_of(frame).with_references(frame, references, image, error)


class PointersToReferences(AddsColumns, EveryRow):
    """References, in place of images, made of the columns that say where each image is."""

    _parameters: ClassVar = ["frame", "image", "error"]
    operation = staticmethod(_to_references)

    @functools.cached_property
    def _meta(self) -> Any:
        backend = backend_of(self.frame._meta)
        return backend.with_references(
            self.frame._meta, reference_array([]), self.image, self.error
        )

    @property
    def added(self) -> frozenset[Any]:
        """The columns of references, and of errors that are not known yet."""
        return frozenset({self.image, self.error})

    def _projected(self, parent: dx.Expr, wanted: set[Any]) -> dx.Expr | None:
        if not wanted & self.added:
            return type(parent)(self.frame, *parent.operands[1:])
        wanted = wanted | {*POINTER, "__key__"}
        needed = [name for name in self.frame.columns if name in wanted - self.added]
        if needed == self.frame.columns:
            return None
        narrower = type(self)(self.frame[needed], *self.operands[1:])
        return type(parent)(narrower, *parent.operands[1:])
