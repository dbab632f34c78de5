"""The parquet file beside a shard: its columns for the shard's samples, joined by key."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.dataset import filters as dnf
from dask_image_ingest.dataset.filters import Filters, Predicate
from dask_image_ingest.dataset.schema.columns import SidecarColumn
from dask_image_ingest.dataset.schema.sidecar_columns import key_of, plain_type
from dask_image_ingest.dataset.warning import warn_user
from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.frames import is_number, is_text
from dask_image_ingest.storage import ParquetSource, open_parquet


def groups_that_may_match(metadata: Any, filters: Filters, columns: Collection[str]) -> list[int]:
    """The row groups but for those in which no row passes ``filters``, as their statistics prove.

    Parameters
    ----------
    metadata
        Of the file.
    filters
        By the names that columns have in the file.
    columns
        Those whose statistics are to be believed, being numbers or text in the file as well.
    """
    paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    # Of two, one is the field of a struct.
    known = {name: paths.index(name) for name in columns if paths.count(name) == 1}
    found = []
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        limits = {name: _limits(row_group.column(number)) for name, number in known.items()}
        if any(
            all(_may_hold(limits.get(each[0]), each) for each in conjunction)
            for conjunction in filters
        ):
            found.append(group)
    return found


def _limits(chunk: Any) -> tuple[Any, Any] | None:
    """The lowest and the highest value of a column in a row group, None where that is not told."""
    statistics = chunk.statistics
    if statistics is None or not statistics.has_min_max:
        return None
    try:
        lowest, highest = statistics.min, statistics.max
    except UnicodeDecodeError:  # limits may be cut short, within a character
        return None
    plain = type(lowest) in (int, float, str) and type(highest) is type(lowest)
    # Some writers let NaN into them.
    return (lowest, highest) if plain and lowest == lowest and highest == highest else None


def _may_hold(limits: tuple[Any, Any] | None, predicate: Predicate) -> bool:
    """True if a value between two limits, a null or NaN may pass.

    Python compares numbers of all types exactly, and text in the order that its UTF-8 has.
    """
    _, op, value = predicate
    if limits is None:
        return True
    lowest, highest = limits
    if op == "<":
        return bool(lowest < value)
    if op == "<=":
        return bool(lowest <= value)
    if op == ">":
        return bool(highest > value)
    if op == ">=":
        return bool(highest >= value)
    if op == "==":
        return bool(lowest <= value <= highest)
    if op == "in":
        return any(each is None or lowest <= each <= highest for each in value)
    return True


@contextmanager
def open_sidecar(
    url: str | None,
    columns: Sequence[SidecarColumn],
    storage_options: dict[str, Any] | None,
    required: bool,
    skips_errors: bool = False,
) -> Iterator[Sidecar]:
    """The file beside a shard, which is opened when the first of these columns is asked for.

    Without a ``url``, or where there is no such file and none is ``required``, all is null. With
    ``skips_errors``, what can't be read is null as well: were the rows skipped, there would be more
    of them where no column of the file is asked for.
    """
    with ExitStack() as opened:
        yield Sidecar(url, columns, storage_options, required, skips_errors, opened)


class Sidecar:
    """Columns for samples, by their keys.

    Rows are numbers of those in the file, or -1 for a sample that has none.
    """

    def __init__(
        self,
        url: str | None,
        columns: Sequence[SidecarColumn],
        storage_options: dict[str, Any] | None,
        required: bool,
        skips_errors: bool,
        opened: ExitStack,
    ) -> None:
        self._url = url
        self._columns = {column.column: column for column in columns}
        self._storage_options = storage_options
        self._required = required
        self._skips_errors = skips_errors
        self._opened = opened
        self._candidates: dict[Filters, tuple[np.ndarray, bool]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def rows(self, keys: Sequence[str]) -> list[int]:
        """The row of each key."""
        if self._file is None:
            return [-1] * len(keys)
        try:
            return self._rows(keys)
        except ShardError as error:
            self._skip(error)
            return [-1] * len(keys)

    def _rows(self, keys: Sequence[str]) -> list[int]:
        found = pc.index_in(pa.array(keys, pa.string()), value_set=self._keys)
        missing = found.null_count
        if missing:
            warn_user(
                f"{self._url} has no row for {missing} of {len(keys)} samples of its shard: its "
                "columns are null there"
            )
        rows: list[int] = found.fill_null(-1).to_pylist()
        return rows

    def column(self, name: str, rows: Sequence[int]) -> pa.Array:
        """A column of the frame, for samples that have these rows."""
        wanted = self._columns[name]
        places = np.asarray(rows, np.int64)
        there = places >= 0
        if not there.any() or self._file is None:
            return pa.nulls(len(rows), wanted.type)
        groups = np.unique(np.searchsorted(self._ends, places[there], "right"))
        try:
            values = self._read(self._file, wanted, groups.tolist()).combine_chunks()
        except ShardError as error:
            self._skip(error)
            return pa.nulls(len(rows), wanted.type)
        # Groups that were left out come before.
        left_out = self._starts[groups] - np.concatenate([[0], np.cumsum(self._sizes[groups])[:-1]])
        places -= left_out[np.searchsorted(self._starts[groups], places, "right") - 1]
        return values.take(pa.array(places, pa.int64(), mask=~there))

    def may_have(self, filters: Filters | None) -> bool:
        """True if some sample may pass ``filters``, by the columns here."""
        restricted = dnf.only(filters, self._columns)
        if restricted is None:
            return True
        candidates, null = self._candidates_of(restricted)
        return null or bool(candidates.any())

    def keep(self, filters: Filters, rows: Callable[[], Sequence[int]]) -> np.ndarray | None:
        """The positions among ``rows`` of those that may pass ``filters``; None: of all."""
        restricted = dnf.only(filters, self._columns)
        if restricted is None:
            return None
        candidates, null = self._candidates_of(restricted)
        return np.flatnonzero(np.append(candidates, null)[np.asarray(rows(), np.int64)])

    def _candidates_of(self, filters: Filters) -> tuple[np.ndarray, bool]:
        """Of each row of the file whether it passes ``filters``; whether nulls do."""
        if filters not in self._candidates:
            columns = [self._columns[name] for name in sorted(dnf.columns_of(filters))]
            nulls = pa.table({c.column: pa.nulls(1, c.type) for c in columns})
            null = len(dnf.matching(nulls, filters)) > 0
            self._candidates[filters] = self._passing(filters, columns), null
        return self._candidates[filters]

    def _passing(self, filters: Filters, columns: Sequence[SidecarColumn]) -> np.ndarray:
        """Of each row of the file whether it may pass."""
        if self._file is None:
            return np.zeros(0, bool)
        try:
            return self._passing_of(self._file, filters, columns)
        except ShardError as error:
            self._skip(error)
            # One of the columns may be whole: what passes is asked of all of them later.
            return np.ones(self._file.metadata.num_rows, bool)

    def _passing_of(
        self, file: ParquetSource, filters: Filters, columns: Sequence[SidecarColumn]
    ) -> np.ndarray:
        named = {c.column: c.name for c in columns}
        inside = tuple(tuple((named[c], op, value) for c, op, value in conj) for conj in filters)
        believed = [c.name for c in columns if self._tells(file, c)]
        groups = groups_that_may_match(file.metadata, inside, believed)
        table = pa.table({c.column: self._read(file, c, groups) for c in columns})
        passing = np.zeros(file.metadata.num_rows, bool)
        read = [np.arange(self._starts[group], self._ends[group]) for group in groups]
        if read:
            passing[np.concatenate(read)[dnf.matching(table, filters)]] = True
        return passing

    @staticmethod
    def _tells(file: ParquetSource, column: SidecarColumn) -> bool:
        """True if the statistics of a column hold for the values that are read."""
        number = file.schema_arrow.get_field_index(column.name)
        stored = None if number < 0 else file.schema_arrow.field(number).type
        return stored == column.type and (is_number(column.type) or is_text(column.type))

    def _skip(self, error: Exception) -> None:
        if not self._skips_errors:
            raise error
        warn_user(f"columns of {self._url} are null for its shard: {error}")

    @cached_property
    def _file(self) -> ParquetSource | None:
        if self._url is None:
            return None
        try:
            return self._opened.enter_context(open_parquet(self._url, self._storage_options))
        except (ShardError, ShardNotFoundError) as error:
            if isinstance(error, ShardNotFoundError) and not self._required:
                warn_user(f"{self._url} does not exist: its columns are null")
            else:
                self._skip(error)
            return None

    @cached_property
    def _sizes(self) -> np.ndarray:
        """The numbers of rows of the row groups."""
        if self._file is None:
            return np.zeros(0, np.int64)
        metadata = self._file.metadata
        groups = range(metadata.num_row_groups)
        return np.array([metadata.row_group(group).num_rows for group in groups], np.int64)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self._sizes)

    @cached_property
    def _starts(self) -> np.ndarray:
        return self._ends - self._sizes

    @cached_property
    def _keys(self) -> pa.Array:
        if self._file is None:
            return pa.array([], pa.string())
        key = key_of(self._file.schema_arrow)
        if key is None:
            raise ShardError(
                f"{self._url} has no column of text named '__key__' or 'key', by which its rows "
                "would belong to samples, or two columns of one name"
            )
        keys = self._file.read(key, range(len(self._ends))).cast(pa.string()).combine_chunks()
        counts = pc.value_counts(keys.drop_null())
        twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
        if len(twice):
            raise ShardError(
                f"{self._url} has {len(twice)} keys on several rows, first "
                f"{twice[0].as_py()!r}: which of them is the sample's, nobody can tell"
            )
        return keys

    def _read(
        self, file: ParquetSource, column: SidecarColumn, groups: Sequence[int]
    ) -> pa.ChunkedArray:
        """A column of some row groups in the type of the collection; null if it is not there."""
        if file.schema_arrow.get_field_index(column.name) < 0:
            count = int(self._sizes[np.asarray(groups, np.int64)].sum())
            return pa.chunked_array([pa.nulls(count, column.type)])
        values = file.read(column.name, groups)
        # Lists are of equal types whatever their items are called.
        same = str(values.type) == str(column.type)
        return values if same else self._cast(values, column)

    def _cast(self, values: pa.ChunkedArray, column: SidecarColumn) -> pa.ChunkedArray:
        try:
            cast = values.cast(column.type)
            if pa.types.is_null(values.type):
                return cast
            if plain_type(values.type) == column.type or _is_same(values, cast.cast(values.type)):
                return cast
        except pa.ArrowException:
            pass
        raise ShardError(
            f"the column {column.name!r} of {self._url} is of type {values.type}, and in the first "
            f"of these files of type {column.type}, which does not hold all that is in it"
        )


def _is_same(values: pa.ChunkedArray, others: pa.ChunkedArray) -> bool:
    if not pa.types.is_floating(values.type):
        return bool(values.equals(others))
    same = pc.or_(pc.equal(values, others), pc.and_(pc.is_nan(values), pc.is_nan(others)))
    return pc.all(same, min_count=0).as_py()
