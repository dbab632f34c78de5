"""One task: part of a shard, or several small shards, as one dataframe."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from dask.dataframe.dispatch import concat

from dask_image_ingest.client import own_version, refuse_other_version
from dask_image_ingest.dataset.predicates import Predicate
from dask_image_ingest.dataset.read_options import ReadOptions
from dask_image_ingest.dataset.scan.file_rows import FileRows
from dask_image_ingest.dataset.scan.parquet_rows import ParquetColumns, ParquetRows, Sidecar
from dask_image_ingest.dataset.scan.partitioning import Partition, ShardSplit
from dask_image_ingest.dataset.scan.rows import FusedDecode, ImageRows, decode_rows, logger
from dask_image_ingest.dataset.scan.samples import (
    SampleRows,
    give_up,
    open_samples,
    warn_of_shard,
)
from dask_image_ingest.dataset.schema.columns import (
    METADATA_COLUMNS,
    FileColumn,
    ImageMember,
    MemberColumn,
)
from dask_image_ingest.decode import EncodedImages
from dask_image_ingest.errors import ShardError, ShardNotFoundError, warn_user
from dask_image_ingest.frames import get_backend
from dask_image_ingest.index import UnusableIndexError
from dask_image_ingest.storage import MemoryReader
from dask_image_ingest.tar import ShardIndex
from dask_image_ingest.typedefs import DataFrame


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
    made
        Columns of errors and regions with their types, which are null without a decode.
    known_extensions
        Extensions not warned about; None disables warnings.
    decode
        The decode in the same task. Without one, image columns hold references.
    version
        Version of this package in the process that made the task.
    """

    options: ReadOptions
    columns: tuple[str, ...]
    filters: Predicate | None
    limit: int | None
    member_columns: tuple[MemberColumn, ...]
    sidecar: tuple[FileColumn, ...]
    made: Mapping[str, pa.DataType]
    known_extensions: frozenset[str] | None
    decode: FusedDecode | None = None
    version: str = field(default_factory=own_version)


def read_partition(partition: Partition, spec: ScanSpec) -> DataFrame:
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
        if decode is not None and decode.limit is not None:
            decode = replace(decode, limit=decode.limit - len(rows))
        if spec.limit is not None:
            spec = replace(spec, limit=spec.limit - scanned)
        spec = replace(spec, decode=decode)
        if spec.limit == 0 or (decode is not None and decode.limit == 0):
            break
    if not parts:
        parts.append(_no_rows(partition[0], spec))
    # Of tables, not of frames: making a small frame takes longer than its scan.
    return _frame(pa.concat_tables(parts), spec) if spec.decode is None else concat(parts)


# The rows of a split (a table; a frame if decoded; None if no row remains), and the number of rows
# that the scan kept, before a decode dropped any.
_Read: TypeAlias = tuple[Any, int]


def _read_unit(unit: Partition, spec: ScanSpec) -> _Read:
    """Read the files of a partition of image files, or else its one split."""
    options = spec.options
    if options.root is not None:
        files = FileRows(unit, options)
        return _read_rows(files, files.numbers, spec)
    (split,) = unit
    try:
        return _read_table(split, spec) if options.is_table else _read_shard(split, spec)
    except (ShardError, ShardNotFoundError) as error:
        if options.shard_errors == "raise":
            raise
        # Of each part: it may have changed since an earlier one was read.
        logger.warning("skipped: %s", error)
        warn_user(f"skipped: {error}")
        return None, 0


def _no_rows(split: ShardSplit, spec: ScanSpec) -> DataFrame:
    """An empty table or frame of the right dtypes."""
    rows: ImageRows
    if spec.options.root is not None:
        rows = FileRows((), spec.options)
    else:
        sidecar = Sidecar(None, spec.sidecar, spec.options, ExitStack())
        nothing = MemoryReader(b""), ShardIndex()
        rows = SampleRows(split.url, *nothing, spec.options, spec.member_columns, sidecar)
    return _materialize(rows, rows.numbers, spec)


def _read_table(split: ShardSplit, spec: ScanSpec) -> _Read:
    with ExitStack() as opened:
        columns = ParquetColumns(split.shard, spec.sidecar, spec.options, opened)
        if not columns.may_have(spec.filters):
            return None, 0
        rows = ParquetRows(columns, spec.options)
        rows.first_label = split.first_label
        return _read_rows(rows, rows.part(split.part, split.parts), spec)


def _read_shard(split: ShardSplit, spec: ScanSpec) -> _Read:
    with ExitStack() as opened:
        sidecar = None
        if spec.sidecar:
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


