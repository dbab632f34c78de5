"""Report of a shard, for `describe` and `check`: the headers of all images, decoded on request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from dask_image_ingest.dataset import (
    ImageMember,
    NoPixels,
    ReadOptions,
    SampleRows,
    parse_image_extensions,
)
from dask_image_ingest.decode import (
    MAX_PIXELS,
    DecodeSpec,
    Mode,
    decode,
    is_baseline_jpeg,
    printable,
)
from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.storage import open_shard
from dask_image_ingest.tar import IMAGE_EXTENSIONS, ShardIndex, index_tar

#: Keys that are named of those that share a problem.
NAMED = 3

#: The image of a sample among its members.
IMAGE = "image"

# What an image beside that of its sample is checked as: whatever can be stored is fine.
_AS_STORED = DecodeSpec(max_pixels=MAX_PIXELS, mode="raw")


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
        if len(self.first) < NAMED:
            self.first.append(key)


@dataclass(slots=True)
class ShardReport:
    """Findings of one shard.

    Attributes
    ----------
    url
        The shard.
    unreadable
        Why it can't be read at all; None if it can.
    damage
        What of it is lost, and why; None if nothing is.
    samples, members
        How many there are.
    counts
        A row for each distinct kind of member (``image`` for that of the sample), format, height,
        width, and whether it is a baseline JPEG: how many samples and images, and their bytes.
    bad
        Code of an error → the images that have it, of those that were decoded.
    duplicates
        Samples that have a member twice.
    repeated
        The keys of more than one sample.
    interleaved
        Keys whose members do not lie side by side, and which webdataset would split.
    pax, sparse
        Members with a PAX header, and members stored with holes: sound, yet not read everywhere.
    """

    url: str
    unreadable: str | None = None
    damage: str | None = None
    samples: int = 0
    members: int = 0
    counts: pd.DataFrame = field(default_factory=lambda: _counted([]))
    bad: dict[str, Bad] = field(default_factory=dict)
    duplicates: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    interleaved: list[str] = field(default_factory=list)
    pax: int = 0
    sparse: int = 0


def look_at_shard(
    url: str,
    image: str | None,
    mode: Mode,
    decode_too: bool,
    storage_options: dict[str, str] | None = None,
) -> ShardReport:
    """Read the headers of a shard's images; decode them too, if asked, and keep none.

    Parameters
    ----------
    image
        The extensions of a sample's image, which alone is looked at. None: those of a read, and all
        other images of each sample as well.
    mode
        What the pixels of the sample's image are meant to be.

    Raises
    ------
    ArgumentError
        If ``image`` is no extension.
    """
    extensions = parse_image_extensions(image or IMAGE_EXTENSIONS)
    options = ReadOptions(extensions, DecodeSpec(max_pixels=MAX_PIXELS, mode=mode))
    try:
        with open_shard(url, storage_options) as content:
            index = index_tar(content, url)
            rows = SampleRows(url, content, index, options)
            report = _of_index(url, index, rows)
            images = [(IMAGE, options.decoding, rows)]
            if image is None:
                images += _other_images(index, rows, extensions)
            for kind, decoding, some in images:
                if decode_too:
                    _decode(report, kind, decoding, some)
            report.counts = _counted([_told(kind, some) for kind, _, some in images])
    except (ShardError, ShardNotFoundError) as error:
        return ShardReport(url, unreadable=printable(str(error), 1000))
    return report


def report_of_table(table: pd.DataFrame, name: str) -> ShardReport:
    """The report of images that are in no shard: ``error`` is a column if they were decoded."""
    report = ShardReport(name, samples=len(table), members=len(table))
    # The first bytes tell no more.
    report.counts = _counted([table.assign(member=IMAGE, baseline=pd.NA)])
    keys = table["__key__"] if "__key__" in table else table.index.astype(str)
    for key, error in zip(keys, table.get("error", ()), strict=False):
        if pd.notna(error):
            _add(report, str(key), error)
    return report


def _of_index(url: str, index: ShardIndex, rows: SampleRows) -> ShardReport:
    damage = index.damage
    return ShardReport(
        url,
        damage=None if damage is None else f"{damage.code}: {damage.reason}",
        samples=len(index),
        members=index.members,
        duplicates=[rows.keys[row] for row in sorted(index.duplicates)],
        repeated=list(index.repeated),
        interleaved=list(index.interleaved),
        pax=index.pax,
        sparse=len(index.sparse),
    )


def _other_images(
    index: ShardIndex, rows: SampleRows, extensions: tuple[str, ...]
) -> Iterator[tuple[str, DecodeSpec, SampleRows]]:
    """Members with an image's suffix that are not their sample's image, kind by kind."""
    suffixes = frozenset(parse_image_extensions(IMAGE_EXTENSIONS))
    for kind in index.not_preferred(extensions):
        if kind.rpartition(".")[2] in suffixes:
            there = index.has(kind)
            if kind in extensions:
                there = pc.and_(there, index.has(*extensions[: extensions.index(kind)]))
            some = rows.take(np.flatnonzero(there))
            yield kind, _AS_STORED, some.of(ImageMember(kind, (kind,), _AS_STORED))


def _decode(report: ShardReport, kind: str, decoding: DecodeSpec, rows: SampleRows) -> None:
    pixels = decode(rows.headers, rows.image_bytes, decoding, NoPixels(), rows.origin)
    suffix = "" if kind == IMAGE else f".{kind}"
    for key, error in zip(rows.keys, pixels.errors, strict=True):
        # Of a sample that has a member twice the image says it.
        if error is not None and not (suffix and error.startswith("duplicate-member")):
            _add(report, f"{key}{suffix}", error)


def _add(report: ShardReport, key: str, error: str) -> None:
    code, _, detail = error.partition(": ")
    report.bad.setdefault(code, Bad()).add(key, detail)


def _told(kind: str, rows: SampleRows) -> pd.DataFrame:
    """Facts of the headers of images, a row for each."""
    table = rows.table(["format", "height", "width", "nbytes"])
    frame = table.to_pandas(types_mapper=pd.ArrowDtype)
    baseline = [
        header.format == "jpeg" and is_baseline_jpeg(rows.opened(row))
        for row, header in enumerate(rows.headers)
    ]
    return frame.assign(member=kind, baseline=baseline)


def _counted(told: list[pd.DataFrame]) -> pd.DataFrame:
    columns = ["member", "format", "height", "width", "baseline"]
    frame = pd.concat(told) if told else pd.DataFrame(columns=[*columns, "nbytes"])
    groups = frame.groupby(columns, dropna=False, observed=True, sort=False)["nbytes"]
    return groups.agg(samples="size", images="count", nbytes="sum").reset_index()
