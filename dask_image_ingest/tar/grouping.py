"""Grouping of members into samples, by webdataset's rule."""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dask_image_ingest.tar.scan import Member
from dask_image_ingest.tar.shard_index import Places

# A member by its key, its extension, its offset and its size.
_Named = tuple[str, str, int, int]

# Both are webdataset's own: base_plus_ext and skip_meta in its module tariterators.
_KEY_AND_EXTENSION = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")


class Grouped(NamedTuple):
    """The samples of a shard; as the parameters of these names in `ShardIndex`."""

    keys: list[str]
    places: dict[str, Places]
    duplicates: dict[int, tuple[str, ...]]
    interleaved: tuple[str, ...]
    repeated: tuple[str, ...]
    members: int


def group(batches: Iterable[list[Member]]) -> Grouped:
    """Group members into samples, as `index_tar` describes it."""
    keys: list[str] = []
    latest: dict[str, int] = {}
    # No object for each member: Python's garbage collector would look at all of them again and
    # again. Extension → row → which of the offsets and sizes is that member's.
    members: dict[str, dict[int, int]] = defaultdict(dict)
    offsets, sizes = array("q"), array("q")
    duplicates: dict[int, tuple[str, ...]] = {}
    interleaved: dict[str, None] = {}
    repeated: dict[str, None] = {}
    lower_case = _LowerCase()
    count = 0
    current, row = "", 0
    # What the sample has got since its key came back; None if it did not.
    joined: set[str] | None = None
    for batch in batches:
        count += len(batch)
        named = _split_names(batch, lower_case)
        before = len(offsets)
        offsets.extend([offset for _, _, offset, _ in named])
        sizes.extend([size for _, _, _, size in named])
        for number, (key, extension, _, _) in enumerate(named, before):
            if key != current:
                current = key
                if key in latest:
                    row, joined = latest[key], set()
                    interleaved[key] = None
                else:
                    latest[key] = row = len(keys)
                    keys.append(key)
                    joined = None
            rows = members[extension]
            if row in rows:
                if joined is None or extension in joined:
                    twice = duplicates.get(row, ())
                    if extension not in twice:
                        duplicates[row] = (*twice, extension)
                    continue
                # What was joined to the earlier members is none of that sample.
                latest[key] = len(keys)
                _move(members, duplicates, joined, row, len(keys))
                row, joined = len(keys), None
                keys.append(key)
                repeated[key] = None
            rows[row] = number
            if joined is not None:
                joined.add(extension)
    return Grouped(
        keys,
        _places(members, np.array(offsets, np.int64), np.array(sizes, np.int64)),
        duplicates,
        tuple(key for key in interleaved if key not in repeated),
        tuple(repeated),
        count,
    )


class _LowerCase(dict[str, str]):
    """Extension → lower case, one string object for all samples."""

    def __missing__(self, extension: str) -> str:
        return self.setdefault(extension, extension.lower())


def _split_names(members: list[Member], lower_case: _LowerCase) -> list[_Named]:
    """Split names into key and extension; leave out members that belong to no sample."""
    named = []
    key, prefix, length = "", "/", 0
    for name, offset, size in members:
        # Most members follow another one of their sample.
        if name[:length] == prefix and "/" not in (extension := name[length:]):
            named.append((key, lower_case[extension], offset, size))
            continue
        start = name.rfind("/") + 1
        dot = name.find(".", start)
        if dot > start and name[0] != "_" and "\n" not in name:
            length = dot + 1
            key, prefix = name[:dot], name[:length]
            named.append((key, lower_case[name[length:]], offset, size))
        elif parts := _split_odd_name(name):
            named.append((parts[0], lower_case[parts[1]], offset, size))
    return named


def _split_odd_name(name: str) -> tuple[str, str] | None:
    if _META.match(name) or (name.startswith("__") and name.endswith("__") and "/" not in name):
        return None
    match = _KEY_AND_EXTENSION.match(name)
    return (match[1], match[2]) if match else None


def _move(
    members: dict[str, dict[int, int]],
    duplicates: dict[int, tuple[str, ...]],
    extensions: set[str],
    row: int,
    to: int,
) -> None:
    """Make a sample of what was joined to another one, when it turns out that it is none of it."""
    for extension in extensions:
        members[extension][to] = members[extension].pop(row)
    twice = duplicates.pop(row, ())
    for target, there in (row, False), (to, True):
        if found := tuple(each for each in twice if (each in extensions) is there):
            duplicates[target] = found


def _places(
    members: dict[str, dict[int, int]], offsets: np.ndarray, sizes: np.ndarray
) -> dict[str, Places]:
    places = {}
    for extension, numbers in members.items():
        rows = np.fromiter(numbers.keys(), np.int64, len(numbers))
        which = np.fromiter(numbers.values(), np.int64, len(numbers))
        if (rows[1:] < rows[:-1]).any():
            order = np.argsort(rows)
            rows, which = rows[order], which[order]
        places[extension] = Places(rows, offsets[which], sizes[which])
    return places
