"""One task: part of one shard, or some small ones, become one dataframe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
from dask.dataframe.dispatch import concat

from dask_image_ingest.dataset.filters import Filters
from dask_image_ingest.dataset.options import ReadOptions
from dask_image_ingest.dataset.scan.decode_rows import (
    Decoded,
    DecodeInRead,
    ImageDecode,
    check_size,
    decode_rows,
    first_errors,
    first_rows,
    keep_rows,
)
from dask_image_ingest.dataset.scan.open_samples import give_up, open_rows
from dask_image_ingest.dataset.scan.parquet_columns import ParquetColumns
from dask_image_ingest.dataset.scan.parquet_rows import ParquetRows
from dask_image_ingest.dataset.scan.partitioning import Partition, ShardSplit
from dask_image_ingest.dataset.scan.rows import ImageRows
from dask_image_ingest.dataset.scan.samples import SampleRows
from dask_image_ingest.dataset.scan.sidecar import Sidecar, open_sidecar
from dask_image_ingest.dataset.schema.columns import Component, FileColumn, image_field
from dask_image_ingest.dataset.warning import (
    warn_of_damage,
    warn_of_late_members,
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
class Query:
    """The query as each task carries it: small.

    Attributes
    ----------
    options
        What does not change with the query.
    columns
        The columns of the result, in order.
    filters, limit
        Which rows to keep, and how many of them at most.
    components
        The components that the columns or the filters need.
    sidecar
        The columns of the files beside the shards that these need.
    known_extensions
        Extensions not warned about; None disables warnings.
    keeps_walk
        Whether a later step of the same task wants what a walk through the shard finds.
    version
        Of this package, where the query was made.
    """

    options: ReadOptions
    columns: tuple[str, ...]
    filters: Filters | None
    limit: int | None
    components: tuple[Component, ...]
    sidecar: tuple[FileColumn, ...]
    known_extensions: frozenset[str] | None
    keeps_walk: bool = False
    version: str = field(default_factory=own_version)


#: In a partition of several shards, this lies between the labels of the samples of the same number
#: in one shard and in the next: labels are unique, whatever rows are kept.
LABELS_OF_A_SHARD: Final = 1 << 32


def read_partition(partition: Partition, query: Query, decode: DecodeInRead | None = None) -> Any:
    """Read one partition, the samples of its splits one behind the other, as a dataframe.

    Without ``decode`` it has references in place of images. Pixels are decoded last, and only for
    the rows that are left.

    Raises
    ------
    ShardError
        Where the shard can't be read, with ``shard_errors="raise"``.
    PartitionTooLargeError
        Where the images would decode to more than one partition can hold; before they do.
    ImageDecodeError
        For the first image that can't be decoded, with ``errors="raise"``.
    ClusterError
        In a process that has another version of this package.
    """
    refuse_other_version(query.version)
    read: dict[int, Any] = {}
    for place, split in enumerate(partition):
        rows, scanned = _read_split(split, query, decode)
        if rows is None:
            continue
        read[place] = rows
        query = replace(query, limit=_left(query.limit, scanned))
        decode = decode and replace(decode, limit=_left(decode.limit, len(rows)))
        if query.limit == 0 or (decode is not None and decode.limit == 0):
            break
    if not read:
        read[0] = _no_rows(partition[0], query, decode)
    if decode is None:
        return _joined(read).frame(query)
    for place, frame in read.items():
        frame.index = frame.index + place * LABELS_OF_A_SHARD
    return concat(list(read.values()))


@dataclass(frozen=True, slots=True)
class Metadata:
    """Rows without pixels, and their labels."""

    table: pa.Table
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def frame(self, query: Query) -> Any:
        """A dataframe of the rows."""
        return query.options.get_backend().frame(self.table, self.labels, None)


def _joined(shards: Mapping[int, Metadata]) -> Metadata:
    labels = [shard.labels + place * LABELS_OF_A_SHARD for place, shard in shards.items()]
    # To frames at once: of small ones each would take longer to make than to read.
    tables = (shard.table for shard in shards.values())
    return Metadata(pa.concat_tables(tables), np.concatenate(labels))


def _left(limit: int | None, rows: int) -> int | None:
    return None if limit is None else limit - rows


# `Metadata`, or a frame where images are decoded, or None if no row is left; and how many rows of
# the shard that was made of.
_Read: TypeAlias = tuple[Any, int]


def _read_split(split: ShardSplit, query: Query, decode: DecodeInRead | None) -> _Read:
    try:
        return _read(split, query, decode)
    except (ShardError, ShardNotFoundError) as error:
        if query.options.shard_errors == "raise":
            raise
        if not split.part:
            warn_of_skipped(error)
        return None, 0


def _no_rows(split: ShardSplit, query: Query, decode: DecodeInRead | None) -> Any:
    nothing = open_sidecar(None, query.sidecar, None, False)
    with nothing as sidecar:
        empty = SampleRows(
            split.url, MemoryReader(b""), ShardIndex(), query.options, query.components, sidecar
        )
        return _frame(split, empty, query, decode)


def _read(split: ShardSplit, query: Query, decode: DecodeInRead | None) -> _Read:
    options = query.options
    if options.is_table:
        return _read_table(split, query, decode)
    with open_sidecar(
        split.sidecar,
        query.sidecar,
        options.storage_options,
        options.needs_sidecars,
        skips_errors=options.shard_errors == "skip",
    ) as sidecar:
        if not sidecar.may_have(query.filters):
            return None, 0
        try:
            return _read_shard(split, query, decode, sidecar)
        except UnusableIndexError as error:
            # A column of it is damaged, which shows when that is read.
            if split.index is None:
                raise AssertionError("only an index is unusable") from error
            give_up(split.index, error, warn=not split.part)
            return _read_shard(replace(split, index=None), query, decode, sidecar)


def _read_table(split: ShardSplit, query: Query, decode: DecodeInRead | None) -> _Read:
    with ExitStack() as opened:
        storage_options = query.options.storage_options
        columns = ParquetColumns(split.url, query.sidecar, storage_options, opened)
        if not columns.may_have(query.filters):
            return None, 0
        return _read_rows(split, ParquetRows(columns, query.options), query, decode)


def _read_shard(
    split: ShardSplit, query: Query, decode: DecodeInRead | None, sidecar: Sidecar
) -> _Read:
    every_image = decode is not None and decode.steps is None
    with open_rows(
        split.url,
        split.index,
        query.options,
        query.components,
        sidecar,
        warn=not split.part,
        keep=query.keeps_walk,
        whole=split.parts == 1 and every_image and not query.filters and query.limit is None,
    ) as rows:
        if not split.part:  # once for a shard, not once for each part of it
            _warn(rows, query)
        return _read_rows(split, rows, query, decode)


def _read_rows(
    split: ShardSplit, rows: ImageRows, query: Query, decode: DecodeInRead | None
) -> _Read:
    rows = rows.part(split.part, split.parts).keep(query.filters)
    rows = rows.take(range(len(rows))[: query.limit])
    if not len(rows):
        return None, 0
    return _frame(split, rows, query, decode), len(rows)


def _warn(rows: SampleRows, query: Query) -> None:
    warn_of_damage(rows.url, rows.damage, len(rows))
    if query.known_extensions is not None:
        warn_of_late_members(rows.url, rows.other_kinds(query.known_extensions))


def _frame(split: ShardSplit, rows: ImageRows, query: Query, decode: DecodeInRead | None) -> Any:
    if decode is None:
        return _metadata(rows, query, frozenset())
    made = frozenset(name for each in decode.images for name in each.columns)
    if decode.steps is None and decode.limit is None and made >= _of_decodes(query):
        # The table is made while images are decoded.
        return keep_rows(_whole_frame(split, rows, query, decode), decode.keep)
    frame = _metadata(rows, query, made).frame(query)
    frame = frame if decode.steps is None else decode.steps(frame)
    make = functools.partial(_with_images, split, rows, query, decode)
    return first_rows(frame, make, decode.keep, decode.limit)


def _of_decodes(query: Query) -> set[str | None]:
    """The columns of a query that decodes make."""
    images = [query.options.image, *(each.column for each in query.options.other_images)]
    return {*images, *(_error(image, query) for image in images)}.intersection(query.columns)


def _error(image: str, query: Query) -> str | None:
    """The column of an image's errors; None where a file has it."""
    name = "error" if image == query.options.image else image_field(image, "error")
    return None if any(each.column == name for each in query.sidecar) else name


