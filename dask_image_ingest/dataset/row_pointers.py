"""Pointers to rows: what stands in a column of images while the rows are moved.

A pointer is text, in the place of the image and of its name, so that whatever moves, renames or
joins rows and columns does so to pointers as it would to images. It has all that the decode of a
read knows an image by: its sample's number for the random numbers of a transform, its key for
errors, the place of its bytes, which is empty for those that only the tar's index tells, and the
version of the shard that it was read from.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa

from dask_image_ingest.storage import Shard

__all__ = ["RowPointer", "as_texts", "parse"]


class RowPointer(NamedTuple):
    """Which sample of which shard a row is, and where its image lies if that is known.

    ``listed`` is the shard as it was then; None where its version is not known.
    """

    number: int
    place: tuple[int, int] | None
    key: str
    shard: str
    listed: Shard | None = None


def as_texts(pointers: Iterable[RowPointer]) -> pa.Array:
    """A column of pointers."""
    return pa.array(map(_text, pointers), pa.string())


def _text(pointer: RowPointer) -> str:
    number, place, key, shard, listed = pointer
    offset, size = place or ("", "")
    whole, version = ("", "") if listed is None else (listed.size, listed.version)
    return f"{number} {offset} {size} {whole} {len(key)} {len(version)} {key}{version}{shard}"


def parse(text: str) -> RowPointer:
    """The pointer that a text says."""
    number, offset, size, whole, *lengths, rest = text.split(" ", 6)
    key_end, end = itertools.accumulate(map(int, lengths))
    place = (int(offset), int(size)) if offset else None
    shard = rest[end:]
    listed = Shard(shard, int(whole), rest[key_end:end]) if whole else None
    return RowPointer(int(number), place, rest[:key_end], shard, listed)
