"""A shard's health: what `dask-image-ingest check` finds, and how it tells people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dask.utils import format_bytes

from dask_image_ingest.dataset import NoPixels, ReadOptions, SampleRows
from dask_image_ingest.decode import decode, printable
from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.report.hardware import hardware_in_words, hardware_summary, not_in_hardware
from dask_image_ingest.report.shard_rows import OPTIONS, open_rows, other_images, others_in_words
from dask_image_ingest.tar import ShardIndex

# Keys that are named of those that share a problem.
_NAMED = 3


@dataclass(slots=True)
class Bad:
    """Images that are bad for one reason.

    Attributes
    ----------
    count
        How many there are.
    first
        The keys of the first ones.
    detail
        What is said of the very first one.
    """

    count: int = 0
    first: list[str] = field(default_factory=list)
    detail: str = ""

    def add(self, key: str, detail: str) -> None:
        """Count one more."""
        self.detail = self.detail or detail
        self.count += 1
        if len(self.first) < _NAMED:
            self.first.append(key)


@dataclass(slots=True)
class ShardHealth:
    """Health of one shard.

    Attributes
    ----------
    url
        The shard.
    unreadable
        Why it can't be read at all; None if it can.
    damage
        What of it is lost, and why; None if nothing is.
    samples, members, bytes
        How many there are; bytes are those of the images.
    bad
        Code of an error → the images that have it.
    duplicates
        Samples that have a member twice.
    repeated
        The keys of more than one sample.
    interleaved
        Keys whose members do not lie side by side, and which webdataset would split.
    hardware
        How many images a hardware JPEG decoder takes, and the others by reason.
    pax, sparse
        Members with a PAX header, and members stored with holes: sound, yet not read everywhere.
    others
        Images that were not looked at, by their extension.
    """

    url: str
    unreadable: str | None = None
    damage: str | None = None
    samples: int = 0
    members: int = 0
    bytes: int = 0
    bad: dict[str, Bad] = field(default_factory=dict)
    duplicates: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    interleaved: list[str] = field(default_factory=list)
    hardware: dict[str, Any] = field(default_factory=lambda: hardware_summary(0, {}))
    pax: int = 0
    sparse: int = 0
    others: dict[str, int] = field(default_factory=dict)

    @property
    def is_bad(self) -> bool:
        """True if anything is lost, cannot be decoded, or is ambiguous."""
        return bool(self.unreadable or self.damage or self.bad or self.duplicates or self.repeated)


def check_shard(
    url: str, storage_options: dict[str, Any] | None = None, options: ReadOptions = OPTIONS
) -> ShardHealth:
    """Read a shard from end to end, decode the image of each sample, keep none."""
    try:
        with open_rows(url, storage_options, options) as (rows, index):
            decoding = options.decoding
            pixels = decode(rows.headers, rows.image_bytes, decoding, NoPixels(), rows.origin)
            health = _health(rows, index, pixels.errors)
            health.others = other_images(index, options)
            return health
    except (ShardError, ShardNotFoundError) as error:
        return ShardHealth(url, unreadable=printable(str(error), 1000))


def in_total(shards: Sequence[ShardHealth]) -> dict[str, Any]:
    """The report for machines: totals, and all that is known of each shard."""
    return {
        "shards": len(shards),
        "bad_shards": sum(shard.is_bad for shard in shards),
        "unreadable": [shard.url for shard in shards if shard.unreadable],
        "damaged": [shard.url for shard in shards if shard.damage],
        **{name: sum(getattr(shard, name) for shard in shards) for name in _COUNTS},
        **{name: sum(len(getattr(shard, name)) for shard in shards) for name in _LISTS},
        "hardware": _hardware_in_total(shards),
        "others": _others_in_total(shards),
        "bad_images": {code: asdict(bad) for code, bad in _bad_in_total(shards).items()},
        "per_shard": [asdict(shard) for shard in shards],
    }


def in_words(shards: Sequence[ShardHealth]) -> str:
    """The report for people: totals, bad images by reason, and each shard that is not sound."""
    bad = _bad_in_total(shards)
    samples = sum(shard.samples for shard in shards)
    nbytes = sum(shard.bytes for shard in shards)
    lines = [
        f"{len(shards):,} shards, {samples:,} samples, {format_bytes(nbytes)} of images",
        f"{sum(shard.is_bad for shard in shards):,} shards with problems, "
        f"{sum(entry.count for entry in bad.values()):,} bad images",
        hardware_in_words(_hardware_in_total(shards)),
    ]
    if others := _others_in_total(shards):
        lines.append(others_in_words(others))
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


_COUNTS = ("samples", "members", "bytes", "pax", "sparse")
_LISTS = ("duplicates", "repeated", "interleaved")


def _health(rows: SampleRows, index: ShardIndex, errors: Iterable[str | None]) -> ShardHealth:
    bad: dict[str, Bad] = {}
    for key, error in zip(rows.keys, errors, strict=True):
        if error is not None:
            code, _, detail = error.partition(": ")
            bad.setdefault(code, Bad()).add(key, detail)
    damage = index.damage
    return ShardHealth(
        rows.url,
        damage=None if damage is None else f"{damage.code}: {damage.reason}",
        samples=len(index),
        members=index.members,
        bytes=sum(span[1] for span in rows.spans if span is not None),
        bad=bad,
        duplicates=[rows.keys[row] for row in sorted(index.duplicates)],
        repeated=list(index.repeated),
        interleaved=list(index.interleaved),
        hardware=_hardware(rows),
        pax=index.pax,
        sparse=len(index.sparse),
    )


def _hardware(rows: SampleRows) -> dict[str, Any]:
    others = Counter(why for why in not_in_hardware(rows) if why is not None)
    images = sum(span is not None for span in rows.spans)
    return hardware_summary(images, others)


def _hardware_in_total(shards: Sequence[ShardHealth]) -> dict[str, Any]:
    others: Counter[str] = Counter()
    for shard in shards:
        others.update(shard.hardware["others"])
    images = sum(shard.hardware["of"] for shard in shards)
    return hardware_summary(images, others)


def _others_in_total(shards: Sequence[ShardHealth]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for shard in shards:
        total.update(shard.others)
    return dict(total.most_common())


def _bad_in_total(shards: Sequence[ShardHealth]) -> dict[str, Bad]:
    """Bad images of all shards by reason, the most frequent reason first."""
    total: dict[str, Bad] = {}
    for shard in shards:
        for code, bad in shard.bad.items():
            whole = total.setdefault(code, Bad(detail=bad.detail))
            whole.count += bad.count
            whole.first = [*whole.first, *bad.first][:_NAMED]
    return dict(sorted(total.items(), key=lambda entry: -entry[1].count))


def _notes(shard: ShardHealth) -> Iterable[str]:
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
            yield f"{len(keys):,} keys {what}: {_named(Bad(len(keys), keys[:_NAMED]))}"
    if shard.is_bad and (shard.pax or shard.sparse):
        yield f"{shard.pax:,} members with a PAX header, {shard.sparse:,} sparse members"


def _named(bad: Bad) -> str:
    more = " ..." if bad.count > len(bad.first) else ""
    return ", ".join(printable(key) for key in bad.first) + more
