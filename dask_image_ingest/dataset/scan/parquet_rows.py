"""Parquet: rows of a file with columns of encoded images; a sidecar, the file beside a shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.dataset.predicates import Predicate, columns_of, holds, only
from dask_image_ingest.dataset.read_options import ReadOptions
from dask_image_ingest.dataset.scan.rows import NO_BYTES, ImageRows
from dask_image_ingest.dataset.schema.columns import FileColumn, ImageMember
from dask_image_ingest.dataset.schema.file_columns import (
    check_encoded_type,
    encoded_views,
    key_of,
    plain_type,
    without_it,
)
from dask_image_ingest.decode import Header
from dask_image_ingest.errors import (
    PartitionTooLargeError,
    ShardError,
    ShardNotFoundError,
    warn_user,
)
from dask_image_ingest.frames import as_tensors, get_backend, references_of_fields
from dask_image_ingest.storage import (
    NotParquetError,
    ParquetSource,
    RowSpan,
    Shard,
    open_parquet,
)

# Bytes of a row at least, for its number, position and key.
_BYTES_OF_A_ROW = 32


class ParquetColumns:
    """Columns of a parquet file, taken by row number; -1 gives null. ``opened`` closes the file.

    It is opened on first access. No more of a column is read at once than a partition can hold.
    """

    def __init__(
        self,
        listed: Shard | None,
        columns: Sequence[FileColumn],
        options: ReadOptions,
        opened: ExitStack,
    ) -> None:
        self._listed = listed
        self.url = None if listed is None else listed.url
        self._columns = {column.column: column for column in columns}
        self._options = options
        self._opened = opened
        self._limit = get_backend(options.backend).largest_partition
        #: Predicate → result of `_candidates_of`.
        self._candidates: dict[Predicate, np.ndarray] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def column(self, name: str, rows: Sequence[int] | np.ndarray) -> pa.Array:
        """A column of the frame at these rows of the file."""
        column = self._columns[name]
        positions = np.asarray(rows, np.int64)
        if self.file is None or not (positions >= 0).any():
            return pa.nulls(len(rows), column.type)
        try:
            arrays, positions = self.values(column.name, positions)
            values = self._typed(pa.chunked_array(arrays).combine_chunks(), column)
        except ShardError as error:
            self._skip(error)
            return pa.nulls(len(rows), column.type)
        return values.take(pa.array(positions, pa.int64(), mask=positions < 0))

    def values(
        self, name: str, rows: np.ndarray, packed: bool = False
    ) -> tuple[list[pa.Array], np.ndarray]:
        """Values of a column that include these rows, and the rows' positions therein.

        ``packed`` as for `ParquetSource.read_rows`.
        """
        present = rows >= 0
        wanted = rows[present]
        groups, group = np.unique(np.searchsorted(self.ends, wanted, "right"), return_inverse=True)
        first, last = np.full(len(groups), self.rows), np.zeros(len(groups), np.int64)
        np.minimum.at(first, group, wanted)
        np.maximum.at(last, group, wanted)
        begins = np.append(0, self.ends)[groups]
        spans = zip(groups, first - begins, last + 1 - begins, strict=True)
        arrays = self._read(name, [RowSpan(*map(int, span)) for span in spans], packed)
        sizes = last + 1 - first
        positions = rows.copy()
        positions[present] += (np.cumsum(sizes) - sizes - first)[group]
        return arrays, positions

    def may_have(self, predicate: Predicate | None) -> bool:
        """False if the columns of this file show that no row passes a predicate."""
        candidates = self._candidates_of(predicate)
        return candidates is None or bool(candidates.any())

    def keep(
        self, predicate: Predicate, rows: Callable[[], Sequence[int] | np.ndarray]
    ) -> np.ndarray | None:
        """Positions in ``rows`` that may pass a predicate; None if it uses no column of these."""
        candidates = self._candidates_of(predicate)
        if candidates is None:
            return None
        return np.flatnonzero(candidates[np.asarray(rows(), np.int64)])

    def _candidates_of(self, predicate: Predicate | None) -> np.ndarray | None:
        """Mark rows of the file that may pass; the last mark is that of a row of nulls."""
        known = only(predicate, self._columns)
        if known is not None and known not in self._candidates:
            rows = np.append(np.arange(self.rows), -1)
            table = pa.table({name: self.column(name, rows) for name in columns_of(known)})
            self._candidates[known] = holds(known, table)
        return None if known is None else self._candidates[known]

    def _skip(self, error: Exception) -> None:
        """Raise; a subclass may return, and the columns are null then."""
        raise error

    @cached_property
    def file(self) -> ParquetSource | None:
        """The file, opened on first access; None without one."""
        if self._listed is None:
            return None
        return self._opened.enter_context(open_parquet(self._listed, self._options.storage_options))

    @cached_property
    def ends(self) -> np.ndarray:
        """Row number at which each row group ends; shape (row groups,), int64."""
        if self.file is None:
            return np.zeros(0, np.int64)
        metadata = self.file.metadata
        groups = range(metadata.num_row_groups)
        sizes = [metadata.row_group(group).num_rows for group in groups]
        if min(sizes, default=0) < 0 or sum(sizes) > self._limit // _BYTES_OF_A_ROW:
            raise ShardError(
                f"{self.url} claims to have {sum(sizes):,} rows, more than this worker's memory "
                "can hold: write it as several files"
            )
        return np.cumsum(np.array(sizes, np.int64))

    @property
    def rows(self) -> int:
        """Number of rows of the file."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def _read(self, name: str, spans: Sequence[RowSpan], packed: bool) -> list[pa.Array]:
        if self.file is None or self.file.schema_arrow.get_field_index(name) < 0:
            return [self._absent(name, sum(span.stop - span.start for span in spans))]
        schema = self.file.schema_arrow
        type_, of_bytes = schema.field(name).type, f"{name}.bytes"
        # Of struct<bytes, path> only the bytes, which can be read by pages. Not beside a column of
        # that name, which pyarrow would read, too.
        of_files = packed and pa.types.is_struct(type_) and "bytes" in type_.names
        column = of_bytes if of_files and of_bytes not in schema.names else name
        return self.file.read_rows(column, spans, self._limit, packed)

    def _absent(self, name: str, count: int) -> pa.Array:
        """The values of a column that the file lacks."""
        raise ShardError(f"{self.url} has no column {name!r}, which the first of these files has")

    def _typed(self, values: pa.Array | pa.ChunkedArray, column: FileColumn) -> Any:
        """Cast to the column's type in the collection; raise if a value would change."""
        # By text: list types that differ only in the name of their items count as equal.
        if str(values.type) == str(column.type):
            return values
        try:
            if isinstance(column.type, pa.FixedShapeTensorType):
                return as_tensors(values, column.type)
            cast = values.cast(column.type)
            if pa.types.is_null(values.type):
                return cast
            if plain_type(values.type) == column.type or _is_same(values, cast.cast(values.type)):
                return cast
        except pa.ArrowException:
            pass
        raise ShardError(
            f"the column {column.name!r} of {self.url} is of type {values.type}, and some of its "
            f"values don't fit type {column.type}, which it has in the first of these files"
        )


