"""Pointers to rows: what stands in a column of images while the rows are moved.

A pointer is text, in the place of the image and of its name, so that whatever moves, renames or
joins rows and columns does so to pointers as it would to images. It has all that the decode of a
read knows an image by: its sample's number for the random numbers of a transform, its key for
errors, and the place of its bytes, which is empty for those that only the tar's index tells.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa

__all__ = ["RowPointer", "as_texts", "parse"]


class RowPointer(NamedTuple):
    """Which sample of which shard a row is, and where its image lies if that is known."""

    number: int
    place: tuple[int, int] | None
    key: str
    shard: str


def as_texts(pointers: Iterable[RowPointer]) -> pa.Array:
    """A column of pointers."""
    return pa.array(map(_text, pointers), pa.string())


def _text(pointer: RowPointer) -> str:
    number, place, key, shard = pointer
    offset, size = place or ("", "")
    return f"{number} {offset} {size} {len(key)} {key}{shard}"


def parse(text: str) -> RowPointer:
    """The pointer that a text says."""
    number, offset, size, length, rest = text.split(" ", 4)
    end = int(length)
    place = (int(offset), int(size)) if offset else None
    return RowPointer(int(number), place, rest[:end], rest[end:])
