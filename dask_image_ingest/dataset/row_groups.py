"""Which row groups of a parquet file may hold rows that a filter keeps, by their statistics."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dask_image_ingest.dataset.filters import Filters, Predicate

__all__ = ["groups_that_may_match"]


def groups_that_may_match(metadata: Any, filters: Filters, columns: Collection[str]) -> list[int]:
    """The row groups but for those in which no row passes ``filters``, as their statistics prove.

    Parameters
    ----------
    metadata
        Of the file.
    filters
        By the names that columns have in the file.
    columns
        Those whose statistics are to be believed, being numbers or text in the file as well.
    """
    paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    # Of two, one is the field of a struct.
    known = {name: paths.index(name) for name in columns if paths.count(name) == 1}
    found = []
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        limits = {name: _limits(row_group.column(number)) for name, number in known.items()}
        if any(
            all(_may_hold(limits.get(each[0]), each) for each in conjunction)
            for conjunction in filters
        ):
            found.append(group)
    return found


def _limits(chunk: Any) -> tuple[Any, Any] | None:
    """The lowest and the highest value of a column in a row group, None where that is not told."""
    statistics = chunk.statistics
    if statistics is None or not statistics.has_min_max:
        return None
    try:
        lowest, highest = statistics.min, statistics.max
    except UnicodeDecodeError:  # limits may be cut short, within a character
        return None
    plain = type(lowest) in (int, float, str) and type(highest) is type(lowest)
    # Some writers let NaN into them.
    return (lowest, highest) if plain and lowest == lowest and highest == highest else None


def _may_hold(limits: tuple[Any, Any] | None, predicate: Predicate) -> bool:
    """Whether a value between two limits, a null or NaN may pass.

    Python compares numbers of all types exactly, and text in the order that its UTF-8 has.
    """
    _, op, value = predicate
    if limits is None:
        return True
    lowest, highest = limits
    if op == "<":
        return bool(lowest < value)
    if op == "<=":
        return bool(lowest <= value)
    if op == ">":
        return bool(highest > value)
    if op == ">=":
        return bool(highest >= value)
    if op == "==":
        return bool(lowest <= value <= highest)
    if op == "in":
        return any(each is None or lowest <= each <= highest for each in value)
    return True
