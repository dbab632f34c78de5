"""A parquet file beside a shard, local or remote, of which only what is asked for is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage.open import open_shard
from dask_image_ingest.storage.reader import ByteReader, ReaderFile

# Where a footer lies, mostly.
_FOOTER = 64 << 10


class ParquetSource:
    """An open parquet file, whose columns are read by row groups, which is how the file has them.

    ``metadata`` is its footer, if that was read already.
    """

    def __init__(
        self, url: str, content: ByteReader, metadata: parquet.FileMetaData | None = None
    ) -> None:
        self.url = url
        self._content = content
        if metadata is None:
            content.prefetch([(max(0, len(content) - _FOOTER), len(content))])
        with self._translated_errors():
            held = content.in_memory()
            whole = len(held) == len(content)
            source = pa.BufferReader(held) if whole else pa.PythonFile(ReaderFile(content), "r")
            self._file = parquet.ParquetFile(
                source, metadata=metadata, pre_buffer=False, page_checksum_verification=True
            )

    @property
    def schema_arrow(self) -> pa.Schema:
        """The columns and their types."""
        return self._file.schema_arrow

    @property
    def metadata(self) -> Any:
        """The footer, statistics of row groups among it."""
        return self._file.metadata

    def read(self, column: str, groups: Sequence[int]) -> pa.ChunkedArray:
        """A column of some row groups, one after the other."""
        field = self.schema_arrow.field(column)
        if not len(groups):
            return pa.chunked_array([], field.type)
        self._content.prefetch(self._places(column, groups))
        with self._translated_errors():
            table = self._file.read_row_groups(groups, columns=[column], use_threads=False)
            # pyarrow takes a dot for a field of a struct, and may have read more than one column.
            values = table.column(column)
            values.validate(full=True)  # a parquet file may call any bytes text
        rows = sum(self.metadata.row_group(group).num_rows for group in groups)
        if len(values) != rows:
            # pyarrow skips a page of whose header it knows nothing.
            raise ShardError(
                f"{self.url} cannot be read as parquet: its column {column!r} has {len(values)} of "
                f"{rows} values"
            )
        return values

    def _places(self, column: str, groups: Sequence[int]) -> Iterator[tuple[int, int]]:
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
def open_parquet(url: str, storage_options: dict[str, Any] | None) -> Iterator[ParquetSource]:
    """Open a parquet file by its footer.

    Raises
    ------
    ShardNotFoundError, ShardError
    """
    with open_shard(url, storage_options) as content:
        yield ParquetSource(url, content)
