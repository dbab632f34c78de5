"""Reports on shards and collections, for `describe` and `check`: headers; decodes on request."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from dask.utils import format_bytes

from dask_image_ingest.dataset import ReadOptions
from dask_image_ingest.dataset.scan import NoPixels, SampleRows
from dask_image_ingest.dataset.schema import ImageMember, parse_image_extensions
from dask_image_ingest.decode import (
    MAX_PIXELS,
    DecodeSpec,
    Mode,
    decode,
    has_several_pages,
    is_baseline_jpeg,
    printable,
)
from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.image_counts import IMAGE, add_counts, count_images, total_images
from dask_image_ingest.storage import open_shard
from dask_image_ingest.tar import IMAGE_EXTENSIONS, LINKS, ShardIndex, index_tar
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


#: How many keys a report names for one problem.
NAMED = 3

# Kinds of further images that are inspected: if keys contain dots, every member may be of its own.
_MOST_KINDS = 64

# Attributes of `ShardReport` that are numbers, and lists of keys.
NUMBERS = ("samples", "members", "pax", "sparse")
KEYS = ("duplicates", "repeated", "interleaved")

# Check further images in any mode: nobody has said what they are.
_AS_STORED = DecodeSpec(max_pixels=MAX_PIXELS, mode="raw")


@dataclass(slots=True)
class Finding:
    """Images or members with the same problem."""

    count: int = 0
    first: list[str] = field(default_factory=list)  # keys or names, at most `NAMED`
    detail: str = ""  # the error's details for the first one

    def add(self, other: Finding) -> None:
        """Add more of them."""
        self.detail = self.detail or other.detail
        self.count += other.count
        self.first = [*self.first, *other.first][:NAMED]


@dataclass(slots=True)
class ShardReport:
    """Findings on one shard, or on several together."""

    url: str  # without secrets
    unreadable: str | None = None  # why it cannot be read at all
    damage: str | None = None  # what is lost, and why
    samples: int = 0
    members: int = 0
    #: Images by header, of `count_images`.
    counts: pd.DataFrame = field(default_factory=lambda: count_images(pd.DataFrame()))
    #: Error code → the decoded images that have it.
    bad: dict[str, Finding] = field(default_factory=dict)
    #: Keys of samples that have a member twice, of several samples, and of samples whose members
    #: are not adjacent, so that webdataset would split them.
    duplicates: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    interleaved: list[str] = field(default_factory=list)
    #: Numbers of members with a PAX header, and of sparse ones, which some readers reject.
    pax: int = 0
    sparse: int = 0
    #: Code → members that are not read, as in `ShardIndex`; and ``many-kinds``, not inspected.
    skipped: dict[str, Finding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.url = without_secrets(self.url)


def merge_reports(shards: Sequence[ShardReport]) -> ShardReport:
    """Findings on all shards together."""
    total = ShardReport("", counts=add_counts(shard.counts for shard in shards))
    for shard in shards:
        for name in (*NUMBERS, *KEYS):
            setattr(total, name, getattr(total, name) + getattr(shard, name))
        for name in ("bad", "skipped"):
            for code, finding in getattr(shard, name).items():
                getattr(total, name).setdefault(code, Finding()).add(finding)
    return total


def inspect_shard(
    url: str,
    image: str | None,
    mode: Mode,
    decode_too: bool,
    storage_options: dict[str, str] | None = None,
) -> ShardReport:
    """Report on a shard: read the headers of its images, and decode them with ``decode_too``.

    ``image`` has the extensions of the samples' image, to inspect only that, decoded in ``mode``;
    by default those of a read, and all further images of each sample.
    """
    extensions = parse_image_extensions(image or IMAGE_EXTENSIONS)
    first = ImageMember("image", extensions, DecodeSpec(max_pixels=MAX_PIXELS, mode=mode))
    try:
        with open_shard(url, storage_options) as content:
            index = index_tar(content, url)
            rows = SampleRows(url, content, index, ReadOptions((first,)))
            report = _report_of_index(url, index, rows)
            images = [(IMAGE, first, rows.numbers)]
            if image is None:
                images += _other_images(index, extensions, report)
            if decode_too:
                for images_of_kind in images:
                    _decode(report, rows, *images_of_kind)
            report.counts = add_counts(_count(rows, *images_of_kind) for images_of_kind in images)
    except (ShardError, ShardNotFoundError) as error:
        return ShardReport(url, unreadable=printable(str(error), 1000))
    return report


def report_of_table(table: pd.DataFrame, name: str) -> ShardReport:
    """Report on images outside of shards; their column ``error`` exists if they were decoded."""
    report = ShardReport(name, samples=len(table), members=len(table))
    report.counts = count_images(table.drop(columns="error", errors="ignore"))
    keys = table["__key__"] if "__key__" in table else table.index.astype(str)
    for key, error in zip(keys, table.get("error", ()), strict=False):
        if pd.notna(error):
            _add(report, str(key), error)
    return report


def _report_of_index(url: str, index: ShardIndex, rows: SampleRows) -> ShardReport:
    return ShardReport(
        url,
        damage=None if index.damage is None else str(index.damage),
        samples=len(index),
        members=index.members,
        duplicates=rows.keys(np.array(sorted(index.duplicates), np.int64)),
        repeated=list(index.repeated),
        interleaved=list(index.interleaved),
        pax=index.pax,
        sparse=len(index.sparse),
        skipped={code: Finding(n, [first]) for code, (n, first) in index.skipped.items()},
    )


def _other_images(
    index: ShardIndex, extensions: tuple[str, ...], report: ShardReport
) -> Iterator[tuple[str, ImageMember, np.ndarray]]:
    """Further images: members with an image's suffix that are not their sample's image, by kind.

    Gives for each kind the numbers of the samples that have one.

    Kinds beyond the first `_MOST_KINDS` are counted in the report as skipped.
    """
    suffixes = frozenset(parse_image_extensions(IMAGE_EXTENSIONS))
    kinds = [k for k in index.not_preferred(extensions) if k.rpartition(".")[2] in suffixes]
    if others := kinds[_MOST_KINDS:]:
        count = sum(len(index.places(kind).rows) for kind in others)
        report.skipped["many-kinds"] = Finding(count, others[:1])
    for kind in kinds[:_MOST_KINDS]:
        present = index.has(kind)
        if kind in extensions:
            # It is further only where the sample has a member of a preferred extension.
            present = pc.and_(present, index.has(*extensions[: extensions.index(kind)]))
        yield kind, ImageMember(kind, (kind,), _AS_STORED), np.flatnonzero(present)


def _decode(
    report: ShardReport, rows: SampleRows, kind: str, member: ImageMember, numbers: np.ndarray
) -> None:
    (pixels,) = decode(rows.images(member, numbers), [member.decoding], [NoPixels()])
    suffix = "" if kind == IMAGE else f".{kind}"
    for key, error in zip(rows.keys(numbers), pixels.errors, strict=True):
        # A duplicate member is an error of its whole sample: count it once, for its image.
        if error is not None and not (suffix and error.startswith("duplicate-member")):
            _add(report, f"{key}{suffix}", error)


def _add(report: ShardReport, key: str, error: str) -> None:
    code, _, detail = error.partition(": ")
    report.bad.setdefault(code, Finding()).add(Finding(1, [key], detail))


def _count(rows: SampleRows, kind: str, member: ImageMember, numbers: np.ndarray) -> pd.DataFrame:
    names = ("format", "height", "width", "nbytes")
    table = pa.table({name: rows.field(member, name, numbers) for name in names})
    headers, opened = rows.headers(member, numbers), rows.opened(member, numbers)
    baseline, paged = [], []
    for header, data in zip(headers, opened, strict=True):
        baseline.append(header.format == "jpeg" and is_baseline_jpeg(data))
        paged.append(has_several_pages(data, header.format))
    return count_images(table.to_pandas().assign(baseline=baseline, paged=paged), kind)


_PROBLEMS = {
    "duplicates": "with a member twice",
    "repeated": "in more than one sample",
    "interleaved": "with members apart from each other",
}


def summarize_shards(shards: Sequence[ShardReport], decoded: bool) -> dict[str, Any]:
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
        "baseline_jpegs": _checked(images, "baseline"),
        "tiffs_of_several_pages": _checked(images, "paged"),
        "others": {kind: total_images(rows) for kind, rows in others.groupby("member", sort=False)},
        "skipped": {code: members.count for code, members in shard.skipped.items()},
    }
    if decoded:
        ordered = sorted(shard.bad.items(), key=lambda item: -item[1].count)
        facts["bad_images"] = {code: asdict(bad) for code, bad in ordered}
    return facts


def _checked(images: pd.DataFrame, name: str) -> int | None:
    """Number of images for which a check is true; None if it was not made."""
    if images[name].isna().any():
        return None
    return int(images["images"][images[name].astype(bool)].sum())


def _formats(summary: dict[str, Any]) -> str:
    jpegs, baseline = summary["formats"].get("jpeg", 0), summary["baseline_jpegs"]
    text = listing(summary["formats"])
    # Worth knowing: hardware decoders take baseline JPEGs only.
    has_others = baseline is not None and baseline < jpegs
    text += f" ({baseline:,} of the jpeg are baseline)" if has_others else ""
    paged = summary["tiffs_of_several_pages"]
    return text + (f" ({paged:,} of the tiff have several pages)" if paged else "")


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
