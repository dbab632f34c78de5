"""Counts of images by header: collected from rows, added up over partitions and shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import dask
import pandas as pd

from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.typedefs import AnyFrame

#: Kind of an image that is its sample's own; further ones are named by their extension.
IMAGE = "image"

# What is counted apart, with types of which tables can be joined.
_BY = {
    "member": "string",
    "format": "string",
    "height": "float64",
    "width": "float64",
    "baseline": "boolean",
    "paged": "boolean",
    "error": "string",
}

# Results merged by one task of the tree.
_FAN_IN = 16


def count_images(rows: pd.DataFrame, member: str = IMAGE) -> pd.DataFrame:
    """Numbers of ``samples`` and ``images``, and ``nbytes`` of images, for each distinct header.

    Parameters
    ----------
    rows
        A row for each sample, with any of ``nbytes`` (null without an image), ``format``,
        ``height``, ``width``, ``baseline`` (of a JPEG), ``paged`` (several pages in a TIFF) and
        ``error`` (of which the code counts).
        What can't be a size, as in columns of these names that are a table's own, is unknown.
    member
        The kind of all these images.
    """
    sizes = {name: _sizes_in(rows, name) for name in ("height", "width", "nbytes")}
    known = (sizes["height"] > 0) & (sizes["width"] > 0)
    rows = rows.assign(
        member=member, height=sizes["height"].where(known), width=sizes["width"].where(known)
    )
    nbytes = sizes["nbytes"]
    rows = rows.reindex(columns=[*_BY]).astype(_BY)
    rows["error"] = rows["error"].str.split(":").str[0].astype("string")
    return add_counts(
        [
            rows.assign(
                samples=1,
                images=nbytes.notna().astype("int64"),
                nbytes=nbytes.fillna(0).astype("int64"),
            )
        ]
    )


def _sizes_in(rows: pd.DataFrame, name: str) -> pd.Series:
    """A column of sizes as floats; NaN for what is none."""
    if name not in rows or not pd.api.types.is_numeric_dtype(rows[name]):
        return pd.Series(math.nan, rows.index, "float64")
    values = rows[name].astype("float64")
    return values.where((values >= 0) & (values < math.inf))


def add_counts(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """One table of counts from several."""
    counts = pd.concat(tables, ignore_index=True)
    return counts.groupby([*_BY], dropna=False, sort=False).sum().reset_index()


def total_images(counts: pd.DataFrame) -> dict[str, Any]:
    """Totals of a table of counts: images, bytes, formats and sizes.

    ``sizes`` has the [width, height] of the images with the fewest, the median and the most pixels.
    """
    readable = counts[counts["height"].notna()]
    formats = counts.groupby("format")["samples"].sum().sort_values(ascending=False)
    return {
        "images": int(counts["images"].sum()),
        "bytes": int(counts["nbytes"].sum()),
        "unreadable_headers": int(counts["images"].sum() - readable["images"].sum()),
        "formats": {str(name): int(samples) for name, samples in formats.items()},
        "sizes": _sizes(readable),
    }


def _sizes(readable: pd.DataFrame) -> dict[str, list[int]]:
    if readable.empty:
        return {}
    ordered = readable.assign(pixels=readable["height"] * readable["width"]).sort_values("pixels")
    cumulative = ordered["images"].cumsum()
    median = int((cumulative < cumulative.iloc[-1] / 2).sum())
    picks = {"smallest": 0, "median": median, "largest": -1}
    return {
        name: [int(ordered["width"].iloc[row]), int(ordered["height"].iloc[row])]
        for name, row in picks.items()
    }


def reduce_partitions(
    frame: AnyFrame, collect: Callable[[Any], Any], merge: Callable[[list[Any]], Any]
) -> Any:
    """``collect`` a frame; if it is lazy, its partitions, and ``merge`` their results in a tree."""
    if not isinstance(frame, FrameBase):
        return collect(frame)
    results = [dask.delayed(collect)(part) for part in frame.to_delayed()]
    while len(results) > 1:
        results = [
            dask.delayed(merge)(results[start : start + _FAN_IN])
            for start in range(0, len(results), _FAN_IN)
        ]
    return dask.compute(results[0])[0]
