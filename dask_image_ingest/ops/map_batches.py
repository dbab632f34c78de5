"""``map_batches`` of a lazy frame."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, ClassVar

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset import AddsColumns, EveryRow
from dask_image_ingest.ops.batch_map import BatchMap

__all__ = ["MapBatches"]


class MapBatches(AddsColumns, EveryRow):
    """``map_batches`` of a lazy frame; columns and filters that need no outputs go below it."""

    _parameters: ClassVar = ["frame", "batch_map"]
    batch_map: BatchMap

    @staticmethod
    def operation(frame: Any, batch_map: BatchMap) -> Any:
        """Map one partition."""
        return batch_map(frame)

    @functools.cached_property
    def _meta(self) -> Any:
        return self.batch_map.meta(self.frame._meta)

    @property
    def added(self) -> frozenset[Any]:
        """The outputs of the function."""
        return frozenset(self.batch_map.outputs)

    def _simplify_down(self) -> dx.Expr | None:
        needed = self.batch_map.needed(self.frame.columns)
        if needed != list(self.frame.columns):
            return type(self)(self.frame[needed], self.batch_map)
        return None

    def _projected(self, parent: dx.Expr, wanted: set[Any]) -> dx.Expr | None:
        if wanted.isdisjoint(self.added):
            return type(parent)(self.frame, *parent.operands[1:])
        kept = tuple(name for name in self.batch_map.kept if name in wanted)
        if kept == self.batch_map.kept:
            return None
        narrower = type(self)(self.frame, replace(self.batch_map, kept=kept))
        return type(parent)(narrower, *parent.operands[1:])
