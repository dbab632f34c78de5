"""The health of shards: what `dask-image-ingest check` finds, and how it tells people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from dask.utils import format_bytes

from dask_image_ingest.decode import printable
from dask_image_ingest.report.shard_report import IMAGE, NAMED, Bad, ShardReport
from dask_image_ingest.report.text import listing

_COUNTS = ("samples", "members", "pax", "sparse")
_LISTS = ("duplicates", "repeated", "interleaved")


def has_problems(shard: ShardReport) -> bool:
    """True if anything is lost, cannot be decoded, or is ambiguous."""
    return bool(shard.unreadable or shard.damage or shard.bad or shard.duplicates or shard.repeated)


def in_total(shards: Sequence[ShardReport]) -> dict[str, Any]:
    """The report for machines: totals, and all that is known of each shard."""
    return {
        "shards": len(shards),
        "bad_shards": sum(map(has_problems, shards)),
        "unreadable": [shard.url for shard in shards if shard.unreadable],
        "damaged": [shard.url for shard in shards if shard.damage],
        **{name: sum(getattr(shard, name) for shard in shards) for name in _COUNTS},
        **_images(shards),
        **{name: sum(len(getattr(shard, name)) for shard in shards) for name in _LISTS},
        "bad_images": {code: asdict(bad) for code, bad in _bad_in_total(shards).items()},
        "per_shard": [_told(shard) for shard in shards],
    }


def in_words(shards: Sequence[ShardReport]) -> str:
    """The report for people: totals, bad images by reason, and each shard that is not sound."""
    bad = _bad_in_total(shards)
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
            f"  {code:{width}}  {entry.count:>7,}  {_named(entry)}" for code, entry in bad.items()
        ]
    for shard in shards:
        notes = list(_notes(shard))
        if notes:
            lines += ["", printable(shard.url, 1000), *(f"  {note}" for note in notes)]
    return "\n".join(lines)


def _images(shards: Sequence[ShardReport]) -> dict[str, Any]:
    """The bytes of all images, and how many lie beside the image of their sample, by extension."""
    others: Counter[str] = Counter()
    for shard in shards:
        counts = shard.counts.groupby("member")["images"].sum()
        others.update({kind: int(n) for kind, n in counts.items() if kind != IMAGE})
    nbytes = sum(int(shard.counts["nbytes"].sum()) for shard in shards)
    return {"bytes": nbytes, "others": dict(others.most_common())}


def _told(shard: ShardReport) -> dict[str, Any]:
    facts = {name: getattr(shard, name) for name in ("url", "unreadable", "damage")}
    facts |= {name: getattr(shard, name) for name in (*_COUNTS, *_LISTS)}
    return facts | _images([shard]) | {"bad": {code: asdict(b) for code, b in shard.bad.items()}}


def _bad_in_total(shards: Sequence[ShardReport]) -> dict[str, Bad]:
    """Bad images of all shards by reason, the most frequent reason first."""
    total: dict[str, Bad] = {}
    for shard in shards:
        for code, bad in shard.bad.items():
            whole = total.setdefault(code, Bad(detail=bad.detail))
            whole.count += bad.count
            whole.first = [*whole.first, *bad.first][:NAMED]
    return dict(sorted(total.items(), key=lambda entry: -entry[1].count))


def _notes(shard: ShardReport) -> Iterable[str]:
    if shard.unreadable:
        yield f"unreadable: {shard.unreadable}"
    if shard.damage:
        yield f"{printable(shard.damage, 1000)} (the {shard.samples:,} samples before it are whole)"
    for code, bad in shard.bad.items():
        yield f"{bad.count:,} {code}: {_named(bad)} ({bad.detail})"
    for what, keys in (
        ("with a member twice", shard.duplicates),
        ("that occur more than once", shard.repeated),
        ("with members apart from each other", shard.interleaved),
    ):
        if keys:
            yield f"{len(keys):,} keys {what}: {_named(Bad(len(keys), keys[:NAMED]))}"
    if has_problems(shard) and (shard.pax or shard.sparse):
        yield f"{shard.pax:,} members with a PAX header, {shard.sparse:,} sparse members"


def _named(bad: Bad) -> str:
    more = " ..." if bad.count > len(bad.first) else ""
    return ", ".join(printable(key) for key in bad.first) + more
