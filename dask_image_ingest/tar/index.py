"""Indexing of a tar: reads its headers and groups its members into samples."""

from __future__ import annotations

import functools
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dask_image_ingest.storage import ByteReader, LazyBytes, as_reader
from dask_image_ingest.tar.scan import (
    BLOCK,
    Damage,
    Member,
    Skipped,
    TarScan,
    add_skipped,
    checksum_holds,
    plain_name,
)
from dask_image_ingest.tar.shard_index import Places, ShardIndex

# Key, extension, offset and size of a member.
_Named = tuple[str, str, int, int]

# From webdataset: base_plus_ext in its module tariterators.
_KEY_AND_EXTENSION = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")

#: From there, too: skip_meta, which looks at the whole name.
META_NAME = re.compile(r"__[^/]*__($|/)")

# Files that macOS puts beside others: resource forks (AppleDouble), and what Finder remembers.
_MACOS = re.compile(r"(?:.*/|)(?:[.]_[^/]*|[.]DS_Store)$", re.DOTALL)


# Members whose names are split at once.
_BATCH = 1024


def group(members: Sequence[Member], skipped: dict[str, Skipped], **facts: Any) -> ShardIndex:
    """Group members into samples by the rule of `index_tar`; ``facts`` are those of `ShardIndex`.

    Members that belong to no sample are added to ``skipped``.
    """
    keys: list[str] = []
    # Key → row of its latest sample.
    latest: dict[str, int] = {}
    # Extension → row → position in offsets and sizes. No object per member, since Python's garbage
    # collector would traverse all of them again and again.
    numbers: dict[str, dict[int, int]] = defaultdict(dict)
    offsets, sizes = array("q"), array("q")
    duplicates: dict[int, tuple[str, ...]] = {}
    interleaved: dict[str, None] = {}
    repeated: dict[str, None] = {}
    # The same string object for each extension, to save memory.
    lower_case = functools.cache(str.lower)
    current, row = "", 0
    # Extensions that were joined to the sample since its key reappeared; None if it did not.
    joined: set[str] | None = None
    for start in range(0, len(members), _BATCH):
        named = _split_names(members[start : start + _BATCH], lower_case, skipped)
        first = len(offsets)
        offsets.extend([offset for _, _, offset, _ in named])
        sizes.extend([size for _, _, _, size in named])
        for number, (key, extension, _, _) in enumerate(named, first):
            if key != current:
                current = key
                if key in latest:
                    row, joined = latest[key], set()
                    interleaved[key] = None
                else:
                    latest[key] = row = len(keys)
                    keys.append(key)
                    joined = None
            rows = numbers[extension]
            if row in rows:
                if joined is None or extension in joined:
                    repeats = duplicates.get(row, ())
                    if extension not in repeats:
                        duplicates[row] = (*repeats, extension)
                    continue
                # The key begins a second sample: members joined to the first one belong to it.
                latest[key] = len(keys)
                _move(numbers, duplicates, joined, row, len(keys))
                row, joined = len(keys), None
                keys.append(key)
                repeated[key] = None
            rows[row] = number
            if joined is not None:
                joined.add(extension)
    return ShardIndex(
        keys,
        _places(numbers, np.array(offsets, np.int64), np.array(sizes, np.int64)),
        duplicates=duplicates,
        interleaved=tuple(key for key in interleaved if key not in repeated),
        repeated=tuple(repeated),
        members=len(members),
        skipped=skipped,
        **facts,
    )


def _split_names(
    members: Sequence[Member], lower_case: Callable[[str], str], skipped: dict[str, Skipped]
) -> list[_Named]:
    """Split names into key and extension; drop members that belong to no sample, and count them."""
    named = []
    # The last key, the prefix of its names, and its length; it matches no name at first.
    key, prefix, length = "", "/", 0
    for name, offset, size in members:
        # Fast path: most members follow another one of their sample.
        if name[:length] == prefix and "/" not in (extension := name[length:]):
            named.append((key, lower_case(extension), offset, size))
            continue
        start = name.rfind("/") + 1
        dot = name.find(".", start)
        if dot > start and name[0] != "_" and "\n" not in name:
            length = dot + 1
            key, prefix = name[:dot], name[:length]
            named.append((key, lower_case(name[length:]), offset, size))
            continue
        parts = _split_name(name)
        if isinstance(parts, str):
            add_skipped(skipped, parts, name)
        else:
            named.append((parts[0], lower_case(parts[1]), offset, size))
    return named


def _split_name(name: str) -> tuple[str, str] | str:
    """Key and extension; for a member of no sample a code that says why."""
    if _MACOS.match(name):
        return "macos"
    if META_NAME.match(name) or (name.startswith("__") and name.endswith("__") and "/" not in name):
        return "meta"
    match = _KEY_AND_EXTENSION.match(name)
    return (match[1], match[2]) if match else "no-extension"


