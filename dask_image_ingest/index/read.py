"""An index file → what it knows of its shard, if that is still so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from dask_image_ingest.errors import DaskImageIngestError, ShardNotFoundError
from dask_image_ingest.index.check import why_broken
from dask_image_ingest.index.stored import (
    FORMAT,
    METADATA,
    ShardFacts,
    StoredIndex,
    UnusableIndexError,
    broken,
)
from dask_image_ingest.storage import ByteReader, ReaderFile, Shard, open_shard

__all__ = ["UnusableIndexError", "open_stored", "unknown_version"]

# In bytes: an index that is no larger is read whole, of a remote one by one request or two.
_READ_WHOLE = 4 << 20

# Those that were read last, by versions of the shard and of the file: the parts of a shard are
# asked for one after the other.
_MOST_KEPT = 4
_kept: dict[tuple[Shard, Shard] | None, StoredIndex] = {}

# What a parquet file makes pyarrow raise that is damaged somewhere.
_DAMAGE = (pa.ArrowException, OSError, ValueError, LookupError, OverflowError)


@contextmanager
def open_stored(
    url: str, shard: Shard, storage_options: dict[str, Any] | None
) -> Iterator[StoredIndex]:
    """Our own index of a shard, of which columns are read as they are asked for.

    Raises
    ------
    UnusableIndexError
        If it can't be read, or is one of another version of the shard, or if that can't be known;
        while it is open, if a column turns out to be damaged.
    """
    if why := unknown_version(shard):
        raise UnusableIndexError(why)
    with ExitStack() as opened:
        try:
            content = opened.enter_context(open_shard(url, storage_options))
            known = _known(url, shard, content)
            if (found := _kept.get(known)) is None:
                found = _stored(opened, content, shard)
        except ShardNotFoundError as error:
            raise UnusableIndexError("there is no such file") from error
        if found.nbytes > _READ_WHOLE:
            yield found
            return
    if known is not None:
        _kept[known] = found
        for oldest in list(_kept)[:-_MOST_KEPT]:
            _kept.pop(oldest, None)
    yield found


def _known(url: str, shard: Shard, content: ByteReader) -> tuple[Shard, Shard] | None:
    """Cache key of an index; None if it could be replaced without notice."""
    file = content.shard
    return (shard, file) if file is not None and file.url == url and file.version else None


def _stored(opened: ExitStack, content: ByteReader, shard: Shard) -> StoredIndex:
    """An index that is read whole, or while its file is ``opened``."""
    if len(content) > _READ_WHOLE:
        large = opened.enter_context(
            closing(_parquet(pa.PythonFile(ReaderFile(content), mode="r")))
        )
        facts = _facts(large, shard)
        return StoredIndex(facts, len(content), lambda name: _column(large, name))
    whole = pa.py_buffer(content[:])
    with closing(_parquet(whole)) as file:
        metadata = file.metadata
        facts = _facts(file, shard)
    # A file for each column, since threads may share the index.
    return StoredIndex(facts, len(content), lambda name: _column(_parquet(whole, metadata), name))


def unknown_version(shard: Shard) -> str:
    """Why staleness cannot be detected; "" if it can."""
    if shard.version:
        return ""
    return (
        f"the server of {shard.url} tells neither an ETag nor when a file was changed, so that a "
        "stale index would be taken for one that holds"
    )


def _parquet(source: Any, metadata: Any = None) -> parquet.ParquetFile:
    opened = pa.BufferReader(source) if isinstance(source, pa.Buffer) else source
    try:
        return parquet.ParquetFile(opened, metadata=metadata)
    except DaskImageIngestError:
        raise
    except _DAMAGE as error:
        raise UnusableIndexError(f"it is no whole parquet file ({error})") from error


def _facts(file: parquet.ParquetFile, shard: Shard) -> ShardFacts:
    try:
        facts = json.loads((file.schema_arrow.metadata or {})[METADATA])
        if facts["format"] != FORMAT:
            raise UnusableIndexError("another release of this package has written it")
        facts = ShardFacts(**facts)
    except (*_DAMAGE, TypeError, RecursionError) as error:
        raise UnusableIndexError("it is none that this package has written") from error
    if (facts.size, facts.version) != (shard.size, shard.version):
        raise UnusableIndexError(
            "it is stale: the shard has changed, or was copied, since it was written. "
            "write_index() writes it anew"
        )
    try:
        why = why_broken(file, facts)
    except (*_DAMAGE, TypeError) as error:
        why = str(error)
    if why:
        raise broken(why)
    return facts


def _column(file: parquet.ParquetFile, name: str) -> pa.Array:
    try:
        column = file.read(columns=[name], use_threads=False).column(name).combine_chunks()
        column.validate(full=True)
    except DaskImageIngestError:
        raise
    except _DAMAGE as error:
        raise broken(f"its column {name!r} cannot be read ({error})") from error
    if pa.types.is_signed_integer(column.type) and (pc.min(column).as_py() or 0) < 0:
        raise broken(f"its column {name!r} has negative numbers")
    return column