def _metadata(rows: ImageRows, query: Query, decoded: frozenset[str]) -> Metadata:
    """A partition without pixels: references are in the place of images.

    Of an image column that is ``decoded`` next, positions are there.
    """
    made: dict[str | None, Callable[[], pa.Array]] = {}
    for image, its in _images(rows, query):
        # The only one may have been renamed since.
        here = image in decoded or (decoded and not query.options.other_images)
        positions = functools.partial(pa.array, np.arange(len(rows)))
        made[image] = positions if here else its.references
        made[_error(image, query)] = lambda: pa.nulls(len(rows), pa.string())
    table = rows.table([name for name in query.columns if name not in made])
    for place, name in enumerate(query.columns):
        if name in made:
            table = table.add_column(place, name, made[name]())
    return Metadata(table, rows.numbers)


def _images(rows: ImageRows, query: Query) -> Iterator[tuple[str, ImageRows]]:
    """The image columns, each with the rows whose image it is."""
    yield query.options.image, rows
    for member in query.options.other_images:
        yield member.column, rows.of(member)


def _whole_frame(split: ShardSplit, rows: ImageRows, query: Query, decode: DecodeInRead) -> Decoded:
    decoded_here = {name for each in decode.images for name in each.columns}
    names = [name for name in query.columns if name not in decoded_here]
    table = functools.cache(lambda: rows.table(names))
    pixels_of = _decode(
        split, query, [(each, _rows_of(each, rows, query)) for each in decode.images], table
    )
    decoded = [*zip(decode.images, pixels_of, strict=True)]
    told = table()
    for each, pixels in decoded:
        if each.error is not None:
            errors = pa.array([error or None for error in pixels.errors], pa.string())
            place = decode.columns.index(each.error)
            told = told.add_column(min(place, told.num_columns), each.error, errors)
    made = {each.image: pixels for each, pixels in decoded if each.pixels}
    backend = query.options.get_backend()
    frame = backend.frame(told, rows.numbers, made.pop("image", None))
    for image, pixels in made.items():
        frame = backend.with_images(frame, pixels, image, None)
    return _in_order(frame, decode), first_errors([pixels.errors for _, pixels in decoded])


