"""Parquet files beside shards, local or remote: reads single columns of single row groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage.open import open_shard
from dask_image_ingest.storage.reader import ByteReader, ReaderFile
from dask_image_ingest.storage.shard import Shard

# Bytes at the end of a file that hold most footers.
_FOOTER = 64 << 10


class ParquetSource:
    """An open parquet file, read by column and row group.

    ``metadata`` is its footer, if that was read before.
    """

    def __init__(
        self, url: str, content: ByteReader, metadata: parquet.FileMetaData | None = None
    ) -> None:
        self.url = url
        self._content = content
        if metadata is None:
            content.prefetch([(max(0, len(content) - _FOOTER), len(content))])
        with self._translated_errors():
            data = content.in_memory()
            is_whole = len(data) == len(content)
            source = pa.BufferReader(data) if is_whole else pa.PythonFile(ReaderFile(content), "r")
            self._file = parquet.ParquetFile(
                source, metadata=metadata, pre_buffer=False, page_checksum_verification=True
            )

    @property
    def schema_arrow(self) -> pa.Schema:
        """The columns and their types."""
        return self._file.schema_arrow

    @property
    def metadata(self) -> Any:
        """The footer, with the statistics of row groups."""
        return self._file.metadata

    def read(self, column: str, groups: Sequence[int]) -> pa.ChunkedArray:
        """Read a column of some row groups, concatenated in the given order."""
        field = self.schema_arrow.field(column)
        if not len(groups):
            return pa.chunked_array([], field.type)
        self._content.prefetch(self._ranges(column, groups))
        with self._translated_errors():
            table = self._file.read_row_groups(groups, columns=[column], use_threads=False)
            # Select again: pyarrow takes "a" for "a.b", too, hence may have read more columns.
            values = table.column(column)
            values.validate(full=True)  # pyarrow does not check that strings are UTF-8
        rows = sum(self.metadata.row_group(group).num_rows for group in groups)
        if len(values) != rows:
            # pyarrow skips pages with unknown headers.
            raise ShardError(
                f"{self.url} cannot be read as parquet: its column {column!r} has {len(values)} of "
                f"{rows} values"
            )
        return values

    def _ranges(self, column: str, groups: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Byte ranges of a column, with its nested ones, in some row groups."""
        metadata = self.metadata
        for group in groups:
            row_group = metadata.row_group(group)
            for number in range(row_group.num_columns):
                chunk = row_group.column(number)
                if f"{chunk.path_in_schema}.".startswith(f"{column}."):
                    start = chunk.dictionary_page_offset or chunk.data_page_offset
                    start = min(start, chunk.data_page_offset)
                    yield start, start + chunk.total_compressed_size

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, ShardError):
                raise
            raise ShardError(f"{self.url} cannot be read as parquet: {error}") from error


@contextmanager
def open_parquet(file: Shard, storage_options: dict[str, Any] | None) -> Iterator[ParquetSource]:
    """Open a parquet file, which must not have changed since it was listed; reads its footer.

    Raises
    ------
    ShardNotFoundError, ShardError
    """
    with open_shard(file.url, storage_options, file) as content:
        yield ParquetSource(file.url, content)
