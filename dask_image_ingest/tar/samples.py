"""One shard's bytes → members → samples.

:func:`index_tar` reads headers only, never what a member holds.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage import LazyBytes
from dask_image_ingest.tar.garbage_collection import gc_paused
from dask_image_ingest.tar.header import SparseMap
from dask_image_ingest.tar.members import Damage, Member, Walk

__all__ = [
    "LARGEST_VALUE",
    "Damage",
    "Sample",
    "Span",
    "TarIndex",
    "duplicate_error",
    "index_tar",
    "open_member",
    "read_member",
    "too_large_error",
]

# Offset and size of a member's bytes in the (decompressed) shard.
Span = tuple[int, int]

# More bytes cannot be one value of an Arrow binary column.
LARGEST_VALUE = 2**31 - 1


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


@dataclass(slots=True)
class TarIndex:
    """The samples of a shard.

    Attributes
    ----------
    samples
        In the order of their first members.
    sparse
        Where a sparse member's bytes begin → its stored pieces. Its span has the expanded size.
    damage
        None for a sound shard; every whole member in front of the damage is in ``samples``.
    interleaved
        Keys that came back after another key, and were joined to their earlier members.
    repeated
        Keys that came back with a member that they had already: each time, a sample of its own.
    members
        How many regular files there are, those included that belong to no sample.
    pax
        How many members have a PAX header of their own.
    """

    samples: list[Sample] = field(default_factory=list)
    sparse: dict[int, SparseMap] = field(default_factory=dict)
    damage: Damage | None = None
    interleaved: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    members: int = 0
    pax: int = 0


def index_tar(content: LazyBytes, url: str = "the shard") -> TarIndex:
    r"""Find the samples of a shard by reading its tar headers.

    Samples are grouped by webdataset's rule: the key is the path up to the first dot of its last
    part, what follows in lower case is the extension, only regular files count, and names such as
    ``__meta__`` are skipped. One difference is on purpose: a key that comes back later in the shard
    is joined to its sample, where webdataset makes a second sample of it. Only if it comes back
    with an extension that the sample has already does it begin a second sample here too.

    Like :mod:`tarfile` and webdataset, the walk ends at the first block of zeros. What follows it,
    perhaps another tar, is not read but reported as damage.

    Parameters
    ----------
    content
        The bytes of the shard, decompressed. Only headers are read, and what follows the last one.
    url
        What errors call the shard.

    Returns
    -------
    TarIndex
        Keys are valid UTF-8, as Arrow demands: a byte of a name that is not becomes ``\xNN``.

    Raises
    ------
    ShardError
        If the shard does not begin with a tar header. All else that is wrong is
        ``TarIndex.damage``.
    """
    walk = Walk(content, url)
    with gc_paused():
        index = _group(walk)
    index.damage = _add_broken_stream(walk.damage, content)
    index.sparse = walk.sparse
    index.pax = walk.pax
    return index


def read_member(content: LazyBytes, index: TarIndex, span: Span) -> Any:
    """Read one member: a slice of ``content``, or new bytes with the holes filled if it is sparse.

    Raises
    ------
    ShardError
        If the content ends too early, or a sparse member claims to be larger than 2 GiB.
    """
    offset, size = span
    pieces = index.sparse.get(offset)
    if pieces is None:
        data = content[offset : offset + size]
        if len(data) != size:
            raise ShardError(
                f"a member of {size} bytes was found at byte {offset}, and only {len(data)} bytes "
                "are there now: did the shard change while it was read?"
            )
        return data
    if size > LARGEST_VALUE:
        raise ShardError(
            f"the sparse member at byte {offset} claims to expand to {size} bytes, more than 2 GiB"
        )
    expanded = bytearray(size)
    for start, length in pieces:
        expanded[start : start + length] = content[offset : offset + length]
        offset += length
    return bytes(expanded)


def open_member(content: LazyBytes, index: TarIndex, span: Span) -> Any:
    """One member as something that is read where it is sliced, and no further.

    Raises
    ------
    ShardError
        As `read_member`, now or when it is sliced.
    """
    if isinstance(content, (bytes, memoryview)) or span[0] in index.sparse:
        return read_member(content, index, span)
    return _OpenMember(content, span)


class _OpenMember:
    """A member of a shard, whose first bytes are at hand."""

    def __init__(self, content: LazyBytes, span: Span) -> None:
        self._content = content
        self._offset, self._size = span
        self._head = content[self._offset : self._offset + min(self._size, _HEAD)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> Any:
        start, stop, _ = part.indices(self._size)
        if stop <= len(self._head):
            return self._head[start:stop]
        return self._content[self._offset + start : self._offset + stop]


def too_large_error(index: TarIndex, span: Span) -> str | None:
    """Why a member can't be read that claims to be mostly holes; None where that is not so."""
    if span[0] not in index.sparse or span[1] <= LARGEST_VALUE:
        return None
    return f"too-large: the sparse member claims to expand to {span[1]:,} bytes, more than 2 GiB"


