"""Grouping of members into samples, by webdataset's rule."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dask_image_ingest.tar.scan import Member

__all__ = ["Grouped", "Sample", "Span", "group"]

# Offset and size of a member's bytes in the (decompressed) shard.
Span = tuple[int, int]

# A member by its key and its extension.
_Named = tuple[str, str, Span]

# Both are webdataset's own: base_plus_ext and skip_meta in its module tariterators.
_KEY_AND_EXTENSION = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")


@dataclass(slots=True)
class Sample:
    """The members of a shard that share a key.

    Attributes
    ----------
    key
        Folders included, extension excluded.
    members
        Extension, in lower case and without its first dot → where the bytes are.
    duplicates
        Extensions that occurred more than once in a row of members of this key; ``members`` has
        their first occurrence.
    """

    key: str
    members: dict[str, Span]
    duplicates: tuple[str, ...] = ()


class Grouped(NamedTuple):
    """The samples of a shard; as the attributes of these names in `TarIndex`."""

    samples: list[Sample]
    interleaved: tuple[str, ...]
    repeated: tuple[str, ...]
    members: int


def group(batches: Iterable[list[Member]]) -> Grouped:
    """Group members into samples, as `index_tar` describes it."""
    samples: list[Sample] = []
    latest: dict[str, Sample] = {}
    interleaved: dict[str, None] = {}
    repeated: dict[str, None] = {}
    lower_case = _LowerCase()
    count = 0
    current = ""
    sample = Sample("", {})
    members = sample.members
    # What the sample had when its key came back.
    earlier: frozenset[str] = frozenset()
    for batch in batches:
        count += len(batch)
        for key, extension, span in _split_names(batch, lower_case):
            if key != current:
                current = key
                if key in latest:
                    sample = latest[key]
                    earlier = frozenset(sample.members)
                    interleaved[key] = None
                else:
                    latest[key] = sample = Sample(key, {})
                    samples.append(sample)
                    earlier = frozenset()
                members = sample.members
            if extension in earlier:
                sample = latest[key] = _split_off(sample, earlier)
                samples.append(sample)
                members = sample.members
                earlier = frozenset()
                repeated[key] = None
            if extension not in members:
                members[extension] = span
            elif extension not in sample.duplicates:
                sample.duplicates += (extension,)
    joined = tuple(key for key in interleaved if key not in repeated)
    return Grouped(samples, joined, tuple(repeated), count)


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
            named.append((key, lower_case[extension], (offset, size)))
            continue
        start = name.rfind("/") + 1
        dot = name.find(".", start)
        if dot > start and name[0] != "_" and "\n" not in name:
            length = dot + 1
            key, prefix = name[:dot], name[:length]
            named.append((key, lower_case[name[length:]], (offset, size)))
        elif parts := _split_odd_name(name):
            named.append((parts[0], lower_case[parts[1]], (offset, size)))
    return named


def _split_odd_name(name: str) -> tuple[str, str] | None:
    if _META.match(name) or (name.startswith("__") and name.endswith("__") and "/" not in name):
        return None
    match = _KEY_AND_EXTENSION.match(name)
    return (match[1], match[2]) if match else None


def _split_off(sample: Sample, earlier: frozenset[str]) -> Sample:
    """Make a sample of what was joined to another one, when it turns out that it is none of it."""
    later = [extension for extension in sample.members if extension not in earlier]
    return Sample(
        sample.key,
        {extension: sample.members.pop(extension) for extension in later},
        tuple(extension for extension in sample.duplicates if extension not in earlier),
    )
