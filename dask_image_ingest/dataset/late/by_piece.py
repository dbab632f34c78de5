"""Functions of partitions that need not see all of their pixels at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from dask.dataframe.dispatch import concat

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.late.decode import decode_pieces
from dask_image_ingest.dataset.late.node import Decode
from dask_image_ingest.frames import backend_of

__all__ = ["ByPiece"]


def _of_all(frame: Any, function: Callable[..., Any], args: tuple[Any, ...], _: Any) -> Any:
    return function(frame, *args)


def _of_pieces(
    frame: Any, images: Any, function: Callable[..., Any], args: tuple[Any, ...], _: Any
) -> Any:
    largest = backend_of(frame).partition_memory()
    results = [function(piece, *args) for piece in decode_pieces(frame, images, largest)]
    return results[0] if len(results) == 1 else concat(results)


class ByPiece(dx.Blockwise):
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
            return _ByPieceOfMoved(frame.frame, frame.images, *self.operands[1:])
        return None


class _ByPieceOfMoved(ByPiece):
    """The same over the pointers of rows that were moved."""

    _parameters: ClassVar = ["frame", "images", "function", "args", "meta"]
    operation = staticmethod(_of_pieces)

    def _lower(self) -> None:
        return None

    def __str__(self) -> str:
        return f"ByPieceOfMoved({self.frame})"
