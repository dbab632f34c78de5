"""A source shard → where the members of the chosen samples are.

A frame points to images; what else belongs to a sample is known by its shard. Each source is walked
once, by one task. Members that are no range of bytes of it (in a compressed shard, or stored with
holes) are written to a file of their own, so that whoever writes shards reads ranges and nothing
else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dask_image_ingest.dataset import IMAGE_EXTENSIONS, image_member
from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.export.arrow_files import read_batch
from dask_image_ingest.export.job import Job, Options, staged_name
from dask_image_ingest.export.place import Place
from dask_image_ingest.storage import Shard, find_shards, open_shard
from dask_image_ingest.tar import Sample, TarIndex, gc_paused, index_tar, read_member

__all__ = ["COLUMN", "EXPANDED", "MEMBER", "SOURCE", "Located", "locate", "version_of"]

#: Where a member's bytes are: in the source shard, in the file of expanded members, in a column.
SOURCE, EXPANDED, COLUMN = range(3)

#: One member. The offset of one from a column means nothing.
MEMBER = pa.struct(
    [
        pa.field("extension", pa.string()),
        pa.field("where", pa.int8()),
        pa.field("offset", pa.int64()),
        pa.field("size", pa.int64()),
    ]
)

# What the reader of sparse members takes.
LARGEST_MEMBER = 2**31 - 1

_IMAGES = IMAGE_EXTENSIONS.split(";")

# webdataset's skip_meta, which decides by the whole name.
_SKIPPED = re.compile(r"__[^/]*__($|/)")


@dataclass
class Located:
    """What was found in a source shard.

    Attributes
    ----------
    url, version
        The shard, and what changes when it does.
    rows
        For each row asked for, in order: ``members``, in the order of the source; ``image``, which
        of them is the image; ``reason`` why the row can't be exported, else null.
    expanded
        The file of expanded members, if there is one.
    damage
        What is wrong with the shard.
    interleaved
        How many samples' members lie apart in it.
    """

    url: str
    version: str
    rows: pa.Table
    expanded: str | None = None
    damage: str | None = None
    interleaved: int = 0

    @staticmethod
    def no_rows() -> pa.Table:
        """The rows of no shard."""
        return _table([])


def locate(source: tuple[int, str], job: Job) -> Located:
    """Find the members of the samples that a batch of pointers points to."""
    number, url = source
    wanted = read_batch(job.place, job.pointers, number)
    try:
        shard = find_shards(url, job.source_options)[0]
        with open_shard(url, job.source_options) as content:
            index = index_tar(content, url)
            with gc_paused():
                rows = _find_rows(index, wanted, job.options)
            # Where a stream was decompressed, there is more than is stored.
            stored = len(content) == shard.size
            rows, expanded = _expand(rows, content, index, stored, job.place)
    except (ShardError, ShardNotFoundError) as error:
        reason = f"unreadable-shard: {error}"
        return Located(url, "", _table([_Row(reason=reason)] * len(wanted)))
    damage = index.damage
    return Located(
        url,
        version_of(shard),
        _table(rows),
        expanded,
        None if damage is None else f"{damage.code}: {damage.reason}",
        len(index.interleaved),
    )


def version_of(shard: Shard) -> str:
    """What changes when a shard does."""
    return f"{shard.size} {shard.version}"


class _Row(NamedTuple):
    """One row: its members, which of them is the image, or why it can't be exported."""

    members: tuple[tuple[str, int, int, int], ...] = ()
    image: int | None = None
    reason: str | None = None


def _find_rows(index: TarIndex, wanted: pa.RecordBatch, options: Options) -> list[_Row]:
    columns = wanted.to_pydict()
    offsets = set(columns["offset"])
    keys = {k for k, o in zip(columns["key"], columns["offset"], strict=True) if o is None}
    by_offset: dict[int, Sample] = {}
    by_key: dict[str, list[Sample]] = {}
    for sample in index.samples:
        for span in sample.members.values():
            if span[0] in offsets:
                by_offset[span[0]] = sample
        if sample.key in keys:
            by_key.setdefault(sample.key, []).append(sample)
    made_sizes = [columns[f"made:{made.extension}"] for made in options.members.made]
    rows = []
    pointers = zip(columns["key"], columns["offset"], columns["nbytes"], strict=True)
    for number, (key, offset, nbytes) in enumerate(pointers):
        if offset is None:
            found = _without_pointer(by_key.get(key, ()), nbytes, index)
        else:
            found = _pointed_to(by_offset.get(offset), offset, nbytes)
        if isinstance(found, str):
            rows.append(_Row(reason=found))
            continue
        sample, image = found
        made = [sizes[number] for sizes in made_sizes]
        rows.append(_row(key, sample, image, made, options))
    return rows


