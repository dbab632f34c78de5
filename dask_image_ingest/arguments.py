"""Checks that several public functions make of their arguments."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

from dask_image_ingest.errors import ArgumentError


def whole_number(name: str, value: Any, least: int, advice: str, most: float = math.inf) -> int:
    """``value`` as an int, of whatever library its type is.

    Raises
    ------
    ArgumentError
        If it is no whole number, a bool, less than ``least`` or more than ``most``.
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        raise ArgumentError(f"{name}={value!r}; {advice}")
    return number


def column_names(columns: Any, known: Iterable[Any]) -> list:
    """The names in ``columns=`` of a frame that has the columns ``known``.

    Raises
    ------
    ArgumentError
        If it is no list of names, or the frame has no such columns.
    """
    if isinstance(columns, str) or not isinstance(columns, Iterable):
        raise ArgumentError(f"columns={columns!r}: pass a list of column names")
    known, columns = list(known), list(columns)
    unknown = [name for name in columns if name not in known]
    if unknown:
        raise ArgumentError(
            f"columns= names {', '.join(map(repr, unknown))}; the frame has "
            f"{', '.join(map(repr, known))}"
        )
    return columns


__all__ = ["column_names", "whole_number"]
