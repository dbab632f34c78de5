"""Member selection: the members of a shard's samples that are exported, or reasons why none are."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.dataset import image_member
from dask_image_ingest.export.options import Options
from dask_image_ingest.tar import IMAGE_EXTENSIONS, Sample, ShardIndex, duplicate_error

#: Where a member's bytes are: in the source shard, in the file of expanded members, in a column.
SOURCE, EXPANDED, COLUMN = range(3)

#: One member. The offset of one from a column means nothing.
_MEMBER = pa.struct(
    [
        pa.field("extension", pa.string()),
        pa.field("where", pa.int8()),
        pa.field("offset", pa.int64()),
        pa.field("size", pa.int64()),
    ]
)

# What is told of each row beside its members.
_FIELDS = {
    "image": pa.int32(),
    "reason": pa.string(),
}

_IMAGES = IMAGE_EXTENSIONS.split(";")

# webdataset's skip_meta, which decides by the whole name.
_SKIPPED = re.compile(r"__[^/]*__($|/)")


class Row(NamedTuple):
    """The members selected for one row, or the reason why there are none.

    A member is its extension, where its bytes are, at which offset, and how many.
    """

    members: tuple[tuple[str, int, int, int], ...] = ()
    image: int | None = None
    reason: str | None = None


def select_members(
    index: ShardIndex, wanted: pa.RecordBatch, options: Options
) -> tuple[list[Row], bool]:
    """The members that the sample of each pointer gets, and whether any key is not the shard's."""
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
    rows, renamed = [], False
    pointers = zip(columns["key"], columns["offset"], columns["nbytes"], strict=True)
    for number, (key, offset, nbytes) in enumerate(pointers):
        if offset is None:
            found = _without_pointer(by_key.get(key, ()), nbytes, index)
            renamed |= key not in by_key
        else:
            found = _pointed_to(by_offset.get(offset), offset, nbytes)
        if isinstance(found, str):
            rows.append(Row(reason=found))
            continue
        renamed |= found[0].key != key
        made = [sizes[number] for sizes in made_sizes]
        rows.append(_chosen(key, *found, made, options))
    return rows, renamed


def select_made(wanted: pa.RecordBatch, options: Options) -> list[Row]:
    """The members of rows that belong to no sample of a shard: all are made of columns."""
    columns = wanted.to_pydict()
    sizes = [columns[f"made:{made.extension}"] for made in options.members.made]
    return [
        Row(reason="no-pointer: its __key__ is null")
        if key is None
        else _chosen(key, Sample(key, {}), None, [each[number] for each in sizes], options)
        for number, key in enumerate(columns["key"])
    ]


def select_stored(
    index: ShardIndex, wanted: pa.RecordBatch, options: Options
) -> tuple[pa.Table, bool] | None:
    """`select_members` for all rows at once, as `tabulated` gives them.

    None if any row needs a closer look: one whose members are not all stored as they are written,
    or that can't be exported.
    """
    pointers, keys = wanted.column("offset"), wanted.column("key")
    needs_a_look = index.duplicates or index.sparse or options.members.made
    if needs_a_look or pointers.null_count or pc.any(pc.starts_with(keys, "_")).as_py():
        return None
    kinds = index.extensions
    kept = np.array([options.members.keeps(kind) for kind in kinds], bool)
    if not (kinds and len(wanted)) or _problem("", list(compress(kinds, kept)), options):
        return None
    rows, numbers, offsets, sizes = index.all_places()
    order = np.argsort(offsets)
    found = order[np.searchsorted(offsets[order], pointers, side="right") - 1]
    same_size = pc.fill_null(pc.equal(wanted.column("nbytes"), pa.array(sizes[found])), True)
    if (offsets[found] != pointers.to_numpy()).any() or not pc.all(same_size).as_py():
        return None
    samples, is_kept = rows[found], kept[numbers]
    # Where the members of each sample begin among those that are kept.
    begin = np.searchsorted(rows[is_kept], np.arange(len(index) + 1))
    counts = np.diff(begin)[samples]
    if not counts.all():
        return None
    ends = np.cumsum(counts)
    taken = np.repeat(begin[samples] - ends + counts, counts) + np.arange(ends[-1])
    members = (
        pa.array(kinds, pa.string()).take(pa.array(numbers[is_kept][taken])),
        pa.array(np.full(len(taken), SOURCE, np.int8)),
        pa.array(offsets[is_kept][taken]),
        pa.array(sizes[is_kept][taken]),
    )
    image = np.cumsum(is_kept)[found] - 1 - begin[samples]
    table = _table(np.array([0, *ends]), members, image=pa.array(image, mask=~is_kept[found]))
    return table, not index.keys.take(pa.array(samples)).equals(keys)


def tabulated(rows: Sequence[Row]) -> pa.Table:
    """Rows as a table."""
    members = [member for row in rows for member in row.members]
    return _table(
        np.cumsum([0, *(len(row.members) for row in rows)]),
        list(zip(*members, strict=True)) or [()] * len(_MEMBER),
        image=[row.image for row in rows],
        reason=[row.reason for row in rows],
    )


def _table(ends: np.ndarray, members: Sequence[Any], **columns: Any) -> pa.Table:
    """Table of a row for each sample: its members, and the other columns or nulls.

    The members of row n, fields as columns, are those from ``ends[n]`` to ``ends[n + 1]``.
    """
    arrays = [
        values if isinstance(values, pa.Array) else pa.array(values, field.type)
        for values, field in zip(members, _MEMBER, strict=True)
    ]
    listed = pa.ListArray.from_arrays(
        pa.array(ends, pa.int32()), pa.StructArray.from_arrays(arrays, fields=list(_MEMBER))
    )
    table = {"members": listed}
    for name, type_ in _FIELDS.items():
        values = columns.get(name, pa.nulls(len(listed), type_))
        table[name] = (
            values.cast(type_) if isinstance(values, pa.Array) else pa.array(values, type_)
        )
    return pa.table(table)


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
    samples: Sequence[Sample], nbytes: int | None, index: ShardIndex
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


def _chosen(
    key: str, sample: Sample, image: str | None, made_sizes: list[int | None], options: Options
) -> Row:
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
    pictures = [made for made in members.made if made.is_picture]
    picture = next((made.extension for made in pictures if made.extension in made_now), None)
    if pictures and picture is None and image is not None:
        return Row(reason=f"bad-image: {pictures[0].columns!r} has no image for it")
    if picture is not None:
        if image is not None and image != picture:
            chosen.pop(image, None)
        image = picture
    chosen = {e: m for e, m in chosen.items() if e not in members.left_out or e in made_now}
    twice = [e for e in sample.duplicates if e in chosen and e not in made_now]
    reason = _problem(key, chosen, options) or (duplicate_error(twice) if twice else None)
    if reason:
        return Row(reason=reason)
    order = list(chosen)
    return Row(tuple(chosen.values()), order.index(image) if image in chosen else None)


def _problem(key: str, chosen: Collection[str], options: Options) -> str | None:
    """Reason why readers would not give back these names; None if they would."""
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