def _is_same(values: pa.Array | pa.ChunkedArray, others: pa.Array | pa.ChunkedArray) -> bool:
    """True if all values are equal, NaN being equal to NaN."""
    if not pa.types.is_floating(values.type):
        return bool(values.equals(others))
    same = pc.or_(pc.equal(values, others), pc.and_(pc.is_nan(values), pc.is_nan(others)))
    return pc.all(same, min_count=0).as_py()


# Digits of a row number in a key, zero-padded so that keys sort like rows.
_DIGITS = 8


class ParquetRows(ImageRows):
    """The rows of one file. Columns are read for the row groups of the wanted rows alone."""

    def __init__(self, columns: ParquetColumns, options: ReadOptions) -> None:
        super().__init__(columns.url or "", np.arange(columns.rows), options)
        self._columns = columns
        #: Column of the file → number of a row → its encoded image, a view; None for null.
        self._encoded: dict[str, dict[int, memoryview | None]] = {}

    def encoded(self, member: ImageMember, numbers: np.ndarray) -> list[memoryview | None]:
        """The encoded image of each row, a view of the column; None for null."""
        (name,) = member.extensions
        known = self._encoded.setdefault(name, {})
        new = [number for number in numbers.tolist() if number not in known]
        if new:
            arrays, positions = self._columns.values(name, np.array(new), packed=True)
            images: list[memoryview | None] = []
            try:
                for array in arrays:
                    check_encoded_type(array.type)
                    images += encoded_views(array)
            except (TypeError, pa.ArrowException) as error:
                raise ShardError(
                    f"the column {name!r} of {self.url} holds no encoded images: {error}"
                ) from error
            known.update(zip(new, map(images.__getitem__, positions.tolist()), strict=True))
        return [known[number] for number in numbers.tolist()]

    def _read_headers(self, member: ImageMember, numbers: np.ndarray) -> list[Header]:
        return [
            NO_BYTES if data is None else member.decoding.read_header(data)
            for data in self.encoded(member, numbers)
        ]

    def _reader(
        self, member: ImageMember, numbers: np.ndarray
    ) -> tuple[Callable[[int], Any], Callable[[], None]]:
        return self.encoded(member, numbers).__getitem__, lambda: None

    def keep(self, numbers: np.ndarray, filters: Predicate | None) -> np.ndarray:
        """The rows for which ``filters`` hold. Filters on columns of the file run first."""
        if not filters:
            return numbers
        candidates = self._columns.keep(filters, lambda: numbers)
        numbers = numbers if candidates is None else numbers[candidates]
        only_file = all(name in self._columns for name in columns_of(filters))
        return numbers if only_file else super().keep(numbers, filters)

    def part(self, part: int, parts: int) -> np.ndarray:
        """One of ``parts`` parts, cut at the edge of a row group if one is near."""
        return self.numbers[self._edge(part, parts) : self._edge(part + 1, parts)]

    def _edge(self, part: int, parts: int) -> int:
        # The edge of an equal part, or that of a row group less than half a part away.
        count = len(self.numbers)
        even = count * part // parts
        edges = np.append(0, self._columns.ends)
        nearest = int(edges[np.abs(edges - even).argmin()])
        return nearest if 2 * abs(nearest - even) * parts < count else even

    def column(self, name: str, numbers: np.ndarray) -> pa.Array:
        if name in self._columns:
            return self._columns.column(name, numbers)
        if name == "__key__":
            file, _, suffix = self.url.rpartition("/")[2].rpartition(".")
            stem = file or suffix
            return pa.array([f"{stem}/{number:0{_DIGITS}}" for number in numbers.tolist()])
        return super().column(name, numbers)

    def field(self, member: ImageMember, name: str, numbers: np.ndarray) -> pa.Array:
        if name == "nbytes":
            encoded = self.encoded(member, numbers)
            return pa.array([None if data is None else len(data) for data in encoded], pa.int64())
        return super().field(member, name, numbers)

    def references(self, member: ImageMember, numbers: np.ndarray) -> pa.StructArray:
        """References that carry the encoded images: parquet gives no offsets to read them by.

        Raises
        ------
        PartitionTooLargeError
            Before any is copied: a dictionary may repeat them.
        """
        sizes = self.field(member, "nbytes", numbers)
        nbytes = pc.sum(sizes).as_py() or 0
        if nbytes > (largest := get_backend(self.options.backend).largest_partition):
            raise PartitionTooLargeError(
                f"rows {numbers[0]}-{numbers[-1]} of {self.url} are "
                f"{nbytes / 1e9:.1f} GB of encoded images, and one partition holds at most "
                f"{largest / 1e9:.1f} GB here. Read with decode=True and size=, or filter rows"
            )
        url = pa.scalar(self.url, pa.string())
        fields = {
            # No file for a row without bytes: nothing there could be opened.
            "url": pc.if_else(sizes.is_valid(), url, pa.scalar(None, pa.string())),
            "number": pa.array(numbers),
            "key": self.column("__key__", numbers),
            "nbytes": sizes,
            "bytes": pa.array(self.encoded(member, numbers), pa.large_binary()),
        }
        return references_of_fields(len(numbers), fields)