def duplicate_error(sample: Sample) -> str:
    """Why a sample with duplicate members has no image."""
    what = ", ".join(sorted(sample.duplicates))
    return f"duplicate-member: the sample has more than one {what}; which is meant?"


# Most that is asked of an image without decoding it stands here.
_HEAD = 4096

# Both are webdataset's own: base_plus_ext and skip_meta in its module tariterators.
_KEY_AND_EXTENSION = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")


class _LowerCase(dict[str, str]):
    """Extension → lower case, one string object for all samples."""

    def __missing__(self, extension: str) -> str:
        return self.setdefault(extension, extension.lower())


def _group(batches: Iterable[list[Member]]) -> TarIndex:
    samples: list[Sample] = []
    latest: dict[str, Sample] = {}
    interleaved: dict[str, None] = {}
    repeated: dict[str, None] = {}
    lower_case = _LowerCase()
    count = 0
    sample = Sample("", {})
    # What the sample had when its key came back.
    earlier: frozenset[str] = frozenset()
    for batch in batches:
        count += len(batch)
        for name, offset, size in batch:
            start = name.rfind("/") + 1
            dot = name.find(".", start)
            if dot > start and name[0] != "_" and "\n" not in name:
                key, extension = name[:dot], lower_case[name[dot + 1 :]]
            elif parts := _split_odd_name(name):
                key, extension = parts[0], lower_case[parts[1]]
            else:
                continue
            if key != sample.key:
                if key in latest:
                    sample = latest[key]
                    earlier = frozenset(sample.members)
                    interleaved[key] = None
                else:
                    latest[key] = sample = Sample(key, {})
                    samples.append(sample)
                    earlier = frozenset()
            if extension in earlier:
                sample = latest[key] = _split_off(sample, earlier)
                samples.append(sample)
                earlier = frozenset()
                repeated[key] = None
            if extension not in sample.members:
                sample.members[extension] = (offset, size)
            elif extension not in sample.duplicates:
                sample.duplicates += (extension,)
    joined = tuple(key for key in interleaved if key not in repeated)
    return TarIndex(samples, interleaved=joined, repeated=tuple(repeated), members=count)


def _split_off(sample: Sample, earlier: frozenset[str]) -> Sample:
    """Make a sample of what was joined to another one, when it turns out that it is none of it."""
    later = [extension for extension in sample.members if extension not in earlier]
    return Sample(
        sample.key,
        {extension: sample.members.pop(extension) for extension in later},
        tuple(extension for extension in sample.duplicates if extension not in earlier),
    )


def _split_odd_name(name: str) -> tuple[str, str] | None:
    if _META.match(name) or (name.startswith("__") and name.endswith("__") and "/" not in name):
        return None
    match = _KEY_AND_EXTENSION.match(name)
    return (match[1], match[2]) if match else None


def _add_broken_stream(damage: Damage | None, content: LazyBytes) -> Damage | None:
    """Blame the compressed stream, if that is what broke off, for what the walk found or missed."""
    broken: str | None = getattr(content, "broken", None)
    if broken is None:
        return damage
    if damage is None:
        return Damage(len(content), broken, "truncated-stream")
    return replace(damage, reason=f"{damage.reason}; {broken}")
