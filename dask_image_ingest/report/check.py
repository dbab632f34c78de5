"""Health of shards: the report of `dask-image-ingest check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from dask.utils import format_bytes

from dask_image_ingest.decode import printable
from dask_image_ingest.report.shard_report import IMAGE, NAMED, Bad, ShardReport
from dask_image_ingest.report.text import SKIPPED, listing, number, skipped_counts

_COUNTS = ("samples", "members", "pax", "sparse")
_LISTS = ("duplicates", "repeated", "interleaved")


def has_problems(shard: ShardReport) -> bool:
    """True if anything is lost, cannot be decoded, or is ambiguous."""
    lost = shard.unreadable or shard.damage or shard.has_links
    return bool(lost or shard.bad or shard.duplicates or shard.repeated)


def check_summary(shards: Sequence[ShardReport]) -> dict[str, Any]:
    """The report as plain data: totals, and the findings of each shard."""
    return {
        "shards": len(shards),
        "bad_shards": sum(map(has_problems, shards)),
        "unreadable": [shard.url for shard in shards if shard.unreadable],
        "damaged": [shard.url for shard in shards if shard.damage],
        **{name: sum(getattr(shard, name) for shard in shards) for name in _COUNTS},
        **_images(shards),
        **{name: sum(len(getattr(shard, name)) for shard in shards) for name in _LISTS},
        "skipped": skipped_counts(shards),
        "bad_images": {code: asdict(bad) for code, bad in _merge_bad(shards).items()},
        "per_shard": [_shard_summary(shard) for shard in shards],
    }


def check_text(shards: Sequence[ShardReport]) -> str:
    """The report as text: totals, bad images by reason, and the problems of each shard."""
    bad = _merge_bad(shards)
    samples = sum(shard.samples for shard in shards)
    images = _images(shards)
    others = {printable(kind): count for kind, count in images["others"].items()}
    lines = [
        f"{len(shards):,} shards, {samples:,} samples, {format_bytes(images['bytes'])} of images"
        + (f", with those beside the first: {listing(others)}" if others else ""),
        f"{sum(map(has_problems, shards)):,} shards with problems, "
        f"{sum(entry.count for entry in bad.values()):,} bad images",
    ]
    if bad:
        width = max(map(len, bad))
        lines += ["", "bad images"]
        lines += [
            f"  {code:{width}}  {entry.count:>7,}  {_keys_text(entry)}"
            for code, entry in bad.items()
        ]
    for shard in shards:
        notes = list(_notes(shard))
        if notes:
            lines += ["", printable(shard.url, 1000), *(f"  {note}" for note in notes)]
    return "\n".join(lines)


def _images(shards: Sequence[ShardReport]) -> dict[str, Any]:
    """Bytes of all images; and counts, by extension, of those beside the samples' own image."""
    others: Counter[str] = Counter()
    for shard in shards:
        counts = shard.counts.groupby("member")["images"].sum()
        others.update({kind: int(n) for kind, n in counts.items() if kind != IMAGE})
    nbytes = sum(int(shard.counts["nbytes"].sum()) for shard in shards)
    return {"bytes": nbytes, "others": dict(others.most_common())}


def _shard_summary(shard: ShardReport) -> dict[str, Any]:
    facts = {name: getattr(shard, name) for name in ("url", "unreadable", "damage")}
    facts |= {name: getattr(shard, name) for name in (*_COUNTS, *_LISTS)}
    facts["skipped"] = skipped_counts([shard])
    return facts | _images([shard]) | {"bad": {code: asdict(b) for code, b in shard.bad.items()}}


def _merge_bad(shards: Sequence[ShardReport]) -> dict[str, Bad]:
    """Bad images of all shards by reason, the most frequent reason first."""
    total: dict[str, Bad] = {}
    for shard in shards:
        for code, bad in shard.bad.items():
            entry = total.setdefault(code, Bad(detail=bad.detail))
            entry.count += bad.count
            entry.first = [*entry.first, *bad.first][:NAMED]
    return dict(sorted(total.items(), key=lambda item: -item[1].count))


def _notes(shard: ShardReport) -> Iterable[str]:
    if shard.unreadable:
        yield f"unreadable: {shard.unreadable}"
    if shard.damage:
        yield f"{printable(shard.damage, 1000)} (the {shard.samples:,} samples before it are whole)"
    for code, bad in shard.bad.items():
        yield f"{bad.count:,} {code}: {_keys_text(bad)} ({bad.detail})"
    for problem, keys in (
        ("with a member twice", shard.duplicates),
        ("that occur more than once", shard.repeated),
        ("with members apart from each other", shard.interleaved),
    ):
        if keys:
            yield f"{len(keys):,} keys {problem}: {_keys_text(Bad(len(keys), keys[:NAMED]))}"
    for code, members in shard.skipped.items():
        yield (
            f"{number(members.number, 'member')} skipped: {SKIPPED[code]}, "
            f"first {printable(members.first)}"
        )
    if has_problems(shard) and (shard.pax or shard.sparse):
        yield f"{shard.pax:,} members with a PAX header, {shard.sparse:,} sparse members"


def _keys_text(bad: Bad) -> str:
    more = " ..." if bad.count > len(bad.first) else ""
    return ", ".join(printable(key) for key in bad.first) + more