def _read_samples(split: ShardSplit, spec: ScanSpec, sidecar: Sidecar | None) -> _Read:
    is_first = not split.part
    with open_samples(
        split.shard, split.index, spec.options, spec.member_columns, sidecar, is_first
    ) as rows:
        rows.first_label = split.first_label
        if is_first:  # once per shard, not once per part
            warn_of_shard(rows, spec.known_extensions)
        return _read_rows(rows, rows.part(split.part, split.parts), spec)


def _read_rows(rows: ImageRows, numbers: np.ndarray, spec: ScanSpec) -> _Read:
    numbers = rows.keep(numbers, spec.filters)[: spec.limit]
    if not len(numbers):
        return None, 0
    return _materialize(rows, numbers, spec), len(numbers)


def _materialize(rows: ImageRows, numbers: np.ndarray, spec: ScanSpec) -> DataFrame:
    """These rows as a table with references; with a decode, as a frame with pixels."""
    decode = spec.decode
    if decode is None:
        return _table(rows, numbers, spec)
    if decode.is_plain:  # all images of these rows will be decoded
        for column in decode.images:
            rows.expect(_member_of(column.image, spec), numbers)
    frame = _frame(_table(rows, numbers, spec), spec)
    frame = frame if decode.steps is None else decode.steps(frame)
    known = numbers if decode.is_plain else None
    open_images = functools.partial(_open_images, rows, spec, known)
    frame = decode_rows(frame, decode.images, open_images, decode.only, decode.limit)
    columns = list(decode.columns)
    return frame if list(frame.columns) == columns else frame[columns]


# A column of labels in the table of a split; no column of a collection has this name.
_LABEL = "\0label"


def _frame(table: pa.Table, spec: ScanSpec) -> DataFrame:
    labels = table.column(_LABEL).to_numpy()
    return get_backend(spec.options.backend).frame(table.drop_columns([_LABEL]), labels, None)


def _table(rows: ImageRows, numbers: np.ndarray, spec: ScanSpec) -> pa.Table:
    """Rows without pixels: image columns hold references.

    Those that are decoded next hold numbers of rows, or are left out if all rows are decoded.
    Errors, and header columns that are filled in with the images, are null.
    """
    decode = spec.decode
    members = {member.column: member for member in spec.options.images}
    nulls = dict(spec.made)
    decoded: set[Any] = set()
    if decode is not None:
        nulls |= {name: METADATA_COLUMNS[name] for name in decode.passed_on}
        # The only image column counts whatever its name: it may be renamed before the decode.
        decoded = {name for column in decode.images for name in column.columns}
        decoded = {name for name in members if name in decoded or len(members) == 1}
    names = [n for n in spec.columns if n not in decoded or decode is None or not decode.is_plain]
    table = rows.table([n for n in names if n not in nulls and n not in members], numbers)
    for place, name in enumerate(names):
        if name in nulls:
            column: pa.Array = pa.nulls(len(numbers), nulls[name])
        elif name not in members:
            continue
        elif name in decoded:
            column = pa.array(numbers)
        else:
            column = rows.references(members[name], numbers)
        table = table.add_column(place, name, column)
    return table.append_column(_LABEL, pa.array(rows.labels(numbers)))


def _member_of(image: Hashable, spec: ScanSpec) -> ImageMember:
    """The member of an image column; of an only one by any name."""
    members = spec.options.images
    return next((member for member in members if member.column == image), members[0])


def _open_images(
    rows: ImageRows, spec: ScanSpec, known: np.ndarray | None, frame: DataFrame
) -> tuple[Any, list[EncodedImages]]:
    """The images of a frame whose image columns hold numbers of rows; fills header columns in.

    ``known`` are these numbers if the frame has no such columns.
    """
    assert spec.decode is not None
    backend = get_backend(spec.options.backend)
    encoded = []
    for column in spec.decode.images:
        if known is not None:
            numbers = known
        else:
            numbers = np.asarray(backend.host(backend.values(frame[column.image])), np.int64)
        encoded.append(rows.images(_member_of(column.image, spec), numbers))
    for name in spec.decode.passed_on:  # of a single image column
        if name in frame.columns:
            values = rows.column(name, numbers)
            present, where = values.drop_null(), np.flatnonzero(values.is_valid()).tolist()
            new = present.to_pylist() if name == "format" else present.to_numpy()
            frame = backend.with_columns(frame, {name: (new, values.type)}, where)
    return frame, encoded
