"""Thumbnails in pandas dataframes that IPython displays as HTML."""

from __future__ import annotations

import base64
import re
import sys
from html import escape
from typing import Any

import pandas as pd

from dask_image_ingest.frames import DecodedImage, image_columns

_EDGE = 96

# Private-use characters that mark a cell, with the numbers of its column and row between them.
_BEGIN, _END = "\ue0d1", "\ue0d2"
_CELL = re.compile(rf"{_BEGIN}(\d+)\.(\d+){_END}")


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
    marked = frame.copy(deep=False)
    for number, name in enumerate(names):
        marked[name] = [f"{_BEGIN}{number}.{row}{_END}" for row in range(len(frame))]
    html = marked._repr_html_()
    if html is None:
        return None
    # Marks are left only in the rows that pandas shows: only their thumbnails are made.
    return _CELL.sub(
        lambda cell: _thumbnail_html(frame[names[int(cell[1])]].iloc[int(cell[2])]), html
    )


def _thumbnail_html(image: Any) -> str:
    png = image.png(_EDGE) if isinstance(image, DecodedImage) else None
    if png is None:
        return escape(str(image))
    data = base64.b64encode(png).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{escape(str(image))}">'
