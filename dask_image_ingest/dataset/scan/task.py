"""One task: part of a shard, or several small shards, as one dataframe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from dask.dataframe.dispatch import concat

from dask_image_ingest.dataset.predicates import Predicate
from dask_image_ingest.dataset.read_options import ReadOptions
from dask_image_ingest.dataset.scan.decode_rows import (
    ColumnDecode,
    FusedDecode,
    check_size,
    decode_first_rows,
    decode_rows,
    kept_rows,
)
from dask_image_ingest.dataset.scan.file_rows import FileRows
from dask_image_ingest.dataset.scan.parquet_rows import ParquetColumns, ParquetRows
from dask_image_ingest.dataset.scan.partitioning import Partition, ShardSplit
from dask_image_ingest.dataset.scan.rows import ImageRows
from dask_image_ingest.dataset.scan.samples import SampleRows, give_up, open_rows
from dask_image_ingest.dataset.scan.sidecar import Sidecar
from dask_image_ingest.dataset.schema.columns import (
    METADATA_COLUMNS,
    FileColumn,
    ImageMember,
    MemberColumn,
)
from dask_image_ingest.dataset.warning import (
    warn_of_damage,
    warn_of_late_members,
    warn_of_links,
    warn_of_skipped,
)
from dask_image_ingest.decode import Pixels
from dask_image_ingest.environment import own_version, refuse_other_version
from dask_image_ingest.errors import (
    ShardError,
    ShardNotFoundError,
)
from dask_image_ingest.index import UnusableIndexError
from dask_image_ingest.storage import MemoryReader
from dask_image_ingest.tar import ShardIndex


@dataclass(frozen=True, slots=True)
class ScanSpec:
    """Specification of what one task reads. Kept small: every task carries it.

    Attributes
    ----------
    options
        Options of the read, whatever the query.
    columns
        Columns of the result, in order.
    filters, limit
        Rows to keep, and their number at most.
    member_columns
        Columns from members that the query or its filters need.
    sidecar
        Sidecar columns that the columns or filters need, and ``__key__`` if a file has it.
    errors
        Columns of errors, which are null without a decode.
    known_extensions
        Extensions not warned about; None disables warnings.
    decode
        The decode in the same task. Without one, image columns hold references.
    hands_over
        Whether to keep the index of the shard for a later step of the same task, an export.
    version
        Version of this package in the process that made the task.
    """

    options: ReadOptions
    columns: tuple[str, ...]
    filters: Predicate | None
    limit: int | None
    member_columns: tuple[MemberColumn, ...]
    sidecar: tuple[FileColumn, ...]
    errors: frozenset[str]
    known_extensions: frozenset[str] | None
    decode: FusedDecode | None = None
    hands_over: bool = False
    version: str = field(default_factory=own_version)


def read_partition(partition: Partition, spec: ScanSpec) -> Any:
    """Read one partition as a dataframe: the samples of its splits, in order.

    Pixels are decoded last, and only for the rows that remain.

    Raises
    ------
    ShardError
        If a shard can't be read, with ``shard_errors="raise"``.
    PartitionTooLargeError
        Before the decode, if the images exceed what one partition can hold.
    ImageDecodeError
        For the first image that can't be decoded, with ``errors="raise"``.
    ClusterError
        If this process has another version of the package than the one that made the task.
    """
    refuse_other_version(spec.version)
    parts: list[Any] = []
    units = [partition] if spec.options.root is not None else [(split,) for split in partition]
    for unit in units:
        rows, scanned = _read_unit(unit, spec)
        if rows is None:
            continue
        parts.append(rows)
        decode = spec.decode
        decode = decode and replace(decode, limit=_remaining(decode.limit, len(rows)))
        spec = replace(spec, limit=_remaining(spec.limit, scanned), decode=decode)
        if spec.limit == 0 or (decode is not None and decode.limit == 0):
            break
    if not parts:
        parts.append(_no_rows(partition[0], spec))
    return concat(parts) if spec.decode is not None else _concat_metadata(parts).frame(spec)


@dataclass(frozen=True, slots=True)
class Metadata:
    """Rows without pixels: a table, and the index label of each row, shape (n,), int64."""

    table: pa.Table
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def frame(self, spec: ScanSpec) -> Any:
        """A dataframe of the rows."""
        return spec.options.get_backend().frame(self.table, self.labels, None)


def _concat_metadata(shards: Sequence[Metadata]) -> Metadata:
    """Concatenate tables, not frames: making a small frame takes longer than its scan."""
    labels = np.concatenate([shard.labels for shard in shards])
    return Metadata(pa.concat_tables(shard.table for shard in shards), labels)


def _remaining(limit: int | None, rows: int) -> int | None:
    return None if limit is None else limit - rows


# The rows of a split (`Metadata`, a frame if decoded, None if no row remains), and the number of
# rows that the scan kept, before a decode dropped any.
_Read: TypeAlias = tuple[Any, int]


def _read_unit(unit: Partition, spec: ScanSpec) -> _Read:
    """Read the files of a partition of image files, or else its one split."""
    options = spec.options
    if options.root is not None:
        return _read_rows(FileRows(unit, options), spec)
    (split,) = unit
    try:
        return _read_table(split, spec) if options.is_table else _read_shard(split, spec)
    except (ShardError, ShardNotFoundError) as error:
        if options.shard_errors == "raise":
            raise
        warn_of_skipped(error)  # of each part: it may have changed since an earlier one was read
        return None, 0


def _no_rows(split: ShardSplit, spec: ScanSpec) -> Any:
    """An empty frame of the right dtypes."""
    if spec.options.root is not None:
        return _materialize(FileRows((), spec.options), spec)
    sidecar = Sidecar(None, spec.sidecar, spec.options, ExitStack())
    empty = SampleRows(
        split.url, MemoryReader(b""), ShardIndex(), spec.options, spec.member_columns, sidecar
    )
    return _materialize(empty, spec)


def _read_table(split: ShardSplit, spec: ScanSpec) -> _Read:
    with ExitStack() as opened:
        columns = ParquetColumns(split.shard, spec.sidecar, spec.options, opened)
        if not columns.may_have(spec.filters):
            return None, 0
        rows = ParquetRows(columns, spec.options)
        rows.first_label = split.first_label
        return _read_rows(rows.part(split.part, split.parts), spec)


def _read_shard(split: ShardSplit, spec: ScanSpec) -> _Read:
    with ExitStack() as opened:
        sidecar = Sidecar(split.shard.sidecar, spec.sidecar, spec.options, opened)
        if not sidecar.may_have(spec.filters):
            return None, 0
        try:
            return _read_samples(split, spec, sidecar)
        except UnusableIndexError as error:
            # A damaged column of the index, or another shard than its own: both show only when
            # they are read.
            if split.index is None:
                raise AssertionError("raised without an index") from error
            give_up(split.index, error, warn=True)
            return _read_samples(replace(split, index=None), spec, sidecar)


def _read_samples(split: ShardSplit, spec: ScanSpec, sidecar: Sidecar) -> _Read:
    decode = spec.decode
    all_rows = split.parts == 1 and not spec.filters and spec.limit is None
    whole: Sequence[ImageMember] = ()
    if all_rows and decode is not None and decode.steps is None and decode.limit is None:
        whole = [_member_of(each.image, spec) for each in decode.images]
    with open_rows(
        split.shard,
        split.index,
        spec.options,
        spec.member_columns,
        sidecar,
        warn=not split.part,
        hands_over=spec.hands_over,
        whole=whole,
    ) as rows:
        rows.first_label = split.first_label
        if not split.part:  # once per shard, not once per part
            _warn(rows, spec)
        return _read_rows(rows.part(split.part, split.parts), spec)


def _read_rows(rows: ImageRows, spec: ScanSpec) -> _Read:
    rows = rows.keep(spec.filters)
    rows = rows.take(range(len(rows))[: spec.limit])
    if not len(rows):
        return None, 0
    return _materialize(rows, spec), len(rows)


def _warn(rows: SampleRows, spec: ScanSpec) -> None:
    warn_of_damage(rows.url, rows.damage, len(rows))
    warn_of_links(rows.url, rows.skipped)
    if spec.known_extensions is not None:
        warn_of_late_members(rows.url, rows.other_kinds(spec.known_extensions))


def _materialize(rows: ImageRows, spec: ScanSpec) -> Any:
    """The rows decoded, as a frame; without a decode, as `Metadata`."""
    decode = spec.decode
    if decode is None:
        return _metadata(rows, spec, frozenset())
    decoded = frozenset(name for each in decode.images for name in each.columns)
    images = {each.column for each in spec.options.images}
    decodable = (images | spec.errors).intersection(spec.columns)
    if decode.steps is None and decode.limit is None and decoded >= decodable:
        return _decode_all(rows, spec, decode, decoded)
    frame = _metadata(rows, spec, decoded, decode.passed_on).frame(spec)
    frame = frame if decode.steps is None else decode.steps(frame)
    decode_frame = functools.partial(_decode_positions, rows, spec, decode)
    return decode_first_rows(frame, decode_frame, decode.limit)


def _metadata(
    rows: ImageRows, spec: ScanSpec, decoded: frozenset[str], later: Sequence[str] = ()
) -> Metadata:
    """Rows without pixels: image columns hold references, or row positions if ``decoded`` next.

    The header columns ``later`` are null.
    """
    placeholders: dict[str, Callable[[], pa.Array]] = {
        name: functools.partial(pa.nulls, len(rows), METADATA_COLUMNS[name]) for name in later
    }
    no_errors = functools.partial(pa.nulls, len(rows), pa.string())
    placeholders |= dict.fromkeys(spec.errors, no_errors)
    positions = functools.partial(pa.array, np.arange(len(rows)))
    for image in spec.options.images:
        # The only image column counts whatever its name: it may be renamed before the decode.
        is_next = image.column in decoded or (decoded and len(spec.options.images) == 1)
        placeholders[image.column] = positions if is_next else rows.of(image).references
    table = rows.table([name for name in spec.columns if name not in placeholders])
    for position, name in enumerate(spec.columns):
        if name in placeholders:
            table = table.add_column(position, name, placeholders[name]())
    return Metadata(table, rows.labels)


def _member_of(image: Any, spec: ScanSpec) -> ImageMember:
    """The member of an image column; of an only one by any name."""
    members = spec.options.images
    return next((each for each in members if each.column == image), members[0])


def _decode_all(
    rows: ImageRows, spec: ScanSpec, decode: FusedDecode, decoded: frozenset[str]
) -> Any:
    """Decode all rows, and make the table of metadata meanwhile."""
    make_metadata = functools.cache(lambda: _metadata(rows, spec, decoded))
    image_rows = [(each, rows.of(_member_of(each.image, spec))) for each in decode.images]
    pixels_per_image = _decode(spec, image_rows, make_metadata)
    metadata = make_metadata()
    kept = kept_rows(pixels_per_image, decode.only)
    if kept is not None:
        metadata = Metadata(metadata.table.take(kept), metadata.labels[kept])
        pixels_per_image = [pixels.take(kept) for pixels in pixels_per_image]
    frame = metadata.frame(spec)
    for each, pixels in zip(decode.images, pixels_per_image, strict=True):
        frame = each.into(frame, pixels)
    return _in_order(frame, decode)


def _in_order(frame: Any, decode: FusedDecode) -> Any:
    """The frame with its columns in the order of the result."""
    columns = list(decode.columns)
    return frame if list(frame.columns) == columns else frame[columns]


def _decode_positions(rows: ImageRows, spec: ScanSpec, decode: FusedDecode, frame: Any) -> Any:
    """Decode the images of ``rows`` at the positions that the image columns of ``frame`` hold."""
    backend = spec.options.get_backend()
    image_rows = []
    for each in decode.images:
        positions = np.asarray(backend.host(backend.values(frame[each.image])), np.int64)
        image_rows.append((each, rows.of(_member_of(each.image, spec)).take(positions)))
    pixels_per_image = _decode(spec, image_rows)
    kept = kept_rows(pixels_per_image, decode.only)
    if kept is not None:
        frame = frame.iloc[kept]
        image_rows = [(each, taken.take(kept)) for each, taken in image_rows]
        pixels_per_image = [pixels.take(kept) for pixels in pixels_per_image]
    for each, pixels in zip(decode.images, pixels_per_image, strict=True):
        frame = each.into(frame, pixels)
    for name in decode.passed_on:
        if name in frame.columns:
            column = image_rows[0][1].column(name)
            present = column.drop_null()
            values = present.to_pylist() if name == "format" else present.to_numpy()
            with_value = np.flatnonzero(column.is_valid()).tolist()
            frame = backend.with_columns(frame, {name: (values, column.type)}, with_value)
    return _in_order(frame, decode)


def _decode(
    spec: ScanSpec,
    image_rows: Sequence[tuple[ColumnDecode, ImageRows]],
    meanwhile: Callable[[], Any] | None = None,
) -> list[Pixels]:
    """Decode each image column, after a check that together they fit into a partition."""
    backend = spec.options.get_backend()
    first = image_rows[0][1]
    numbers = first.numbers
    what = f"samples {numbers[0]}-{numbers[-1]} of {first.url}" if len(numbers) else ""
    for _, rows in image_rows:
        rows.expect_images()
    sizes = (map(i.decoding.nbytes, rows.headers) for i, rows in image_rows if i.pixels)
    if len(image_rows) > 1:
        check_size(what, sum(map(sum, sizes)), backend.largest_partition)
    return [
        decode_rows(
            rows.encoded_images,
            images,
            backend,
            what=what,
            fetch=rows.prefetch_images,
            meanwhile=meanwhile,
        )
        for images, rows in image_rows
    ]
