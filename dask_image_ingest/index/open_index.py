"""Opening of index files: what is stale or broken is not used."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from dask_image_ingest.errors import DaskImageIngestError, ShardNotFoundError
from dask_image_ingest.index.stored_index import (
    FORMAT,
    KEY,
    METADATA,
    ShardFacts,
    StoredIndex,
    UnusableIndexError,
    broken,
)
from dask_image_ingest.storage import ByteReader, ReaderFile, Shard, open_shard
from dask_image_ingest.tar import FIELDS, SPAN_FIELDS


def why_broken(file: parquet.ParquetFile, facts: ShardFacts) -> str | None:
    """Reason why an index is broken; None if it is valid."""
    if not _are_facts(facts):
        return "what it tells of the shard makes no sense"
    if file.metadata.num_rows != facts.samples:
        return f"it has {file.metadata.num_rows} rows, and {facts.samples} samples by its own word"
    types = {
        f"{extension}/{name}": FIELDS[name]
        for extension, names in facts.extensions.items()
        for name in names
    }
    schema = file.schema_arrow
    for column, type_ in {KEY: pa.string(), **types}.items():
        places = schema.get_all_field_indices(column)
        if len(places) != 1 or schema.field(places[0]).type != type_:
            return f"it has no column {column!r} of type {type_}"
    return _misplaced(file.metadata, facts)


def _are_facts(facts: ShardFacts) -> bool:
    rows = range(facts.samples) if _is_count(facts.samples) else range(0)
    damage: dict[str, Any] | None = facts.damage
    return (
        all(map(_is_count, (facts.samples, facts.members, facts.pax)))
        and (damage is None or _is_damage(damage))
        and _is_list_of(facts.interleaved, _is_text)
        and _is_list_of(facts.repeated, _is_text)
        and isinstance(facts.extensions, dict)
        and all(_are_fields(names) for names in facts.extensions.values())
        and _is_list_of(facts.rest, lambda entry: _is_entry(entry, rows, facts.extensions))
        and _is_list_of(facts.duplicates, lambda entry: _is_duplicate(entry, rows))
        and _is_list_of(facts.sparse, _is_sparse)
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return _is_count(value) and value < 2**63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list_of(values: Any, holds: Any) -> bool:
    return isinstance(values, list) and all(map(holds, values))


def _is_damage(damage: Any) -> bool:
    return (
        isinstance(damage, dict)
        and damage.keys() == {"offset", "reason", "code"}
        and _is_count(damage["offset"])
        and _is_text(damage["reason"])
        and _is_text(damage["code"])
    )


def _are_fields(names: Any) -> bool:
    return _is_list_of(names, FIELDS.__contains__) and SPAN_FIELDS.keys() <= set(names)


def _is_entry(entry: Any, rows: range, extensions: dict[str, Any]) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 4
        and entry[0] in rows
        and _is_text(entry[1])
        and entry[1] not in extensions
        and _is_number(entry[2])
        and _is_number(entry[3])
    )


def _is_duplicate(entry: Any, rows: range) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and entry[0] in rows
        and _is_list_of(entry[1], _is_text)
    )


def _is_sparse(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 3 or not all(map(_is_count, entry[:2])):
        return False
    return _is_list_of(entry[2], lambda piece: _is_piece(piece, entry[1]))


def _is_piece(piece: Any, size: int) -> bool:
    return (
        isinstance(piece, list)
        and len(piece) == 2
        and all(map(_is_count, piece))
        and sum(piece) <= size
    )


def _misplaced(metadata: parquet.FileMetaData, facts: ShardFacts) -> str | None:
    """Say which members lie nowhere, by the statistics of the columns."""
    nulls: dict[str, int] = {}
    for name, statistics in _statistics(metadata):
        if statistics is None or not statistics.has_null_count:
            return f"its column {name!r} has no statistics"
        if statistics.has_min_max and statistics.min < 0:
            return f"its column {name!r} has negative numbers"
        nulls[name] = nulls.get(name, 0) + statistics.null_count
    for extension in facts.extensions:
        if nulls.get(f"{extension}/offset") != nulls.get(f"{extension}/size"):
            return f"some of its members {extension!r} have a place and no size, or the reverse"
    return None


def _statistics(metadata: parquet.FileMetaData) -> Iterator[tuple[str, Any]]:
    """The statistics of places and sizes, for each group of rows."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(metadata.num_columns)):
            name = column.path_in_schema
            if group.num_rows and name.rpartition("/")[2] in SPAN_FIELDS:
                yield name, column.statistics


# In bytes: an index that is no larger is read whole, of a remote one by one request or two.
_READ_WHOLE = 4 << 20

# In bytes: of a smaller index all columns at once cost no more than two or three one by one.
_READ_AT_ONCE = 64 << 10

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
    if len(content) <= _READ_AT_ONCE:
        return StoredIndex(facts, len(content), _AllColumns(whole, metadata))
    # A file for each column, since threads may share the index.
    return StoredIndex(facts, len(content), lambda name: _column(_parquet(whole, metadata), name))


class _AllColumns:
    """The columns of a small index, which are all read when one of them is."""

    def __init__(self, whole: pa.Buffer, metadata: parquet.FileMetaData) -> None:
        self._whole = whole
        self._metadata = metadata

    def __call__(self, name: str) -> pa.Array:
        table = self._table
        if table is None:  # the damage may be in another column
            return _column(_parquet(self._whole, self._metadata), name)
        return _checked(table.column(name), name)

    @functools.cached_property
    def _table(self) -> pa.Table | None:
        try:
            return _parquet(self._whole, self._metadata).read(use_threads=False)
        except _DAMAGE:
            return None


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
        column = file.read(columns=[name], use_threads=False).column(name)
    except DaskImageIngestError:
        raise
    except _DAMAGE as error:
        raise broken(f"its column {name!r} cannot be read ({error})") from error
    return _checked(column, name)


def _checked(chunks: pa.ChunkedArray, name: str) -> pa.Array:
    try:
        column = chunks.combine_chunks()
        column.validate(full=True)
    except _DAMAGE as error:
        raise broken(f"its column {name!r} cannot be read ({error})") from error
    if pa.types.is_signed_integer(column.type) and (pc.min(column).as_py() or 0) < 0:
        raise broken(f"its column {name!r} has negative numbers")
    return column
