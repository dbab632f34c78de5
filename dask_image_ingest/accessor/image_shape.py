"""The shape of the images of a lazy frame, where its expression determines it."""

from __future__ import annotations

import re
from typing import Any

from dask_image_ingest.dask_internals import FromGraph
from dask_image_ingest.dataset import (
    SHAPE_IN_NAME,
    Decode,
    KeepsResults,
    image_sources,
)
from dask_image_ingest.decode import ImageShape

_UNKNOWN: ImageShape = (None, None, None)


def image_shape(expr: Any, column: Any) -> ImageShape:
    """(height, width, channels) of all images of a column; None where they may differ."""
    shapes = [_made(*source) for source in image_sources(expr, column)]
    height, width, channels = (
        edges[0] if len(set(edges)) == 1 else None for edges in zip(*shapes, strict=True)
    )
    return height, width, channels


def _made(expr: Any, column: Any) -> ImageShape:
    """The shape of the images that an expression makes."""
    if list(expr.columns).count(column) != 1:
        return _UNKNOWN
    if isinstance(expr, Decode):
        return expr.shapes.get(column) or _UNKNOWN
    if isinstance(expr, FromGraph):
        return _persisted(expr)
    if isinstance(expr, KeepsResults):
        return image_shape(expr.made_of, column)
    return _UNKNOWN


def _persisted(expr: FromGraph) -> ImageShape:
    """The shape that is part of the names of the persisted tasks."""
    names = {key[0] if isinstance(key, tuple) else key for key in expr.operand("keys")}
    if len(names) != 1:
        return _UNKNOWN
    told = re.fullmatch(SHAPE_IN_NAME, str(names.pop()))
    return (int(told[1]), int(told[2]), int(told[3])) if told else _UNKNOWN
