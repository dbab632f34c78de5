"""Text for reports: rows, counts and folders, safe to print on a terminal."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from dask.utils import format_bytes

from dask_image_ingest.decode import printable
from dask_image_ingest.url_secrets import without_secrets

#: Descriptions of members that are not read, by code.
SKIPPED = {
    "symbolic-link": "symbolic links, which are not followed",
    "hard-link": "hard links to no file before them in the shard",
    "macos": "files that macOS adds (._x, .DS_Store)",
    "meta": "names such as __this__",
    "no-extension": "names without an extension, which belong to no sample",
    "many-kinds": "images of further extensions (a key ends at the first dot of the file name)",
}


def head_text(rows: pd.DataFrame) -> str:
    """Rows as a table that fits the terminal, without the common folder of their shards."""
    urls = rows["__url__"].map(without_secrets, na_action="ignore")
    folder = common_folder(list(urls))
    shown = rows.assign(__url__=urls.str.removeprefix(folder)).rename(columns=_escaped)
    for name in shown.columns[shown.dtypes.map(pd.api.types.is_string_dtype)]:
        shown[name] = shown[name].map(_escaped, na_action="ignore")
    width = shutil.get_terminal_size((120, 0)).columns
    text = str(shown.to_string(index=False, line_width=width, max_colwidth=40))
    return printable_text(text)  # once more: lists and other values contain texts, too


def printable_text(text: str) -> str:
    """Escape control characters in a text of several lines."""
    return "\n".join(map(_escaped, text.split("\n")))


def _escaped(text: str) -> str:
    """Escape control characters, which a terminal would obey; keep letters of all scripts."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def index_text(indexes: Sequence[Mapping[str, Any]]) -> str:
    """Summary of written indexes, with a line for each that failed or has damage."""
    states = Counter(index["state"] for index in indexes)
    samples = sum(index["samples"] for index in indexes)
    nbytes = sum(index["bytes"] for index in indexes)
    lines = [
        f"{listing(dict(sorted(states.items())))}: {number(samples, 'sample')} in "
        f"{number(len(indexes), 'shard')}, {format_bytes(nbytes)} of indexes"
    ]
    for index in indexes:
        if index["error"] is not None:
            lines.append(f"  {printable(index['error'], 1000)}")
        elif index["damage"] is not None:
            lines.append(f"  {printable(index['shard'], 1000)}: {printable(index['damage'], 300)}")
    return "\n".join(lines)


def common_folder(urls: Sequence[str]) -> str:
    """The folder that contains all URLs, with its slash; "" if there is none."""
    prefix = os.path.commonprefix(urls)  # noqa: RUF071 - URLs, cut at a slash below
    return prefix[: prefix.rfind("/") + 1]


def listing(counts: Mapping[str, int]) -> str:
    """Counts in words: ``jpeg 1,203, png 4``."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


def number(count: int, noun: str) -> str:
    """A count with its noun: ``1 sample``, ``1,203 samples``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
