"""The ``.images`` accessor of pandas and cuDF frames, and their thumbnails in notebooks."""

from __future__ import annotations

import base64
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import pandas as pd
from numpy.typing import DTypeLike

from dask_image_ingest.accessor.images import Images, as_frame
from dask_image_ingest.decode import shape_text
from dask_image_ingest.frames import DecodedImage, backend_of, image_columns, register_accessor
from dask_image_ingest.loader import FrameSource, as_pandas
from dask_image_ingest.ops import (
    count_levels,
    parse_dtype,
    parse_shape,
    stack,
    statistics,
    vectors,
)

# Rows that the HTML of `.images` shows.
_SHOWN_ROWS = 8


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
        return f"<p>{escape(repr(self))}</p>{self.show(_SHOWN_ROWS)._repr_html_()}"

    def stack(  # noqa: D102 - documented in Images
        self, shape: tuple[int, int, int] | None = None, *, dtype: DTypeLike | None = None
    ) -> Any:
        return stack(self._frame, self.column, parse_shape(shape), dtype=parse_dtype(dtype))

    def vectors(self, column: str) -> Any:  # noqa: D102
        return vectors(self._frame, column)

    def channel_stats(self) -> pd.DataFrame:  # noqa: D102
        return statistics(count_levels(self._frame, self.column))

    def _facts(self, image: str) -> list[str]:
        arrays = self.arrays()
        shapes = {array.shape for array in arrays if array is not None}
        missing = sum(array is None for array in arrays)
        return [
            f"{len(arrays)} rows" + (f", {missing} without an image" if missing else ""),
            shape_text(*shapes.pop()) if len(shapes) == 1 else f"{len(shapes)} shapes",
            f"{sum(array.nbytes for array in arrays if array is not None):,} bytes of pixels",
        ]

    def _meta(self) -> Any:
        return self._frame

    def _map(self, function: Callable[..., Any], columns: Sequence[str], *args: Any) -> Any:
        return function(self._frame[list(columns)], *args)

    def _source_of(self, columns: list[str], image: str | None) -> FrameSource:
        frame = self._frame
        return FrameSource(frame[columns], image, column=lambda name: as_pandas(frame[name]))


@register_accessor("series", "images")
@pd.api.extensions.register_series_accessor("images")
class SeriesImages(FrameImages):
    """Pixels of a pandas or cuDF series of images."""

    def __init__(self, series: Any) -> None:
        super().__init__(as_frame(series))


_EDGE = 96


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


def _thumbnail_html(image: Any) -> str:
    png = image.png(_EDGE) if isinstance(image, DecodedImage) else None
    if png is None:
        return escape(str(image))
    data = base64.b64encode(png).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{escape(str(image))}">'
