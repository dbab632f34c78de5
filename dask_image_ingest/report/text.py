"""How reports write URLs, counts and rows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence

import pandas as pd

__all__ = ["common_folder", "head_text", "listing", "number"]


def head_text(rows: pd.DataFrame) -> str:
    """Rows as a table that fits the terminal, without the folder that their shards share."""
    folder = common_folder(list(rows["__url__"]))
    shown = rows.assign(__url__=rows["__url__"].str.removeprefix(folder))
    width = shutil.get_terminal_size((120, 0)).columns
    return str(shown.to_string(index=False, line_width=width, max_colwidth=40))


def common_folder(urls: Sequence[str]) -> str:
    """The folder that all of these lie in, with its slash; empty if there is none."""
    prefix = os.path.commonprefix(urls)  # noqa: RUF071 - URLs, cut at a slash below
    return prefix[: prefix.rfind("/") + 1]


def listing(counts: Mapping[str, int]) -> str:
    """``jpeg 1,203, png 4``."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


def number(count: int, noun: str) -> str:
    """``1 sample``, ``1,203 samples``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
