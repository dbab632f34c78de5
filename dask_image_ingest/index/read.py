"""An index file → what it knows of its shard, if that is still so."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from dask_image_ingest.errors import ShardError, ShardNotFoundError
from dask_image_ingest.index.stored import FORMAT, METADATA, ShardFacts, StoredIndex
from dask_image_ingest.storage import LazyBytes, Shard, local_path, open_shard

__all__ = ["UnusableIndexError", "open_stored"]

# In bytes: a remote index that is no larger is fetched whole, by one request or two.
_FETCHED_WHOLE = 4 << 20


class UnusableIndexError(Exception):
    """Why an index is not used."""


@contextmanager
def open_stored(
    url: str, shard: Shard, storage_options: dict[str, Any] | None
) -> Iterator[StoredIndex]:
    """Our own index of a shard, of which columns are read as they are asked for.

    Raises
    ------
    UnusableIndexError
        If it can't be read, or is one of another version of the shard.
    """
    with ExitStack() as opened:
        try:
            content = opened.enter_context(open_shard(url, storage_options))
            file = parquet.ParquetFile(_source(url, content))
        except ShardNotFoundError as error:
            raise UnusableIndexError("there is no such file") from error
        except pa.ArrowException as error:
            raise UnusableIndexError(f"it is no whole parquet file ({error})") from error
        opened.enter_context(closing(file))
        facts = _facts(file, shard)
        yield StoredIndex(facts, len(content), lambda name: _column(file, url, name))


def _source(url: str, content: LazyBytes) -> Any:
    path = local_path(url)
    if path is not None:
        return path
    if len(content) <= _FETCHED_WHOLE:
        return pa.BufferReader(pa.py_buffer(content[:]))
    return pa.PythonFile(_File(content), mode="r")


def _facts(file: parquet.ParquetFile, shard: Shard) -> ShardFacts:
    try:
        facts = json.loads((file.schema_arrow.metadata or {})[METADATA])
        if facts["format"] != FORMAT:
            raise UnusableIndexError("another release of this package has written it")
        facts = ShardFacts(**facts)
    except (KeyError, ValueError, TypeError) as error:
        raise UnusableIndexError("it is none that this package has written") from error
    if (facts.size, facts.version) != (shard.size, shard.version):
        raise UnusableIndexError(
            "it is stale: the shard has changed, or was copied, since it was written. "
            "write_index() writes it anew"
        )
    return facts


def _column(file: parquet.ParquetFile, url: str, name: str) -> pa.Array:
    try:
        column = file.read(columns=[name]).column(name)
    except (pa.ArrowException, OSError) as error:
        raise ShardError(f"the index {url} cannot be read: {error}. Write it anew") from error
    return column.combine_chunks()


class _File(io.RawIOBase):
    """Bytes that are fetched in ranges, as a file."""

    def __init__(self, content: LazyBytes) -> None:
        self._content = content
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._content)}
        self._position = start[whence] + offset
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        stop = len(self._content) if size < 0 else self._position + size
        data = bytes(self._content[self._position : stop])
        self._position += len(data)
        return data
