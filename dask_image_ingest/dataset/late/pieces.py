"""Partitions of moved rows that are known by now, cut where their images would be too many."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import dask
import numpy as np

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.decode_rows import cuts
from dask_image_ingest.dataset.expr import ReadWebDataset
from dask_image_ingest.dataset.late.decode import ImageDecode, encoded_sizes
from dask_image_ingest.dataset.late.groups import GroupsOfReferences
from dask_image_ingest.dataset.late.node import Decode

__all__ = ["move_rows_now"]


class Pieces(dx.Expr):
    """Parts of the partitions of a frame, as partitions."""

    _parameters: ClassVar = ["frame", "places"]
    places: tuple[tuple[int, int, int], ...]

    @functools.cached_property
    def _meta(self) -> Any:
        return self.frame._meta

    def _divisions(self) -> tuple[None, ...]:
        return (None,) * (len(self.places) + 1)

    def _layer(self) -> dict[Any, Any]:
        name = self._name
        return {
            (name, at): dx.Task((name, at), _rows, dx.TaskRef((self.frame._name, part)), start, end)
            for at, (part, start, end) in enumerate(self.places)
        }


def _rows(frame: Any, start: int, end: int) -> Any:
    return frame.iloc[start:end]


def move_rows_now(expr: dx.Expr, scheduler: Any) -> dx.Expr | None:
    """An optimised query whose rows were moved, once; None where it moves none.

    Only pointers and other metadata are moved and kept. The rows of a partition become several
    where their encoded images are more than those of a partition of the read on average, unless
    something above the decode sees partitions.
    """
    moved = _moved(expr)
    for rows in moved:
        kept = dx.new_collection(rows).persist(scheduler=scheduler)
        decode = expr
        while isinstance(decode, dx.Projection):
            decode = decode.frame
        new = kept.expr
        if isinstance(decode, Decode) and decode.frame._name == rows._name:
            partitions = max(
                (r.npartitions for r in rows.find_operations(ReadWebDataset)), default=1
            )
            new = _cut(kept, decode.images, partitions, scheduler)
        expr = expr.substitute(rows, new)
    return expr if moved else None


def _moved(expr: dx.Expr) -> list[dx.Expr]:
    """The pointers of a query which others than their own partition are needed for."""
    decodes = expr.find_operations((Decode, GroupsOfReferences))
    pointers = {decode.frame._name: decode.frame for decode in decodes}
    return [
        rows
        for rows in pointers.values()
        if not all(isinstance(node, (dx.Blockwise, dx.FromGraph)) for node in rows.walk())
    ]


def _cut(kept: Any, images: Sequence[ImageDecode], partitions: int, scheduler: Any) -> dx.Expr:
    tasks = [dask.delayed(_sizes)(part, images) for part in kept.to_delayed()]
    sizes = dask.compute(*tasks, scheduler=scheduler)
    largest = max(1, sum(int(each.sum()) for each in sizes) // partitions)
    places = [
        (part, rows.start, rows.stop)
        for part, each in enumerate(sizes)
        for rows in cuts([each], largest)
    ]
    return Pieces(kept.expr, tuple(places)) if len(places) > len(sizes) else kept.expr


def _sizes(frame: Any, images: Sequence[ImageDecode]) -> np.ndarray:
    return np.sum([encoded_sizes(frame, each) for each in images], axis=0)