def _pointed_to(
    sample: Sample | None, offset: int, nbytes: int | None
) -> tuple[Sample, str | None] | str:
    """The sample with a member at this place, and the extension of that member."""
    for extension, span in sample.members.items() if sample else ():
        if span[0] == offset and nbytes in (None, span[1]):
            return sample, extension  # type: ignore[return-value]
    return (
        f"lost-sample: its shard has no member of {nbytes} bytes at byte {offset}; has it changed "
        "since it was read?"
    )


def _without_pointer(
    samples: Sequence[Sample], nbytes: int | None, index: TarIndex
) -> tuple[Sample, str | None] | str:
    """The sample of a key that no place points to, by the size of its image if it has one.

    Its image is missing or stored with holes, or the sample has a member twice.
    """
    found = []
    for sample in samples:
        image = image_member(sample, _IMAGES)
        span = None if image is None else sample.members[image]
        if nbytes is None and len(samples) == 1:
            return sample, None
        size = None
        if span is not None and (sample.duplicates or span[0] in index.sparse):
            size = span[1]
        if size == nbytes:
            found.append((sample, image))
    if len(found) == 1:
        return found[0]
    if found:
        return "ambiguous-sample: its shard has several samples of this key without an image"
    return "lost-sample: its shard has no sample of this key without an image"


def _row(
    key: str, sample: Sample, image: str | None, made_sizes: list[int | None], options: Options
) -> _Row:
    members = options.members
    chosen = {
        extension: (extension, SOURCE, *span)
        for extension, span in sample.members.items()
        if members.keeps(extension) or extension in members.left_out
    }
    for made, size in zip(members.made, made_sizes, strict=True):
        if size is not None:  # in the place of one that the sample had, or last
            chosen[made.extension] = (made.extension, COLUMN, 0, size)
    made_now = {member[0] for member in chosen.values() if member[1] == COLUMN}
    chosen = {e: m for e, m in chosen.items() if e not in members.left_out or e in made_now}
    reason = _problem(key, chosen, options) or _ambiguous(
        [e for e in sample.duplicates if e in chosen and e not in made_now]
    )
    if reason:
        return _Row(reason=reason)
    order = list(chosen)
    return _Row(tuple(chosen.values()), order.index(image) if image in chosen else None)


def _problem(key: str, chosen: Collection[str], options: Options) -> str | None:
    """Why the members' names would not be read as they are written."""
    if not chosen:
        return "no-members: none of the members that are wanted"
    for extension in chosen:
        if not extension.isprintable() or "\\" in extension:
            return f"bad-extension: {extension!r} has characters that not every reader takes"
        if options.index and (not extension or any(map(str.isspace, extension))):
            return f"bad-extension: {extension!r} cannot stand in an index, where blanks separate"
        if key.startswith("__") and _SKIPPED.match(f"{key}.{extension}"):
            return f"bad-key: readers skip {key}.{extension}, as they do __this__"
    return None


def _ambiguous(extensions: list[str]) -> str | None:
    if not extensions:
        return None
    what = ", ".join(sorted(extensions))
    return f"duplicate-member: its sample has more than one {what}; which is meant?"


def _expand(
    rows: list[_Row], content: Any, index: TarIndex, stored: bool, place: Place
) -> tuple[list[_Row], str | None]:
    """Write members that are no ranges of what is stored to a file, and point there."""
    if stored and not index.sparse:
        return rows, None
    name = staged_name("expanded")
    end = 0
    moved = []
    with place.scratch() as file:
        for row in rows:
            members = []
            for extension, where, offset, size in row.members:
                if size and where == SOURCE and (not stored or offset in index.sparse):
                    if offset in index.sparse and size > LARGEST_MEMBER:
                        row = _Row(reason=f"too-large: a sparse member of {size} bytes")
                        break
                    file.write(read_member(content, index, (offset, size)))
                    where, offset, end = EXPANDED, end, end + size
                members.append((extension, where, offset, size))
            else:
                row = row._replace(members=tuple(members))
            moved.append(row)
        if end:
            place.commit(file, name)
    return moved, name if end else None


def _table(rows: list[_Row]) -> pa.Table:
    members = [member for row in rows for member in row.members]
    ends = np.cumsum([0, *(len(row.members) for row in rows)], dtype=np.int32)
    fields = list(zip(*members, strict=True)) or [()] * len(MEMBER)
    arrays = [pa.array(values, field.type) for values, field in zip(fields, MEMBER, strict=True)]
    return pa.table(
        {
            "members": pa.ListArray.from_arrays(
                pa.array(ends), pa.StructArray.from_arrays(arrays, fields=list(MEMBER))
            ),
            "image": pa.array([row.image for row in rows], pa.int32()),
            "reason": pa.array([row.reason for row in rows], pa.string()),
        }
    )
