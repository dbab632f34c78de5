"""Shape inference: the shape of a lazy frame's images, if its expression determines it."""

from __future__ import annotations

import re
from typing import Any

from dask_image_ingest.dask_internals import FromGraph
from dask_image_ingest.dataset import (
    SHAPE_IN_NAME,
    Decode,
    value_sources,
)
from dask_image_ingest.decode import ImageShape

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
