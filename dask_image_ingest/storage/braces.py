"""Braces in a path: ``{000..127}`` and ``{train,val}``, as webdataset expands them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from braceexpand import braceexpand

from dask_image_ingest.arguments import shown
from dask_image_ingest.errors import ArgumentError

__all__ = ["expand_braces"]

# Several times the shards of the largest collections there are.
_MOST_PATHS = 10_000_000

_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d+))?")


def expand_braces(pattern: str) -> list[str]:
    """All paths that a pattern means.

    Raises
    ------
    ArgumentError
        If its braces are unbalanced, or mean more paths than anybody has.
    """
    try:
        if _count(pattern) <= _MOST_PATHS:
            # A backslash is no escape here: it may be part of a name.
            return list(braceexpand(pattern, escape=False))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{shown(pattern)} has unbalanced braces, or too many, and no such file exists"
        ) from error
    raise ArgumentError(
        f"{shown(pattern)} means more than {_MOST_PATHS:,} paths: look at the numbers in its "
        "braces, or name the folder that the shards are in"
    )


def _count(pattern: str) -> int:
    """How many paths a pattern means, told without making any."""
    paths = 1
    for inside in _outermost(pattern):
        numbers, letters = _NUMBERS.fullmatch(inside), _LETTERS.fullmatch(inside)
        if numbers:
            first, last, step = numbers.groups()
            paths *= _length(int(first), int(last), step)
        elif letters:
            first, last, step = letters.groups()
            paths *= _length(ord(first), ord(last), step)
        else:
            paths *= sum(map(_count, _choices(inside)))
    return paths


def _length(first: int, last: int, step: str | None) -> int:
    return abs(last - first) // (int(step or 1) or 1) + 1


def _outermost(pattern: str) -> Iterator[str]:
    """What is in each pair of braces that is in no other."""
    depth = start = 0
    for place, sign in enumerate(pattern):
        if sign == "{":
            depth += 1
            if depth == 1:
                start = place + 1
        elif sign == "}":
            depth -= 1
            if depth == 0:
                yield pattern[start:place]


def _choices(inside: str) -> Iterator[str]:
    """What the commas divide that are in no further braces."""
    depth = start = 0
    for place, sign in enumerate(inside):
        depth += (sign == "{") - (sign == "}")
        if sign == "," and depth == 0:
            yield inside[start:place]
            start = place + 1
    yield inside[start:]
