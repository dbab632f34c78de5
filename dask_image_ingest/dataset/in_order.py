"""Rows of a partition in an order of their own, where a shuffle brings them in any.

Dask's shuffles put the rows of an output partition behind each other as they arrive, from threads
or from other workers, so that the same query has another order each time that it is computed.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.adds_columns import AddsColumns
from dask_image_ingest.dataset.row_pointers import parse
from dask_image_ingest.frames import backend_of

__all__ = ["InOrder"]


def _in_order(frame: Any, names: tuple[Any, ...]) -> Any:
    """Sort rows by the shard and the number of the samples that they point to."""
    columns = backend_of(frame).to_arrow(frame[list(names)]).columns
    keys = [_places(column.to_pylist()) for column in columns]
    order = sorted(range(len(frame)), key=lambda row: [key[row] for key in keys])
    return frame if order == list(range(len(frame))) else frame.take(np.array(order))


def _places(texts: list[str | None]) -> list[tuple[str, int]]:
    # A merge may have rows of no image: these come first, and their own order is any.
    pointers = (None if text is None else parse(text) for text in texts)
    return [("", 0) if each is None else (each.shard, each.number) for each in pointers]


class InOrder(AddsColumns):
    """The rows of each partition of pointers, sorted by where their samples are; adds no column.

    Attributes
    ----------
    names
        The columns of pointers. Where nobody needs them, their order is dask's.
    """

    _parameters: ClassVar = ["frame", "names"]
    _preserves_partitioning_information = True
    _is_length_preserving = True
    names: tuple[Any, ...]

    operation = staticmethod(_in_order)

    @functools.cached_property
    def _meta(self) -> Any:
        return self.frame._meta

    @property
    def added(self) -> frozenset[Any]:
        """No columns."""
        return frozenset()

    def _projected(self, parent: dx.Expr, wanted: set[Any]) -> dx.Expr | None:
        names = tuple(name for name in self.names if name in wanted)
        if not names:
            return type(parent)(self.frame, *parent.operands[1:])
        needed = [name for name in self.frame.columns if name in wanted]
        if needed == self.frame.columns:
            return None
        return type(parent)(type(self)(self.frame[needed], names), *parent.operands[1:])
