"""Validation of an index file: columns, lengths and facts that agree.

Told by the end of the file alone, before a column is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from dask_image_ingest.index.stored import FIELDS, KEY, SPAN_FIELDS, ShardFacts

__all__ = ["why_broken"]


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
        and _is_count(entry[2])
        and _is_count(entry[3])
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
