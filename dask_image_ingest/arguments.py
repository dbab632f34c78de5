"""Checks that several public functions make of their arguments."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

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
    unknown = [name for name in columns if not is_column(name, known)]
    if unknown:
        raise ArgumentError(
            f"columns= names {', '.join(map(repr, unknown))}; the frame has "
            f"{', '.join(map(repr, known))}"
        )
    return columns


def is_column(name: Any, known: Iterable[Any]) -> bool:
    """Whether this is the name of a column, whatever it is."""
    try:
        return name in set(known)
    except TypeError:  # lists, arrays and the like
        return False


def choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse what is none of ``choices``.

    Raises
    ------
    ArgumentError
    """
    if not isinstance(value, str) or value not in choices:
        *others, last = map(repr, choices)
        raise ArgumentError(f"{name}={value!r}; choose {', '.join(others)} or {last}")


def flag(name: str, value: Any) -> bool:
    """``value`` as True or False.

    Raises
    ------
    ArgumentError
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(f"{name}={value!r}; pass True or False")
    return bool(value)


__all__ = ["choice", "column_names", "flag", "is_column", "whole_number"]
