"""Columns of a parquet file by the numbers of its rows, read where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.dataset import filters as dnf
from dask_image_ingest.dataset.filters import Filters
from dask_image_ingest.dataset.schema.columns import FileColumn
from dask_image_ingest.dataset.schema.file_columns import plain_type
from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage import ParquetSource, open_parquet


class ParquetColumns:
    """Columns of a file, which ``opened`` closes. A row of number -1 is not there: it is null."""

    def __init__(
        self,
        url: str | None,
        columns: Sequence[FileColumn],
        storage_options: dict[str, Any] | None,
        opened: ExitStack,
    ) -> None:
        self.url = url
        self._columns = {column.column: column for column in columns}
        self._storage_options = storage_options
        self._opened = opened
        self._candidates: dict[Filters, tuple[np.ndarray, bool]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def column(self, name: str, rows: Sequence[int] | np.ndarray) -> pa.Array:
        """A column of the frame, of some rows."""
        wanted = self._columns[name]
        places = np.asarray(rows, np.int64)
        if self.file is None or not (places >= 0).any():
            return pa.nulls(len(rows), wanted.type)
        try:
            values, places = self.values(wanted.name, places)
            values = self._typed(values.combine_chunks(), wanted)
        except ShardError as error:
            self._skip(error)
            return pa.nulls(len(rows), wanted.type)
        return values.take(pa.array(places, pa.int64(), mask=places < 0))

    def values(self, name: str, rows: np.ndarray) -> tuple[pa.ChunkedArray, np.ndarray]:
        """A column of the file, of the row groups that some rows are in, and their places there."""
        there = rows >= 0
        groups = np.unique(np.searchsorted(self.ends, rows[there], "right"))
        values = self._read(name, groups.tolist())
        # Groups that were left out come before.
        ends = self.ends[groups]
        sizes = np.diff(self.ends, prepend=0)[groups]
        left_out = ends - np.cumsum(sizes)
        places = rows.copy()
        places[there] -= left_out[np.searchsorted(ends, rows[there], "right")]
        return values, places

    def may_have(self, filters: Filters | None) -> bool:
        """True if some row may pass ``filters``, by the columns here."""
        restricted = dnf.only(filters, self._columns)
        if restricted is None:
            return True
        candidates, null = self._candidates_of(restricted)
        return null or bool(candidates.any())

    def keep(
        self, filters: Filters, rows: Callable[[], Sequence[int] | np.ndarray]
    ) -> np.ndarray | None:
        """The positions among ``rows`` of those that may pass ``filters``; None: of all."""
        restricted = dnf.only(filters, self._columns)
        if restricted is None:
            return None
        candidates, null = self._candidates_of(restricted)
        return np.flatnonzero(np.append(candidates, null)[np.asarray(rows(), np.int64)])

    def _candidates_of(self, filters: Filters) -> tuple[np.ndarray, bool]:
        """A mark for each row of the file that passes ``filters``, and one if nulls do."""
        if filters not in self._candidates:
            columns = [self._columns[name] for name in sorted(dnf.columns_of(filters))]
            nulls = pa.table({c.column: pa.nulls(1, c.type) for c in columns})
            null = len(dnf.matching(nulls, filters)) > 0
            self._candidates[filters] = self._passing(filters, columns), null
        return self._candidates[filters]

    def _passing(self, filters: Filters, columns: Sequence[FileColumn]) -> np.ndarray:
        """A mark for each row of the file that may pass."""
        if self.file is None:
            return np.zeros(0, bool)
        groups = range(len(self.ends))
        passing = np.zeros(self.rows, bool)
        try:
            table = pa.table(
                {c.column: self._typed(self._read(c.name, groups), c) for c in columns}
            )
        except ShardError as error:
            self._skip(error)
            # One of the columns may be whole: what passes is asked of all of them later.
            return ~passing
        passing[dnf.matching(table, filters)] = True
        return passing

    def _skip(self, error: Exception) -> None:
        """Raise what went wrong, unless columns may be null then."""
        raise error

    @cached_property
    def file(self) -> ParquetSource | None:
        """The file, which is opened now; None where there is none."""
        if self.url is None:
            return None
        return self._opened.enter_context(open_parquet(self.url, self._storage_options))

    @cached_property
    def ends(self) -> np.ndarray:
        """The number of rows up to the end of each row group."""
        if self.file is None:
            return np.zeros(0, np.int64)
        metadata = self.file.metadata
        groups = range(metadata.num_row_groups)
        sizes = [metadata.row_group(group).num_rows for group in groups]
        return np.cumsum(np.array(sizes, np.int64))

    @property
    def rows(self) -> int:
        """Number of rows of the file."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def _read(self, name: str, groups: Sequence[int]) -> pa.ChunkedArray:
        if self.file is None or self.file.schema_arrow.get_field_index(name) < 0:
            return self._absent(name, int(np.diff(self.ends, prepend=0)[list(groups)].sum()))
        return self.file.read(name, groups)

    def _absent(self, name: str, count: int) -> pa.ChunkedArray:
        """The values of a column that the file lacks."""
        raise ShardError(f"{self.url} has no column {name!r}, which the first of these files has")

    def _typed(self, values: Any, column: FileColumn) -> Any:
        """The values of a column in the type of the collection."""
        # Lists are of equal types whatever their items are called.
        if str(values.type) == str(column.type):
            return values
        try:
            cast = values.cast(column.type)
            if pa.types.is_null(values.type):
                return cast
            if plain_type(values.type) == column.type or _is_same(values, cast.cast(values.type)):
                return cast
        except pa.ArrowException:
            pass
        raise ShardError(
            f"the column {column.name!r} of {self.url} is of type {values.type}, and in the first "
            f"of these files of type {column.type}, which does not hold all that is in it"
        )


def _is_same(values: Any, others: Any) -> bool:
    if not pa.types.is_floating(values.type):
        return bool(values.equals(others))
    same = pc.or_(pc.equal(values, others), pc.and_(pc.is_nan(values), pc.is_nan(others)))
    return pc.all(same, min_count=0).as_py()
