"""``.images`` of pandas and cuDF frames, whose methods compute at once, and of dask frames."""

from __future__ import annotations

import base64
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Literal

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask.dataframe import extensions
from numpy.typing import DTypeLike

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.accessor.images import Images, as_frame
from dask_image_ingest.dataset.plan import Scan, select_columns
from dask_image_ingest.dataset.references import Decode, image_shape
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export import image_origin
from dask_image_ingest.frames import DecodedImage, backend_of, image_columns, register_accessor
from dask_image_ingest.image_frame import ImageDataFrame
from dask_image_ingest.ops import (
    add_levels,
    first_row,
    level_histograms,
    parse_dtype,
    parse_shape,
    stack,
    statistics,
    vectors,
)
from dask_image_ingest.typedefs import AnySeries

# Rows that the HTML of `.images` shows, and the edge of a thumbnail in a dataframe's.
_SHOWN_ROWS = 8
_EDGE = 96


@register_accessor("dataframe", "images")
@pd.api.extensions.register_dataframe_accessor("images")
class FrameImages(Images[Any, Any]):
    """Pixels of a pandas or cuDF dataframe."""

    def arrays(self) -> list[Any]:
        """Views of each decoded image.

        Returns
        -------
        list of array, shape (height, width, channels), uint8; with ``mode="raw"`` uint16 or float32
            NumPy or CuPy views into the column's one buffer, without a copy: copy them before you
            write to them, or the frame changes. None for a row without an image.

        Raises
        ------
        ArgumentError
            If the frame has no image column, or more than one.

        Examples
        --------
        >>> frame.images.arrays()[0].shape
        (224, 224, 3)
        """
        return backend_of(self._frame).arrays(self._frame[self.column])

    def _repr_html_(self) -> str:
        rows = f"{len(self._frame)} rows"
        return f"<p>{rows}: {escape(repr(self))}</p>{self.show(_SHOWN_ROWS)._repr_html_()}"

    def stack(
        self, shape: tuple[int, int, int] | None = None, *, dtype: DTypeLike | None = None
    ) -> Any:
        return stack(self._frame, self.column, parse_shape(shape), dtype=parse_dtype(dtype))

    def vectors(self, column: str) -> Any:
        return vectors(self._frame, column)

    def channel_stats(self) -> pd.DataFrame:
        return statistics(level_histograms(self._frame, self.column))

    def _meta(self) -> Any:
        return self._frame

    def _map(self, function: Callable[..., Any], columns: Sequence[str], *args: Any) -> Any:
        return function(self._frame[list(columns)], *args)


@register_accessor("series", "images")
@pd.api.extensions.register_series_accessor("images")
class SeriesImages(FrameImages):
    """Pixels of a pandas or cuDF series of images."""

    def __init__(self, series: AnySeries) -> None:
        super().__init__(as_frame(series))


@extensions.register_dataframe_accessor("images")
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

    def stack(
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

    def encode(
        self, format: Literal["jpeg", "png", "webp"] = "jpeg", *, quality: int = 92
    ) -> dd.Series:
        encoded = super().encode(format, quality=quality)
        if format == "jpeg" and "labels" in image_origin(self._frame, self.column).modes:
            raise ArgumentError(
                f"encode: JPEG changes the labels of {self.column!r}: pass 'png' or 'webp'"
            )
        return encoded

    def vectors(self, column: str) -> da.Array:
        meta = vectors(self._meta(), column)
        rows = select_columns(self._frame, [column])
        # The shape is known by the type, except of lists.
        is_known = all(meta.shape[1:])
        first = None if is_known else _first(rows)
        array = rows.map_partitions(vectors, column, first, meta=meta)
        edges = meta.shape[1:] if is_known else (np.nan,)
        array._chunks = (array.chunks[0], *((edge,) for edge in edges))
        return array

    def channel_stats(self) -> dd.DataFrame:
        empty = pd.DataFrame(
            np.empty((0, 256), np.int64), index=pd.Index([], dtype="int64", name="channel")
        )
        images = select_columns(self._frame, [self.column])
        counts = images.map_partitions(level_histograms, self.column, meta=empty)
        return counts.reduction(
            add_levels, combine=add_levels, aggregate=statistics, meta=statistics(empty)
        )

    def _meta(self) -> Any:
        return self._frame._meta

    def _map(self, function: Callable[..., Any], columns: Sequence[str], *args: Any) -> Any:
        meta = function(self._meta()[list(columns)], *args)
        return select_columns(self._frame, columns).map_partitions(function, *args, meta=meta)


@extensions.register_series_accessor("images")
class LazySeriesImages(LazyImages):
    """Pixels of a dask series of images, lazily."""

    def __init__(self, series: AnySeries) -> None:
        super().__init__(as_frame(series))


def _first_image(images: dd.DataFrame) -> dd.DataFrame:
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
    if decode.limit is not None or next(decode.find_operations(dx.Head), None) is not None:
        return True
    return any(read.limit is not None for read in decode.find_operations(Scan))


def _first(frame: dd.DataFrame) -> dd.DataFrame:
    """Reduce to the first row; partitions are computed once, for this and for the stack."""
    return frame.reduction(first_row, aggregate=first_row, meta=frame._meta)


def register_html() -> None:
    """Register thumbnails in dataframes with IPython, if it runs in this process."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        shell.display_formatter.formatters["text/html"].for_type(pd.DataFrame, frame_html)


def frame_html(frame: pd.DataFrame) -> str | None:
    """HTML of a dataframe: that of pandas, with thumbnails in its image columns."""
    names = image_columns(frame) if frame.columns.is_unique else []
    if not names:
        return frame._repr_html_()
    others = [name for name in frame.columns if name not in names]
    marked = frame[[*names, *others]].copy(deep=False)  # the pictures first
    # Private-use characters, which no caption can foresee: they are followed by column and row.
    mark = "".join(chr(0xE000 + secrets.randbelow(0x1900)) for _ in range(4))
    for number, name in enumerate(names):
        marked[name] = [f"{mark}{number}.{row}{mark}" for row in range(len(frame))]
    html = marked._repr_html_()
    if html is None:
        return None
    # Marks are left only in the rows that pandas shows: only their thumbnails are made.
    return re.sub(
        rf"{mark}(\d+)\.(\d+){mark}",
        lambda cell: _thumbnail_html(frame[names[int(cell[1])]].iloc[int(cell[2])]),
        html,
    )


def _thumbnail_html(image: object) -> str:
    png = image.png(_EDGE) if isinstance(image, DecodedImage) else None
    if png is None:
        return escape(str(image))
    data = base64.b64encode(png).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{escape(str(image))}">'
