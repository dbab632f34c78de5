"""Summary of a collection: the reports of `dask-image-ingest describe` and `check`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd
from dask.utils import format_bytes

from dask_image_ingest.decode import printable
from dask_image_ingest.image_counts import IMAGE, total_images
from dask_image_ingest.report.shard_report import (
    KEYS,
    NUMBERS,
    SKIPPED,
    ShardReport,
    common_folder,
    listing,
    merge_reports,
    number,
)
from dask_image_ingest.tar import LINKS

_PROBLEMS = {
    "duplicates": "with a member twice",
    "repeated": "in more than one sample",
    "interleaved": "with members apart from each other",
}


def summarize(shards: Sequence[ShardReport], decoded: bool) -> dict[str, Any]:
    """Totals of all shards, and of each shard; with ``decoded``, also its bad images."""
    total = _facts(merge_reports(shards), decoded)
    lost = {s.url: f"unreadable: {s.unreadable}" if s.unreadable else s.damage for s in shards}
    return {
        "shards": len(shards),
        "bad_shards": sum(map(_has_problems, shards)),
        "unreadable": [shard.url for shard in shards if shard.unreadable],
        "damaged": {url: why for url, why in lost.items() if why},
        **total,
        **{name: len(total[name]) for name in KEYS},
        "per_shard": [
            {"url": s.url, "unreadable": s.unreadable, "damage": s.damage, **_facts(s, decoded)}
            for s in shards
        ],
    }


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


def check_text(summary: dict[str, Any], shards: Sequence[ShardReport]) -> str:
    """The summary as text: totals, bad images by reason, and the problems of each shard."""
    bad, others = summary["bad_images"], summary["others"]
    nbytes = summary["bytes"] + sum(other["bytes"] for other in others.values())
    beside = listing({printable(kind): other["images"] for kind, other in others.items()})
    lines = [
        f"{summary['shards']:,} shards, {summary['samples']:,} samples, "
        f"{format_bytes(nbytes)} of images"
        + (f", with those beside the first: {beside}" if others else ""),
        f"{summary['bad_shards']:,} shards with problems, "
        f"{sum(entry['count'] for entry in bad.values()):,} bad images",
    ]
    if bad:
        width = max(map(len, bad))
        lines += ["", "bad images"]
        lines += [
            f"  {code:{width}}  {entry['count']:>7,}  {_keys(entry['count'], entry['first'])}"
            for code, entry in bad.items()
        ]
    for shard in shards:
        notes = list(_notes(shard))
        if notes:
            lines += ["", printable(shard.url, 1000), *(f"  {note}" for note in notes)]
    return "\n".join(lines)


def _has_problems(shard: ShardReport) -> bool:
    """True if anything is lost or missing, cannot be decoded, or is ambiguous."""
    counts = shard.counts
    unread = counts["images"].where(counts["height"].isna(), 0)
    return bool(
        shard.unreadable
        or shard.damage
        or not shard.skipped.keys().isdisjoint(LINKS)
        or shard.bad
        or shard.duplicates
        or shard.repeated
        or (counts["images"] < counts["samples"]).any()
        or unread.any()
    )


def _facts(shard: ShardReport, decoded: bool) -> dict[str, Any]:
    counts = shard.counts
    images = counts[counts["member"] == IMAGE]
    others = counts[counts["member"] != IMAGE]
    pixels = images["height"] * images["width"] * images["images"]
    facts = {name: getattr(shard, name) for name in (*NUMBERS, *KEYS)}
    facts |= total_images(images)
    facts |= {
        "rgb_bytes": int(pixels.sum()) * 3,
        "baseline_jpegs": _baseline(images),
        "others": {kind: total_images(rows) for kind, rows in others.groupby("member", sort=False)},
        "skipped": {code: members.count for code, members in shard.skipped.items()},
    }
    if decoded:
        ordered = sorted(shard.bad.items(), key=lambda item: -item[1].count)
        facts["bad_images"] = {code: asdict(bad) for code, bad in ordered}
    return facts


def _baseline(images: pd.DataFrame) -> int | None:
    """Number of baseline JPEGs; None if it was not checked."""
    if images["baseline"].isna().any():
        return None
    return int(images["images"][images["baseline"].astype(bool)].sum())


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
    problems += [
        f"{number(summary[name], 'key')} {_PROBLEMS[name]}"
        for name in ("duplicates", "repeated")
        if summary[name]
    ]
    if errors := {code: bad["count"] for code, bad in summary.get("bad_images", {}).items()}:
        problems.append("errors: " + listing(errors))
    unknown = "none seen (nothing decoded)"
    return "; ".join(problems) or ("none" if "bad_images" in summary else unknown)


def _shard_row(shard: dict[str, Any], folder: str) -> dict[str, Any]:
    width, height = shard["sizes"].get("median", ("–", "–"))
    row = {
        "shard": shard["url"].removeprefix(folder),
        "samples": shard["samples"],
        "bytes": format_bytes(shard["bytes"]),
        "formats": listing(shard["formats"]),
        "median size": f"{width} × {height}",
        "unreadable": shard["unreadable_headers"],
    }
    if "bad_images" in shard:
        row["errors"] = sum(bad["count"] for bad in shard["bad_images"].values())
    return row


def _notes(shard: ShardReport) -> Iterator[str]:
    if shard.unreadable:
        yield f"unreadable: {shard.unreadable}"
    if shard.damage:
        yield f"{printable(shard.damage, 1000)} (the {shard.samples:,} samples before it are whole)"
    for code, bad in shard.bad.items():
        yield f"{bad.count:,} {code}: {_keys(bad.count, bad.first)} ({bad.detail})"
    for name, problem in _PROBLEMS.items():
        if keys := getattr(shard, name):
            yield f"{number(len(keys), 'key')} {problem}: {_keys(len(keys), keys[:3])}"
    for code, members in shard.skipped.items():
        yield (
            f"{number(members.count, 'member')} skipped: {SKIPPED[code]}, "
            f"first {printable(members.first[0])}"
        )
    if _has_problems(shard) and (shard.pax or shard.sparse):
        yield f"{shard.pax:,} members with a PAX header, {shard.sparse:,} sparse members"


def _keys(count: int, first: Sequence[str]) -> str:
    return ", ".join(map(printable, first)) + (" ..." if count > len(first) else "")
