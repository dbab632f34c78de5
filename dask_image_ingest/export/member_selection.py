"""Member selection: for each row the members that are exported, or why it is rejected."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.dataset.schema import image_member
from dask_image_ingest.export.files import Options
from dask_image_ingest.tar import IMAGE_EXTENSIONS, META_NAME, Sample, ShardIndex, duplicate_error

#: Where a member's bytes are: in the source shard, in the file of expanded members, or in a column.
#: ``MERGED``: in the source, and fields of columns have yet to be set in it.
SOURCE, EXPANDED, COLUMN, MERGED = range(4)

# A member. ``where`` is one of the above; the offset of a member from a column is 0.
_MEMBER = pa.struct(
    [
        pa.field("extension", pa.string()),
        pa.field("where", pa.int8()),
        pa.field("offset", pa.int64()),
        pa.field("size", pa.int64()),
    ]
)

# Columns of selected members; see `Row`.
_FIELDS = {
    "members": pa.list_(_MEMBER),
    "image": pa.int32(),
    "sample": pa.int64(),
    "reason": pa.string(),
}
#: Their names.
SELECTED = list(_FIELDS)

_IMAGES = IMAGE_EXTENSIONS.split(";")


class Row(NamedTuple):
    """The members selected for one row, or why it is rejected."""

    members: tuple[tuple[str, int, int, int], ...] = ()  # extension, where, offset, size
    image: int | None = None  # position of the image in the members
    sample: int | None = None  # tells it from others of its shard: the offset of its first member
    reason: str | None = None


def select(index: ShardIndex, wanted: pa.RecordBatch, options: Options) -> tuple[pa.Table, bool]:
    """Select the members of rows of one shard, as a table of `SELECTED`; see `select_members`."""
    together = select_vectorized(index, wanted, options)
    if together is not None:
        return together
    rows, renamed = select_members(index, wanted, options)
    return as_table(rows), renamed


def select_members(
    index: ShardIndex, wanted: pa.RecordBatch, options: Options
) -> tuple[list[Row], bool]:
    """Select the members of rows of one shard; and whether any row's key is not the shard's.

    ``wanted`` has ``key``, ``offset`` and ``nbytes`` of each row, and sizes of column members.
    """
    columns = wanted.to_pydict()
    offsets = set(columns["offset"])
    keys = {k for k, o in zip(columns["key"], columns["offset"], strict=True) if o is None}
    # Several samples at one offset are hard links to the same file.
    by_offset: dict[int, list[Sample]] = {}
    by_key: dict[str, list[Sample]] = {}
    for sample in index.samples:
        for offset in {span[0] for span in sample.members.values()} & offsets:
            by_offset.setdefault(offset, []).append(sample)
        if sample.key in keys:
            by_key.setdefault(sample.key, []).append(sample)
    column_sizes = _column_sizes(columns, options)
    rows, renamed = [], False
    locations = zip(columns["key"], columns["offset"], columns["nbytes"], strict=True)
    for row, (key, offset, nbytes) in enumerate(locations):
        if offset is None:
            match = _sample_by_key(by_key.get(key, []), nbytes)
            renamed |= key not in by_key
        else:
            samples = by_offset.get(offset, [])
            match = _sample_by_offset(samples, key, offset, nbytes)
        if isinstance(match, str):
            rows.append(Row(reason=match))
            continue
        sample, image = match
        renamed |= sample.key != key
        sizes = [of_rows[row] for of_rows in column_sizes]
        first = min(span[0] for span in sample.members.values())
        if offset is not None and len(samples) > 1:
            first = -1 - zlib.crc32(sample.key.encode())  # samples of hard links share it
        rows.append(_select(key, sample, image, sizes, options)._replace(sample=first))
    return rows, renamed


def select_from_columns(wanted: pa.Table, options: Options) -> list[Row]:
    """Select the members of rows that belong to no sample: all are from columns."""
    columns = wanted.to_pydict()
    column_sizes = _column_sizes(columns, options)
    return [
        Row(reason="no-pointer: its __key__ is null")
        if key is None
        else _select(key, Sample(key, {}), None, [sizes[number] for sizes in column_sizes], options)
        for number, key in enumerate(columns["key"])
    ]


def _column_sizes(columns: Mapping[str, Any], options: Options) -> list[Any]:
    """For each member from columns its size in each row; None where the row has none."""
    return [columns[f"made:{member.extension}"] for member in options.members.from_columns]


def select_vectorized(
    index: ShardIndex, wanted: pa.RecordBatch, options: Options
) -> tuple[pa.Table, bool] | None:
    """Fast path of `select_members` and `as_table`.

    None if any row needs the slow path: without an offset, with duplicate, sparse or hard-linked
    members or members from columns, or to be rejected.
    """
    locations, keys = wanted.column("offset"), wanted.column("key")
    is_special = index.duplicates or index.sparse or options.members.from_columns
    if is_special or locations.null_count or pc.any(pc.starts_with(keys, "_")).as_py():
        return None
    extensions = index.extensions
    kept = np.array([options.members.keeps(extension) for extension in extensions], bool)
    if not (extensions and len(wanted)) or _problem("", list(compress(extensions, kept)), options):
        return None
    rows, kinds, offsets, sizes = index.all_places()
    # For each row of the frame, the number of the member at its offset: its image.
    order = np.argsort(offsets)
    if not np.diff(offsets[order]).all():
        return None  # hard links
    images = order[np.searchsorted(offsets[order], locations, side="right") - 1]
    same_size = pc.fill_null(pc.equal(wanted.column("nbytes"), pa.array(sizes[images])), True)
    if (offsets[images] != locations.to_numpy()).any() or not pc.all(same_size).as_py():
        return None
    samples, is_kept = rows[images], kept[kinds]
    # Where the kept members of each sample begin, among all that are kept.
    begin = np.searchsorted(rows[is_kept], np.arange(len(index) + 1))
    counts = np.diff(begin)[samples]
    if not counts.all():
        return None
    ends = np.cumsum(counts)
    # The members of the frame's rows, one row after the other; numbers among those that are kept.
    taken = np.repeat(begin[samples] - ends + counts, counts) + np.arange(ends[-1])
    members = (
        pa.array(extensions, pa.string()).take(pa.array(kinds[is_kept][taken])),
        pa.array(np.full(len(taken), SOURCE, np.int8)),
        pa.array(offsets[is_kept][taken]),
        pa.array(sizes[is_kept][taken]),
    )
    # The image's position among the kept members of its sample.
    position = np.cumsum(is_kept)[images] - 1 - begin[samples]
    position = pa.array(position, mask=~is_kept[images])
    first = np.minimum.reduceat(offsets, np.searchsorted(rows, np.arange(len(index))))[samples]
    table = _table(np.array([0, *ends]), members, image=position, sample=pa.array(first))
    return table, not index.keys.take(pa.array(samples)).equals(keys)


def as_table(rows: Sequence[Row]) -> pa.Table:
    """Rows as a table, with a list of structs for the members."""
    members = [member for row in rows for member in row.members]
    return _table(
        np.cumsum([0, *(len(row.members) for row in rows)]),
        list(zip(*members, strict=True)) or [()] * len(_MEMBER),
        image=[row.image for row in rows],
        sample=[row.sample for row in rows],
        reason=[row.reason for row in rows],
    )


def _table(ends: np.ndarray, members: Sequence[Any], **columns: Any) -> pa.Table:
    """Table of rows: their members, and the given columns, nulls for others.

    ``members`` has an array per field; those of row n are from ``ends[n]`` to ``ends[n + 1]``.
    """
    arrays = [
        values if isinstance(values, pa.Array) else pa.array(values, field.type)
        for values, field in zip(members, _MEMBER, strict=True)
    ]
    listed = pa.ListArray.from_arrays(
        pa.array(ends, pa.int32()), pa.StructArray.from_arrays(arrays, fields=list(_MEMBER))
    )
    columns["members"] = listed
    table = {}
    for name, type_ in _FIELDS.items():
        values = columns.get(name, pa.nulls(len(listed), type_))
        table[name] = (
            values.cast(type_) if isinstance(values, pa.Array) else pa.array(values, type_)
        )
    return pa.table(table)


# A sample, and the extension of its image.
_Match = tuple[Sample, str | None]


def _sample_by_offset(
    samples: Sequence[Sample], key: str, offset: int, nbytes: int | None
) -> _Match | str:
    """The sample with a member at an offset; else a reason to reject the row."""
    if len(samples) > 1:  # hard links
        samples = [sample for sample in samples if sample.key == key] or samples
    if len(samples) > 1:
        return (
            f"ambiguous-sample: {len(samples)} samples of its shard have the image at byte "
            f"{offset}, by hard links, and it has the key of none of them alone"
        )
    for sample in samples:
        for extension, span in sample.members.items():
            if span[0] == offset and nbytes in (None, span[1]):
                return sample, extension
    return (
        f"lost-sample: its shard has no member of {nbytes} bytes at byte {offset}; has it changed "
        "since it was read?"
    )


def _sample_by_key(samples: Sequence[Sample], nbytes: int | None) -> _Match | str:
    """The sample of a row without an offset; else a reason to reject the row.

    Reads give no offset if the image is missing or sparse, or if the sample has a member twice;
    then ``nbytes``, if any, must match.
    """
    if len(samples) > 1:
        return "ambiguous-sample: it has no offset, and its shard has several samples of its key"
    for sample in samples:
        image = None if nbytes is None else image_member(sample, _IMAGES)
        if nbytes is None or (image is not None and sample.members[image][1] == nbytes):
            return sample, image
    return "lost-sample: its shard has no sample of this key without an image"


def _select(
    key: str, sample: Sample, image: str | None, column_sizes: list[int | None], options: Options
) -> Row:
    """Select the members of a row: its sample's, whose image is ``image``, and those of columns."""
    members = options.members
    # Including those left out: a member from a column takes the position of the one it replaces.
    selected = {
        extension: (extension, SOURCE, *span)
        for extension, span in sample.members.items()
        if members.keeps(extension) or extension in members.left_out
    }
    for member, size in zip(members.from_columns, column_sizes, strict=True):
        if size is not None:
            own = sample.members.get(member.extension)
            selected[member.extension] = (
                (member.extension, MERGED, *own)
                if member.merges and own is not None
                else (member.extension, COLUMN, 0, size)
            )
    of_columns = {extension for extension, where, *_ in selected.values() if where != SOURCE}
    main = [member for member in members.from_columns if member.is_main]
    new_image = next((m.extension for m in main if m.extension in of_columns), None)
    if main and new_image is None and image is not None:
        return Row(reason=f"bad-image: {main[0].columns!r} has no image for it")
    if new_image is not None:
        if image is not None and image != new_image:
            selected.pop(image, None)
        image = new_image
    selected = {e: m for e, m in selected.items() if e not in members.left_out or e in of_columns}
    repeats = [e for e in sample.duplicates if e in selected and selected[e][1] != COLUMN]
    reason = _problem(key, selected, options) or (duplicate_error(repeats) if repeats else None)
    if reason:
        return Row(reason=reason)
    position = list(selected).index(image) if image in selected else None
    return Row(tuple(selected.values()), position)


def _problem(key: str, extensions: Collection[str], options: Options) -> str | None:
    """Reason why readers would not read these members back; None if they would."""
    if not extensions:
        return "no-members: none of the members that are wanted"
    for extension in extensions:
        if not extension.isprintable() or "\\" in extension:
            return f"bad-extension: {extension!r} has characters that not every reader takes"
        if options.index and (not extension or any(map(str.isspace, extension))):
            return f"bad-extension: {extension!r} cannot stand in an index, where blanks separate"
        if key.startswith("__") and META_NAME.match(f"{key}.{extension}"):
            return f"bad-key: readers skip {key}.{extension}, as they do __this__"
    return None
