"""Rows of a partition in an order of their own, where a shuffle brings them in any.

Dask's shuffles put the rows of an output partition behind each other as they arrive, from threads
or from other workers, so that the same query has another order each time that it is computed.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.adds_columns import AddsColumns
from dask_image_ingest.dataset.late.decode import field_of, references_of

__all__ = ["InOrder"]


def _in_order(frame: Any, names: tuple[Any, ...]) -> Any:
    """Sort rows by the shard and the number of the samples that they refer to."""
    keys = [_places(references_of(frame, name)) for name in names]
    order = sorted(range(len(frame)), key=lambda row: [key[row] for key in keys])
    return frame if order == list(range(len(frame))) else frame.take(np.array(order))


def _places(references: pa.ChunkedArray) -> list[tuple[str, int]]:
    # A merge may have rows of no image: these come first, and their own order is any.
    urls, numbers, offsets = (
        field_of(references, name).to_pylist() for name in ("url", "number", "offset")
    )
    return [
        (url or "", (offset or 0) if number is None else number)
        for url, number, offset in zip(urls, numbers, offsets, strict=True)
    ]


class InOrder(AddsColumns):
    """The rows of each partition, sorted by the samples that they refer to; adds no column.

    Attributes
    ----------
    names
        The columns of references. Where nobody needs them, their order is dask's.
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
