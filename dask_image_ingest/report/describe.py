"""What is in shards, as `dask-image-ingest describe` counts it and tells it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from dask.utils import format_bytes

from dask_image_ingest.report.text import common_folder, listing, number

__all__ = ["count_samples", "describe_text", "is_bad", "summarize"]

_HEADER = ["format", "height", "width"]


def count_samples(frame: Any, decode: bool) -> Any:
    """Count the samples of each shard, format and size, and with ``decode`` of each error.

    Gives a lazy frame: for each such group of a partition its ``samples``, ``images``, ``nbytes``.
    """
    by = ["__url__", *_HEADER, *(["error"] if decode else [])]
    return frame[[*by, "nbytes"]].map_partitions(_count, by)


def summarize(counts: pd.DataFrame, urls: Sequence[str]) -> dict[str, Any]:
    """The report for machines: totals, and those of each shard, in the order of ``urls``."""
    parts = dict(iter(counts.groupby("__url__")))
    return {
        "shards": len(urls),
        **_totals(counts),
        "per_shard": [{"url": url, **_totals(parts.get(url, counts[:0]))} for url in urls],
    }


def is_bad(summary: dict[str, Any]) -> bool:
    """Whether a sample has no image, or one that can't be read."""
    return bool(
        summary["unreadable_headers"]
        or summary["images"] < summary["samples"]
        or summary.get("errors")
    )


def describe_text(summary: dict[str, Any]) -> str:
    """The report for people: totals, and a line per shard."""
    folder = common_folder([shard["url"] for shard in summary["per_shard"]])
    lines = [
        f"{number(summary['samples'], 'sample')} in {number(summary['shards'], 'shard')}"
        + (f" of {folder}" if folder else ""),
        "",
        f"bytes    {format_bytes(summary['bytes'])} encoded, "
        f"{format_bytes(summary['rgb_bytes'])} decoded to RGB",
        f"formats  {listing(summary['formats'])}",
        "size     " + ", ".join(f"{name} {w} × {h}" for name, (w, h) in summary["sizes"].items()),
        f"bad      {_bad_text(summary)}",
        "",
    ]
    table = pd.DataFrame([_shard_row(shard, folder) for shard in summary["per_shard"]])
    return "\n".join(lines) + ("\n" + table.to_string(index=False) if len(table) else "")


def _count(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    if "error" in by:
        frame = frame.assign(error=frame["error"].str.split(":").str[0])
    groups = frame.groupby(by, dropna=False, observed=True)["nbytes"]
    return groups.agg(samples="size", images="count", nbytes="sum").reset_index()


def _totals(counts: pd.DataFrame) -> dict[str, Any]:
    readable = counts[counts["height"].notna()]
    totals = {
        "samples": int(counts["samples"].sum()),
        "images": int(counts["images"].sum()),
        "bytes": int(counts["nbytes"].sum()),
        "rgb_bytes": int((readable["height"] * readable["width"] * readable["images"]).sum()) * 3,
        "unreadable_headers": int(counts["images"].sum() - readable["images"].sum()),
        "formats": _histogram(counts, "format"),
        "sizes": _sizes(readable),
    }
    if "error" in counts:
        totals["errors"] = _histogram(counts, "error")
    return totals


def _histogram(counts: pd.DataFrame, column: str) -> dict[str, int]:
    sums = counts.groupby(column)["samples"].sum().sort_values(ascending=False)
    return {str(name): int(samples) for name, samples in sums.items()}


def _sizes(readable: pd.DataFrame) -> dict[str, list[int]]:
    """The images with the fewest, the median and the most pixels, each as [width, height]."""
    if readable.empty:
        return {}
    ordered = readable.assign(pixels=readable["height"] * readable["width"]).sort_values("pixels")
    reached = ordered["images"].cumsum()
    middle = int((reached < reached.iloc[-1] / 2).sum())
    picks = {"smallest": 0, "median": middle, "largest": -1}
    return {
        name: [int(ordered["width"].iloc[row]), int(ordered["height"].iloc[row])]
        for name, row in picks.items()
    }


def _bad_text(summary: dict[str, Any]) -> str:
    counts = {
        "without an image": summary["samples"] - summary["images"],
        "with an unreadable header": summary["unreadable_headers"],
    }
    found = [f"{count:,} {what}" for what, count in counts.items() if count]
    if summary.get("errors"):
        found.append("errors: " + listing(summary["errors"]))
    return "; ".join(found) or ("none" if "errors" in summary else "none seen (nothing decoded)")


def _shard_row(shard: dict[str, Any], folder: str) -> dict[str, Any]:
    width, height = shard["sizes"].get("median", ("–", "–"))
    errors = {"errors": sum(shard["errors"].values())} if "errors" in shard else {}
    return {
        "shard": shard["url"].removeprefix(folder),
        "samples": shard["samples"],
        "bytes": format_bytes(shard["bytes"]),
        "formats": listing(shard["formats"]),
        "median size": f"{width} × {height}",
        "unreadable": shard["unreadable_headers"],
        **errors,
    }
