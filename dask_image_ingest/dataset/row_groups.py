"""Which row groups of a parquet file may hold rows that a filter keeps, by their statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from dask_image_ingest.dataset.comparison import compare
from dask_image_ingest.dataset.filters import Filters, Predicate

__all__ = ["groups_that_may_match"]


def groups_that_may_match(
    metadata: Any, filters: Filters, types: Mapping[str, pa.DataType]
) -> list[int]:
    """The row groups but for those in which no row passes ``filters``, as their statistics prove.

    Parameters
    ----------
    metadata
        Of the file.
    filters
        By the names that columns have in the file.
    types
        The columns whose statistics are to be believed: numbers and text, of these types in the
        file as well.
    """
    paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    # Of two, one is the field of a struct.
    known = {name: paths.index(name) for name in types if paths.count(name) == 1}
    found = []
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        limits = {name: _limits(row_group.column(number)) for name, number in known.items()}
        if any(
            all(_may_hold(limits.get(each[0]), types, each) for each in conjunction)
            for conjunction in filters
        ):
            found.append(group)
    return found


def _limits(chunk: Any) -> tuple[Any, Any] | None:
    """The lowest and the highest value of a column in a row group, None where that is not told."""
    statistics = chunk.statistics
    if statistics is None or not statistics.has_min_max:
        return None
    lowest, highest = statistics.min, statistics.max
    plain = type(lowest) in (int, float, str) and type(highest) is type(lowest)
    # Some writers let NaN into them.
    return (lowest, highest) if plain and lowest == lowest and highest == highest else None


def _may_hold(
    limits: tuple[Any, Any] | None, types: Mapping[str, pa.DataType], predicate: Predicate
) -> bool:
    column, op, value = predicate
    if limits is None:
        return True
    lowest, highest = (pa.chunked_array([pa.array([end], types[column])]) for end in limits)

    def holds(end: pa.ChunkedArray, op: str, value: Any) -> bool:
        return bool(compare(end, op, value)[0].as_py())

    if op in ("<", "<="):
        return holds(lowest, op, value)
    if op in (">", ">="):
        return holds(highest, op, value)
    if op in ("==", "in"):
        values = value if op == "in" else (value,)
        # NaN and null are in no statistics.
        return any(
            each is None or (holds(lowest, "<=", each) and holds(highest, ">=", each))
            for each in values
        )
    return True