class UnjoinableError(ShardError):
    """A parquet file beside a shard has no keys, or repeats one: it may be no sidecar."""


class Sidecar(ParquetColumns):
    """Columns of a sidecar, by the keys of samples.

    Columns are null if no sidecar was listed; if the file is missing, no parquet file, or samples
    can't be joined to it by key, unless ``needs_sidecars``; and if it can't be read with
    ``shard_errors="drop"``. (To
    skip the shard's rows instead would make the number of rows depend on whether a query uses the
    sidecar.)
    """

    def rows_of(self, keys: Sequence[str]) -> list[int]:
        """The row of each key in the file; -1 if it has none."""
        if self.file is None:
            return [-1] * len(keys)
        try:
            return self._rows(keys)
        except ShardError as error:
            self._skip(error)
            return [-1] * len(keys)

    def _rows(self, keys: Sequence[str]) -> list[int]:
        indices = pc.index_in(pa.array(keys, pa.string()), value_set=self._keys)
        missing = indices.null_count
        if missing:
            warn_user(
                f"{self.url} has no row for {missing} of {len(keys)} samples of its shard: its "
                "columns are null there"
            )
        rows: list[int] = indices.fill_null(-1).to_pylist()
        return rows

    @cached_property
    def _keys(self) -> pa.Array:
        if self.file is None:
            return pa.array([], pa.string())
        key = key_of(self.file.schema_arrow)
        if key is None:
            raise UnjoinableError(
                f"{self.url} has no column of text named '__key__' or 'key' to join its rows to "
                "samples by, or it has two columns of one name"
            )
        keys = self.file.read(key, range(len(self.ends))).cast(pa.string()).combine_chunks()
        counts = pc.value_counts(keys.drop_null())
        repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
        if len(repeated):
            raise UnjoinableError(
                f"{self.url} has {len(repeated)} keys on several rows, first "
                f"{repeated[0].as_py()!r}: "
                "which row belongs to the sample is ambiguous"
            )
        return keys

    def _skip(self, error: Exception) -> None:
        tolerated = isinstance(error, (UnjoinableError, NotParquetError))
        tolerated &= not self._options.needs_sidecars
        if not (self._options.shard_errors == "drop" or tolerated):
            raise without_it(error)
        warn_user(f"columns of {self.url} are null for its shard: {error}")

    @cached_property
    def file(self) -> ParquetSource | None:
        """The file, opened on first access; None if there is none or it can't be read."""
        try:
            return super().file
        except (ShardError, ShardNotFoundError) as error:
            if isinstance(error, ShardNotFoundError) and not self._options.needs_sidecars:
                warn_user(f"{self.url} does not exist: its columns are null")
            else:
                self._skip(error)
            return None

    def _absent(self, name: str, count: int) -> pa.Array:
        return pa.nulls(count)
