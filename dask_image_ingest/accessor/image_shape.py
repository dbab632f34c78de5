"""The shape of the images of a lazy frame, where its expression determines it."""

from __future__ import annotations

import re
from typing import Any

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dask_internals import (
    BaseSetIndexSortValues,
    Concat,
    DropDuplicates,
    FromGraph,
    Merge,
    Repartition,
    ShuffleBase,
)
from dask_image_ingest.dataset import SHAPE_IN_NAME, DecodeMoved, LateDecode, ReadWebDataset
from dask_image_ingest.decode import ImageShape
from dask_image_ingest.export import ReadStored
from dask_image_ingest.ops import MapBatches

_UNKNOWN: ImageShape = (None, None, None)

# Expressions that select or reorder rows or columns, and change no values.
_SELECTS_ROWS = (
    dx.Filter,
    dx.FilterAlign,
    dx.Head,
    dx.Tail,
    dx.Partitions,
    dx.Sample,
    dx.Query,
    dx.DropnaFrame,
    dx.DropnaSeries,
    dx.ResetIndex,
    dx.ClearDivisions,
    dx.SetDivisions,
    dx.RenameAxis,
    dx.Projection,
    dx.Drop,
    DropDuplicates,
    Repartition,
    ShuffleBase,
    BaseSetIndexSortValues,
)
_RENAMES = (dx.RenameFrame, dx.AddPrefix, dx.RenameSeries, dx.ToFrame)


def image_shape(expr: Any, column: Any) -> ImageShape:
    """(height, width, channels) of all images of a column; None where they may differ.

    Expressions that are not listed here, such as a user's function, may change the images.
    """
    columns = list(expr.columns)
    if columns.count(column) != 1:
        return _UNKNOWN
    if isinstance(expr, ReadWebDataset):
        return expr.dataset.options.decoding.shape if column == "image" else _UNKNOWN
    if isinstance(expr, LateDecode):
        return expr.decoding.shape if column == "image" else image_shape(expr.frame, column)
    if isinstance(expr, DecodeMoved):
        return expr.shapes.get(column) or image_shape(expr.frame, column)
    if isinstance(expr, MapBatches):
        made = column in expr.batch_map.outputs
        return _UNKNOWN if made else image_shape(expr.frame, column)
    if isinstance(expr, FromGraph):
        return _persisted(expr)
    if isinstance(expr, ReadStored):
        return image_shape(expr.stored.made_of, column)
    if isinstance(expr, _SELECTS_ROWS):
        return image_shape(expr.frame, column)
    if isinstance(expr, _RENAMES):
        return image_shape(expr.frame, expr.frame.columns[columns.index(column)])
    if isinstance(expr, dx.Assign):
        return _assigned(expr, column)
    if isinstance(expr, Concat):
        return _agreed(expr, column)
    if isinstance(expr, Merge):
        return _merged(expr, column)
    return _UNKNOWN


def _persisted(expr: FromGraph) -> ImageShape:
    """The shape that is part of the names of the persisted tasks."""
    names = {key[0] if isinstance(key, tuple) else key for key in expr.operand("keys")}
    if len(names) != 1:
        return _UNKNOWN
    told = re.fullmatch(SHAPE_IN_NAME, str(names.pop()))
    return (int(told[1]), int(told[2]), int(told[3])) if told else _UNKNOWN


def _assigned(expr: dx.Assign, column: Any) -> ImageShape:
    values = dict(zip(expr.keys, expr.vals, strict=True))
    if column not in values:
        return image_shape(expr.frame, column)
    value = values[column]
    series = isinstance(value, dx.Expr) and value.ndim == 1 and len(value.columns) == 1
    return image_shape(value, value.columns[0]) if series else _UNKNOWN


def _agreed(expr: Concat, column: Any) -> ImageShape:
    # A frame without the column adds nulls, which have no shape.
    frames = [frame for frame in expr._frames if column in frame.columns]
    shapes = [image_shape(frame, column) for frame in frames]
    height, width, channels = (
        edges[0] if len(set(edges)) == 1 else None for edges in zip(*shapes, strict=True)
    )
    return height, width, channels


def _merged(expr: Merge, column: Any) -> ImageShape:
    left, right = expr.left.columns, expr.right.columns
    if column in left and column not in right:
        return image_shape(expr.left, column)
    if column in right and column not in left:
        return image_shape(expr.right, column)
    for side, suffix in zip((expr.left, expr.right), expr.suffixes, strict=True):
        name = str(column).removesuffix(suffix or "")
        if suffix and name != column and name in left and name in right:
            return image_shape(side, name)
    return _UNKNOWN


__all__ = ["image_shape"]
