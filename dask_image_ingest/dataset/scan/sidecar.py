"""Columns of a sidecar, the parquet file beside a shard, joined to its samples by key."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.dataset.scan.parquet_rows import ParquetColumns
from dask_image_ingest.dataset.schema.file_columns import key_of, without_it
from dask_image_ingest.errors import ShardError, ShardNotFoundError, warn_user
from dask_image_ingest.storage import NotParquetError, ParquetSource


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
