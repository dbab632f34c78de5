"""Partitions of moved rows, a part at a time: how many images a key brings is known late."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import dask
import numpy as np
from dask.dataframe.dispatch import concat

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.late.decode import decode_pieces, encoded_sizes
from dask_image_ingest.dataset.late.groups import GroupsOfReferences
from dask_image_ingest.dataset.late.nodes import Decode
from dask_image_ingest.dataset.plan.scan_node import ReadWebDataset
from dask_image_ingest.dataset.scan.decode_rows import ImageDecode, cuts
from dask_image_ingest.frames import backend_of


def _of_all(frame: Any, function: Callable[..., Any], args: tuple[Any, ...], _: Any) -> Any:
    return function(frame, *args)


def _of_pieces(
    frame: Any, images: Any, function: Callable[..., Any], args: tuple[Any, ...], _: Any
) -> Any:
    largest = backend_of(frame).partition_memory()
    results = [function(piece, *args) for piece in decode_pieces(frame, images, largest)]
    return results[0] if len(results) == 1 else concat(results)


class ChunkedMap(dx.Blockwise):
    """A function of each partition, whose results over parts of it can be put one behind the other.

    Rows that were moved are decoded a piece at a time for it: how many images a key brought to one
    partition is known to nobody before, and no partition can become several when the graph is made.
    """

    _parameters: ClassVar = ["frame", "function", "args", "meta"]
    operation: ClassVar[Any] = staticmethod(_of_all)

    @functools.cached_property
    def _meta(self) -> Any:
        return self.operand("meta")

    def _divisions(self) -> tuple[None, ...]:
        return (None,) * (self.frame.npartitions + 1)

    def _lower(self) -> dx.Expr | None:
        frame = self.frame
        if type(frame) is Decode and frame._lower() is None and frame.keep is None:
            return _ChunkedMapOfReferences(frame.frame, frame.images, *self.operands[1:])
        return None


class _ChunkedMapOfReferences(ChunkedMap):
    """The same over the pointers of rows that were moved."""

    _parameters: ClassVar = ["frame", "images", "function", "args", "meta"]
    operation = staticmethod(_of_pieces)

    def _lower(self) -> None:
        return None


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