def _rows_of(images: ImageDecode, rows: ImageRows, query: Query) -> ImageRows:
    """The rows whose image is that of a column."""
    members = {each.column: each for each in query.options.other_images}
    member = members.get(images.image)
    return rows if member is None else rows.of(replace(member, decoding=images.decoding))


def _in_order(frame: Any, decode: DecodeInRead) -> Any:
    columns = list(decode.columns)
    return frame if list(frame.columns) == columns else frame[columns]


def _with_images(
    split: ShardSplit, rows: ImageRows, query: Query, decode: DecodeInRead, frame: Any
) -> Decoded:
    backend = query.options.get_backend()
    asked = []
    for each in decode.images:
        positions = np.asarray(backend.host(backend.values(frame[each.image])), np.int64)
        asked.append((each, _rows_of(each, rows, query).take(positions)))
    decoded = _decode(split, query, asked)
    for each, pixels in zip(decode.images, decoded, strict=True):
        frame = each.into(frame, pixels)
    return _in_order(frame, decode), first_errors([pixels.errors for pixels in decoded])


def _decode(
    split: ShardSplit,
    query: Query,
    asked: Sequence[tuple[ImageDecode, ImageRows]],
    meanwhile: Callable[[], Any] | None = None,
) -> list[Pixels]:
    """The images of each column, if those of all of them fit."""
    backend = query.options.get_backend()
    numbers = asked[0][1].numbers
    what = f"samples {numbers[0]}-{numbers[-1]} of {split.url}" if len(numbers) else ""
    sizes = (map(i.decoding.nbytes, rows.headers) for i, rows in asked if i.pixels)
    if len(asked) > 1:
        check_size(what, sum(map(sum, sizes)), backend.largest_partition)
    return [
        decode_rows(
            rows.headers,
            rows.image_bytes,
            rows.origin,
            images.decoding,
            images.errors,
            backend,
            what=what,
            pixels=images.pixels,
            fetch=rows.announce_images,
            meanwhile=meanwhile,
        )
        for images, rows in asked
    ]
