"""Pointers move, pixels do not: where rows are moved about, they are decoded when they are there.

Dask's optimiser asks each expression about the one that uses it. A read, asked about a shuffle, a
sort, a join or the like that only passes its images along, gives pointers in their place
(``row_pointers.py``), over which the move is made, and the decode comes after it. Asked about
another move, the decode goes further up: a chain is decoded once, at its end.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import dask
import numpy as np

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.adds_columns import AddsColumns
from dask_image_ingest.dataset.every_row import EveryRow
from dask_image_ingest.dataset.moved_groups import apply_to_groups
from dask_image_ingest.dataset.moved_rows import MovedImages, decode_moved
from dask_image_ingest.dataset.moves import Dependents, Moved, leads_to_a_move, move_rows
from dask_image_ingest.dataset.settled import is_settled
from dask_image_ingest.decode import ImageShape, Pixels
from dask_image_ingest.frames import backend_of

__all__ = ["DecodeMoved", "move"]


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
    as_pointers = getattr(expr, "as_pointers", None)
    return None if as_pointers is None else as_pointers()


def _decoded(parent: dx.Expr, moved: Moved | None) -> dx.Expr | None:
    if moved is None:
        return None
    made = DecodeMoved(*moved)
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
    found: list[MovedImages] = []
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
        renamed[None] = None
        found += [
            MovedImages(renamed[each.image], renamed[each.error], each.options) for each in moved[1]
        ]
    if not found:
        return None
    return type(merge)(*sides, *merge.operands[2:]), tuple(found)


class DecodeMoved(AddsColumns, EveryRow):
    """The decode of rows that were moved; what needs no pixels goes below it."""

    _parameters: ClassVar = ["frame", "images"]
    _preserves_partitioning_information = True
    images: tuple[MovedImages, ...]

    operation = staticmethod(decode_moved)

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
        return {each.image: each.options.decoding.shape for each in self.images}

    def as_pointers(self) -> Moved:
        """The same rows without pixels, and what the pointers in their place stand for."""
        return self.frame, self.images

    def _simplify_down(self) -> dx.Expr | None:
        if isinstance(self.frame, DecodeMoved):
            return type(self)(self.frame.frame, (*self.frame.images, *self.images))
        return None

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        made = super()._simplify_up(parent, dependents)
        if made is not None or is_settled(self, dependents):
            return made
        return move(parent, self, dependents)

    def _projected(self, parent: dx.Expr, wanted: set[Any]) -> dx.Expr | None:
        images = tuple(each for each in self.images if wanted & each.columns)
        if not images:
            return type(parent)(self.frame, *parent.operands[1:])
        # Errors are told by the decode of their images.
        wanted = wanted.union(each.image for each in images)
        needed = [name for name in self.frame.columns if name in wanted]
        if needed == self.frame.columns:
            return None
        kept = tuple(
            each if each.error in wanted else MovedImages(each.image, None, each.options)
            for each in images
        )
        return type(parent)(type(self)(self.frame[needed], kept), *parent.operands[1:])

    def __str__(self) -> str:
        names = ", ".join(str(each.image) for each in self.images)
        return f"DecodeMoved({self.frame}, {names})"

    def _tree_repr_argument_construction(self, i: int, op: Any, header: str) -> str:
        if self._parameters[i] == "images":
            names = ", ".join(repr(each.image) for each in self.images)
            return f"{header} decodes={names}"
        return super()._tree_repr_argument_construction(i, op, header)