def _move(
    members: dict[str, dict[int, int]],
    duplicates: dict[int, tuple[str, ...]],
    extensions: set[str],
    row: int,
    to: int,
) -> None:
    """Move the members of these extensions, with their duplicates, from one row to another."""
    for extension in extensions:
        members[extension][to] = members[extension].pop(row)
    repeats = duplicates.pop(row, ())
    for target, is_moved in (row, False), (to, True):
        if own := tuple(name for name in repeats if (name in extensions) is is_moved):
            duplicates[target] = own


def _places(
    members: dict[str, dict[int, int]], offsets: np.ndarray, sizes: np.ndarray
) -> dict[str, Places]:
    places = {}
    for extension, numbers in members.items():
        rows = np.fromiter(numbers.keys(), np.int64, len(numbers))
        positions = np.fromiter(numbers.values(), np.int64, len(numbers))
        if (rows[1:] < rows[:-1]).any():
            order = np.argsort(rows)
            rows, positions = rows[order], positions[order]
        places[extension] = Places(rows, offsets[positions], sizes[positions])
    return places


def index_tar(content: LazyBytes, url: str = "the shard") -> ShardIndex:
    r"""Find the samples of a shard by reading its tar headers.

    Samples are grouped by webdataset's rule: the key is the path up to the first dot of its last
    part, the rest in lower case is the extension, only regular files count, and names such as
    ``__meta__`` are skipped. Three differences are on purpose. Members whose key reappears later in
    the shard are joined to its sample, where webdataset begins a second one; a second sample begins
    only if the key reappears with an extension that the sample has already. A hard link to an
    earlier file of the shard has its bytes. Files that macOS adds (``._x``, ``.DS_Store``) are
    skipped.

    Like :mod:`tarfile` and webdataset, the scan ends at the first block of zeros. Anything else
    after it, perhaps another tar, is not read but reported as damage.

    Parameters
    ----------
    content
        The bytes of the shard, decompressed. Only headers are read, and bytes after the last one.
    url
        The shard, for errors.

    Returns
    -------
    ShardIndex
        Keys are valid UTF-8, as Arrow requires: an invalid byte of a name becomes ``\xNN``.

    Raises
    ------
    ShardError
        If the shard does not begin with a tar header. Any other problem is ``ShardIndex.damage``.
    """
    reader = as_reader(content)
    reader.prefetch_scan()
    scan = TarScan(reader, url)
    damage = _with_stream_damage(scan.damage, reader)
    return group(scan.members, scan.skipped, sparse=scan.sparse, damage=damage, pax=scan.pax)


def _with_stream_damage(damage: Damage | None, reader: ByteReader) -> Damage | None:
    """Combine the damage of a tar with that of the compressed stream it came from."""
    if reader.damage is None:
        return damage
    if damage is None:
        return Damage(len(reader), reader.damage, "truncated-stream")
    return replace(damage, reason=f"{damage.reason}; {reader.damage}")


# Bytes that `index_head` fetches from the begin and the end of a remote shard. It reads on, headers
# only, until there are more than so many samples.
_FIRST, _LAST = 1 << 20, 128 << 10
_SAMPLES = 4


def index_head(content: LazyBytes, url: str) -> tuple[ShardIndex, float]:
    """Index the first samples of a remote shard, to infer the schema; a local or small one whole.

    Returns
    -------
    index
        Whole samples. The index of the whole shard if its end has extensions that the first samples
        have not.
    share
        Fraction of the shard's bytes that these samples take up.

    Raises
    ------
    ShardError
        As `index_tar`.
    """
    reader = as_reader(content)
    size = len(reader)
    if not reader.is_remote or size <= 2 * _FIRST:
        return index_tar(reader, url), 1.0
    reader.prefetch([(0, _FIRST), (size - _LAST, size)])
    length = _FIRST
    while length < size:
        index = index_tar(_Prefix(reader, length), url)
        if len(index) > _SAMPLES:
            if _last_extensions(reader, size) <= set(index.extensions):
                head = index.first(len(index) - 1)  # the last one may lack members
                ends = (head.places(extension).offsets.max() for extension in head.extensions)
                return head, max(map(int, ends)) / size
            break
        length *= 4
    return index_tar(reader, url), 1.0


class _Prefix(ByteReader):
    """The first bytes of a shard, as a shard of its own."""

    def __init__(self, shard: ByteReader, length: int) -> None:
        self._shard = shard
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice, /) -> bytes | bytearray | memoryview:
        start, stop, _ = part.indices(self._length)
        return self._shard[start:stop]


def _last_extensions(content: LazyBytes, size: int) -> set[str]:
    """Extensions of the members whose headers lie in the last bytes."""
    return set(group(list(_last_members(content, size)), {}).extensions)


def _last_members(content: LazyBytes, size: int) -> Iterator[Member]:
    """Members by the blocks in the last bytes that look like headers; with size 0."""
    start = (size - _LAST) // BLOCK * BLOCK
    end = bytes(content[start:size])
    for offset in range(0, len(end) - BLOCK + 1, BLOCK):
        header = end[offset : offset + BLOCK]
        if header[257:262] == b"ustar" and header[156] in b"0\x001" and checksum_holds(header):
            yield plain_name(header), start + offset + BLOCK, 0
