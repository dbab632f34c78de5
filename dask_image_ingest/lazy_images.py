"""The ``.images`` accessor of dask dataframes: the same, when it is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from dask.dataframe.dask_expr import _expr as dx
from dask.dataframe.dask_expr import new_collection
from dask.dataframe.extensions import register_dataframe_accessor

from dask_image_ingest.batch_source import LazySource, Source
from dask_image_ingest.batches import MapBatches
from dask_image_ingest.channel_stats import add_levels, count_levels, statistics
from dask_image_ingest.expr import ReadWebDataset
from dask_image_ingest.frames import backend_of
from dask_image_ingest.images import Images
from dask_image_ingest.late_decode import LateDecode
from dask_image_ingest.stacking import stack, vectors


@register_dataframe_accessor("images")
class LazyImages(Images):
    """Pixels of a dask dataframe, when they are computed."""

    def stack(self) -> Any:  # noqa: D102 - told by Images
        height, width, channels = _shape(self._frame.expr)
        meta = backend_of(self._meta()).numpy.empty(
            (0, height or 0, width or 0, channels or 0), np.uint8
        )
        array = self._frame[[self.column]].map_partitions(stack, self.column, meta=meta)
        edges = ((edge or np.nan,) for edge in (height, width, channels))
        array._chunks = (array.chunks[0], *edges)
        return array

    def vectors(self, column: str) -> Any:  # noqa: D102
        meta = vectors(self._meta(), column)
        array = self._frame[[column]].map_partitions(vectors, column, meta=meta)
        array._chunks = (array.chunks[0], (np.nan,))
        return array

    def channel_stats(self) -> Any:  # noqa: D102
        empty = pd.DataFrame(
            np.empty((0, 256), np.int64), index=pd.Index([], dtype="int64", name="channel")
        )
        counts = self._frame[[self.column]].map_partitions(count_levels, self.column, meta=empty)
        return counts.reduction(
            add_levels, combine=add_levels, aggregate=statistics, meta=statistics(empty)
        )

    def _meta(self) -> Any:
        return self._frame._meta

    def _map(self, function: Callable, columns: Sequence[str], *args: Any) -> Any:
        meta = function(self._meta()[list(columns)], *args)
        return self._frame[list(columns)].map_partitions(function, *args, meta=meta)

    def _map_batches(self, batch_map: Any) -> Any:
        return new_collection(MapBatches(self._frame.expr, batch_map))

    def _source(self, columns: list[str], image: str, world: int) -> Source:
        return LazySource(self._frame[columns], image)


def _shape(expr: Any) -> tuple[int | None, int | None, int | None]:
    """The shape of every image of a query, as far as its options tell it."""
    if next(expr.find_operations(dx.MapPartitions), None) is not None:
        return None, None, None
    late = [node.decoding for node in expr.find_operations(LateDecode)]
    read = [node.dataset.decoding for node in expr.find_operations(ReadWebDataset)]
    decodings = {decoding.token: decoding for decoding in late or read}
    if len(decodings) != 1:
        return None, None, None
    (decoding,) = decodings.values()
    if decoding.transform is not None:
        return None, None, None
    size = decoding.size if decoding.size and len(decoding.size) == 2 else (None, None)
    return *size, decoding.channels
