"""Summary of a collection from headers alone: `dask-image-ingest describe`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from dask.utils import format_bytes

from dask_image_ingest.dataset import NoPixels, ReadOptions
from dask_image_ingest.decode import decode, printable
from dask_image_ingest.report.hardware import hardware_in_words, hardware_summary, not_in_hardware
from dask_image_ingest.report.shard_rows import OPTIONS, open_rows, other_images, others_in_words
from dask_image_ingest.report.text import common_folder, listing, number


@dataclass(frozen=True)
class Described:
    """Summary of one shard.

    Attributes
    ----------
    url
        The shard.
    counts
        A row for each distinct format, height, width, error and reason why a hardware decoder does
        not take it: how many samples and images, and the images' bytes.
    damage
        What of it is lost, and why; None if nothing is.
    others
        Images that were not looked at, by their extension.
    """

    url: str
    counts: pd.DataFrame
    damage: str | None
    others: dict[str, int]


def describe_shard(
    url: str,
    storage_options: dict[str, Any] | None = None,
    decode_too: bool = False,
    options: ReadOptions = OPTIONS,
) -> Described:
    """Read the headers of a shard's images; decode them too, if asked, and keep none.

    Raises
    ------
    ShardError
        If it can't be read.
    """
    with open_rows(url, storage_options, options) as (rows, index):
        names = ["format", "height", "width", "nbytes"]
        frame = rows.table(names).to_pandas(types_mapper=pd.ArrowDtype)
        frame["hardware"] = pd.array(not_in_hardware(rows), dtype="str")
        if decode_too:
            decoding = options.decoding
            pixels = decode(rows.headers, rows.image_bytes, decoding, NoPixels(), rows.origin)
            codes = [error and error.partition(":")[0] for error in pixels.errors]
            frame["error"] = pd.array(codes, dtype="str")
        damage = index.damage
        others = other_images(index, options)
    by = [name for name in frame.columns if name != "nbytes"]
    groups = frame.groupby(by, dropna=False, observed=True)["nbytes"]
    counts = groups.agg(samples="size", images="count", nbytes="sum").reset_index()
    lost = None if damage is None else f"{damage.code}: {damage.reason}"
    return Described(url, counts, lost, others)


def summarize(shards: Sequence[Described]) -> dict[str, Any]:
    """Totals, and the same of each shard."""
    counts = pd.concat([shard.counts for shard in shards], ignore_index=True)
    others: Counter[str] = Counter()
    for shard in shards:
        others.update(shard.others)
    return {
        "shards": len(shards),
        **_totals(counts),
        "others": dict(others.most_common()),
        "damaged": {shard.url: shard.damage for shard in shards if shard.damage},
        "per_shard": [{"url": shard.url, **_totals(shard.counts)} for shard in shards],
    }


def is_bad(summary: dict[str, Any]) -> bool:
    """True if images or samples are missing, damaged, or cannot be decoded."""
    return bool(
        summary["unreadable_headers"]
        or summary["images"] < summary["samples"]
        or summary.get("errors")
        or summary["damaged"]
    )


def describe_text(summary: dict[str, Any]) -> str:
    """The summary for people, with a line for each shard."""
    folder = common_folder([shard["url"] for shard in summary["per_shard"]])
    lines = [
        f"{number(summary['samples'], 'sample')} in {number(summary['shards'], 'shard')}"
        + (f" of {folder}" if folder else ""),
        "",
        f"bytes    {format_bytes(summary['bytes'])} encoded, "
        f"{format_bytes(summary['rgb_bytes'])} decoded to RGB",
        f"formats  {listing(summary['formats'])}",
        "size     " + ", ".join(f"{name} {w} × {h}" for name, (w, h) in summary["sizes"].items()),
        f"hardware {hardware_in_words(summary['hardware'])}",
        *(f"others   {others_in_words(found)}" for found in [summary["others"]] if found),
        f"bad      {_bad_text(summary)}",
        *(f"damaged  {printable(url, 1000)}: {why}" for url, why in summary["damaged"].items()),
        "",
    ]
    table = pd.DataFrame([_shard_row(shard, folder) for shard in summary["per_shard"]])
    return "\n".join(lines) + ("\n" + table.to_string(index=False) if len(table) else "")


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
        "hardware": hardware_summary(int(counts["images"].sum()), _histogram(counts, "hardware")),
    }
    if "error" in counts:
        totals["errors"] = _histogram(counts, "error")
    return totals


def _histogram(counts: pd.DataFrame, column: str) -> dict[str, int]:
    sums = counts.groupby(column)["samples"].sum().sort_values(ascending=False)
    return {str(name): int(samples) for name, samples in sums.items()}


def _sizes(readable: pd.DataFrame) -> dict[str, list[int]]:
    """Pick the images with the fewest, the median and the most pixels, each as [width, height]."""
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
