"""Summary of a collection from headers alone: `dask-image-ingest describe`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd
from dask.utils import format_bytes

from dask_image_ingest.decode import printable
from dask_image_ingest.report.shard_report import IMAGE, ShardReport
from dask_image_ingest.report.text import (
    SKIPPED,
    common_folder,
    listing,
    number,
    skipped_counts,
)
from dask_image_ingest.tar import LINKS


def summarize(shards: Sequence[ShardReport], decoded: bool) -> dict[str, Any]:
    """Totals of all shards, and of each shard; with ``decoded``, also the errors of images."""
    lost = {shard.url: _lost(shard) for shard in shards}
    return {
        "shards": len(shards),
        **_totals(shards, decoded),
        "damaged": {url: why for url, why in lost.items() if why},
        "skipped": skipped_counts(shards),
        "per_shard": [{"url": shard.url, **_totals([shard], decoded)} for shard in shards],
    }


def is_bad(summary: dict[str, Any]) -> bool:
    """True if images or samples are missing, damaged, or cannot be decoded."""
    others = summary["others"].values()
    return bool(
        summary["unreadable_headers"]
        or summary["images"] < summary["samples"]
        or any(other["unreadable_headers"] for other in others)
        or summary.get("errors")
        or summary["damaged"]
        or not summary["skipped"].keys().isdisjoint(LINKS)
    )


def describe_text(summary: dict[str, Any]) -> str:
    """The summary as text, with a line for each shard."""
    folder = common_folder([shard["url"] for shard in summary["per_shard"]])
    lines = [
        f"{number(summary['samples'], 'sample')} in {number(summary['shards'], 'shard')}"
        + (f" of {folder}" if folder else ""),
        "",
        f"bytes    {format_bytes(summary['bytes'])} encoded, "
        f"{format_bytes(summary['rgb_bytes'])} decoded to RGB",
        f"formats  {_formats(summary)}",
        "size     " + _sizes_text(summary),
        *(f"{printable(kind):8} {_other_text(other)}" for kind, other in summary["others"].items()),
        f"bad      {_bad_text(summary)}",
        *(f"skipped  {number(n, 'member')}: {SKIPPED[c]}" for c, n in summary["skipped"].items()),
        *(f"damaged  {printable(url, 1000)}: {why}" for url, why in summary["damaged"].items()),
        "",
    ]
    table = pd.DataFrame([_shard_row(shard, folder) for shard in summary["per_shard"]])
    return "\n".join(lines) + ("\n" + table.to_string(index=False) if len(table) else "")


def _lost(shard: ShardReport) -> str | None:
    return f"unreadable: {shard.unreadable}" if shard.unreadable else shard.damage


def _totals(shards: Sequence[ShardReport], decoded: bool) -> dict[str, Any]:
    counts = pd.concat([shard.counts for shard in shards], ignore_index=True)
    images = counts[counts["member"] == IMAGE]
    readable = images[images["height"].notna()]
    others = counts[counts["member"] != IMAGE]
    totals = {
        "samples": sum(shard.samples for shard in shards),
        **_images(images),
        "rgb_bytes": int((readable["height"] * readable["width"] * readable["images"]).sum()) * 3,
        "baseline_jpegs": _baseline(images),
        "others": {kind: _images(rows) for kind, rows in others.groupby("member", sort=False)},
    }
    if decoded:
        errors: Counter[str] = Counter()
        for shard in shards:
            errors.update({code: bad.count for code, bad in shard.bad.items()})
        totals["errors"] = dict(errors.most_common())
    return totals


def _baseline(images: pd.DataFrame) -> int | None:
    """Number of baseline JPEGs; None if it was not checked."""
    if images["baseline"].isna().any():
        return None
    return int(images["images"][images["baseline"].astype(bool)].sum())


def _images(counts: pd.DataFrame) -> dict[str, Any]:
    """Totals of images, from rows of ``ShardReport.counts``."""
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
    """[width, height] of the images with the fewest, the median and the most pixels."""
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


def _formats(summary: dict[str, Any]) -> str:
    jpegs, baseline = summary["formats"].get("jpeg", 0), summary["baseline_jpegs"]
    text = listing(summary["formats"])
    # Worth knowing: hardware decoders take baseline JPEGs only.
    has_others = baseline is not None and baseline < jpegs
    return text + (f" ({baseline:,} of the jpeg are baseline)" if has_others else "")


def _sizes_text(images: dict[str, Any]) -> str:
    return ", ".join(f"{name} {w} × {h}" for name, (w, h) in images["sizes"].items())


def _other_text(other: dict[str, Any]) -> str:
    bad = other["unreadable_headers"]
    return (
        f"{number(other['images'], 'image')}, {format_bytes(other['bytes'])}: "
        f"{listing(other['formats'])}; {_sizes_text(other)}"
        + (f"; {bad:,} with an unreadable header" if bad else "")
    )


def _bad_text(summary: dict[str, Any]) -> str:
    counts = {
        "without an image": summary["samples"] - summary["images"],
        "with an unreadable header": summary["unreadable_headers"],
    }
    problems = [f"{count:,} {problem}" for problem, count in counts.items() if count]
    if summary.get("errors"):
        problems.append("errors: " + listing(summary["errors"]))
    return "; ".join(problems) or ("none" if "errors" in summary else "none seen (nothing decoded)")


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
