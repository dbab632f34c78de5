"""The ``.images`` accessor of dask dataframes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask.dataframe.extensions import register_dataframe_accessor, register_series_accessor
from numpy.typing import DTypeLike

from dask_image_ingest.accessor.images import Images, as_frame
from dask_image_ingest.dask_internals import FromGraph, Head, Len, new_collection
from dask_image_ingest.dask_internals import Literal as Known
from dask_image_ingest.dataset.plan import SHAPE_IN_NAME, Scan, select_columns, value_sources
from dask_image_ingest.dataset.references import ChunkedMap, Decode
from dask_image_ingest.decode import ImageShape, shape_text
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export import image_origin
from dask_image_ingest.frames import backend_of
from dask_image_ingest.image_frame import ImageDataFrame
from dask_image_ingest.loader import FrameSource, lazy_source
from dask_image_ingest.ops import (
    add_levels,
    count_levels,
    first_row,
    parse_dtype,
    parse_shape,
    stack,
    statistics,
    vectors,
)


@register_dataframe_accessor("images")
class LazyImages(Images[ImageDataFrame, dd.Series]):
    """Pixels of a dask dataframe, lazily."""

    if not TYPE_CHECKING:  # or type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                "a lazy frame has no pixels yet: call .compute().images.arrays() for a list of "
                "arrays (of .partitions[0] or .head() for a few), or .images.stack() for a dask "
                "array"
                if name == "arrays"
                else f".images has no {name!r}; dir() lists what it has"
            )

    def stack(  # noqa: D102 - documented in Images
        self, shape: tuple[int, int, int] | None = None, *, dtype: DTypeLike | None = None
    ) -> da.Array:
        known = parse_shape(shape) or image_shape(self._frame.expr, self.column)
        images = select_columns(self._frame, [self.column])
        # An empty partition takes the shape of the others, or dask could not concatenate them.
        first = _first_image(images) if None in known else None
        type_ = parse_dtype(dtype) or np.dtype(np.uint8)
        empty = backend_of(self._meta()).numpy.empty((0, *(edge or 0 for edge in known)), type_)
        array = images.map_partitions(stack, self.column, known, first, type_, meta=empty)
        array._chunks = (array.chunks[0], *((edge or np.nan,) for edge in known))
        return array

    def encode(  # noqa: D102
        self, format: Literal["jpeg", "png", "webp"] = "jpeg", *, quality: int = 92
    ) -> dd.Series:
        encoded = super().encode(format, quality=quality)
        if format == "jpeg" and "labels" in image_origin(self._frame, self.column).modes:
            raise ArgumentError(
                f"encode: JPEG changes the labels of {self.column!r}: pass 'png' or 'webp'"
            )
        return encoded

    def vectors(self, column: str) -> da.Array:  # noqa: D102
        meta = vectors(self._meta(), column)
        rows = select_columns(self._frame, [column])
        # The shape is known by the type, except of lists.
        is_known = all(meta.shape[1:])
        first = None if is_known else _first(rows)
        array = rows.map_partitions(vectors, column, first, meta=meta)
        edges = meta.shape[1:] if is_known else (np.nan,)
        array._chunks = (array.chunks[0], *((edge,) for edge in edges))
        return array

    def channel_stats(self) -> dd.DataFrame:  # noqa: D102
        empty = pd.DataFrame(
            np.empty((0, 256), np.int64), index=pd.Index([], dtype="int64", name="channel")
        )
        images = select_columns(self._frame, [self.column])
        counts = new_collection(ChunkedMap(images.expr, count_levels, (self.column,), empty))
        return counts.reduction(
            add_levels, combine=add_levels, aggregate=statistics, meta=statistics(empty)
        )

    def _facts(self, image: str) -> list[str]:
        expr = self._frame.expr
        pending = next(expr.find_operations((Scan, Decode)), None) is not None
        rows = Len(expr).simplify()
        return [
            f"{expr.npartitions} partitions",
            *([f"{rows.value} rows"] if isinstance(rows, Known) else []),
            shape_text(*image_shape(expr, image)),
            "decoded when computed" if pending else "made by the tasks of the frame",
        ]

    def _meta(self) -> Any:
        return self._frame._meta

    def _map(self, function: Callable[..., Any], columns: Sequence[str], *args: Any) -> Any:
        meta = function(self._meta()[list(columns)], *args)
        return select_columns(self._frame, columns).map_partitions(function, *args, meta=meta)

    def _source_of(self, columns: list[str], image: str | None) -> FrameSource:
        shape = None if image is None else image_shape(self._frame.expr, image)
        return lazy_source(self._frame, columns, image, shape)


@register_series_accessor("images")
class LazySeriesImages(LazyImages):
    """Pixels of a dask series of images, lazily."""

    def __init__(self, series: Any) -> None:
        super().__init__(as_frame(series))


def _first_image(images: Any) -> Any:
    """A lazy frame with the first row of any partition."""
    heads = images.head(1, npartitions=-1, compute=False)
    decodes = list(heads.simplify().expr.find_operations(Decode))
    if decodes and all(map(_is_limited, decodes)):
        # The head is pushed below the decode. Reduced to one task: otherwise Dask would fuse the
        # decode into each task that uses the result.
        return _first(heads)
    return _first(images)


def _is_limited(decode: Decode) -> bool:
    """True if the rows are limited before their images are decoded."""
    if decode.limit is not None or next(decode.find_operations(Head), None) is not None:
        return True
    return any(read.limit is not None for read in decode.find_operations(Scan))


def _first(frame: Any) -> Any:
    """Reduce to the first row; partitions are computed once, for this and for the stack."""
    return frame.reduction(first_row, aggregate=first_row, meta=frame._meta)


_UNKNOWN: ImageShape = (None, None, None)


def image_shape(expr: Any, column: Any) -> ImageShape:
    """(height, width, channels) of all images of a column; None for edges that may differ."""
    shapes = [_shape_from(source, name) for source, (name,) in value_sources(expr, (column,))]
    height, width, channels = (
        edges[0] if len(set(edges)) == 1 else None for edges in zip(*shapes, strict=True)
    )
    return height, width, channels


def _shape_from(expr: Any, column: Any) -> ImageShape:
    """Shape of the images that a source expression produces."""
    if list(expr.columns).count(column) != 1:
        return _UNKNOWN
    if isinstance(expr, Decode):
        return expr.shapes.get(column) or _UNKNOWN
    if isinstance(expr, FromGraph):
        return _persisted(expr)
    return _UNKNOWN


def _persisted(expr: FromGraph) -> ImageShape:
    """Shape of persisted images, which their tasks' names contain."""
    names = {key[0] if isinstance(key, tuple) else key for key in expr.operand("keys")}
    if len(names) != 1:
        return _UNKNOWN
    match = re.fullmatch(SHAPE_IN_NAME, str(names.pop()))
    return (int(match[1]), int(match[2]), int(match[3])) if match else _UNKNOWN
