"""The index of a shard: where its samples' members are, made from the headers of its tar.

`index_tar` reads the headers, and groups members into samples; the result, a `ShardIndex`, has
columns of offsets and sizes. `read_member` and `open_member` read by it.
"""

from __future__ import annotations

import functools
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.errors import ShardError
from dask_image_ingest.storage import ByteReader, LazyBytes, MemoryReader, as_reader
from dask_image_ingest.tar.scan import (
    BLOCK,
    Damage,
    Member,
    Skipped,
    SparseMember,
    TarScan,
    add_skipped,
    checksum_holds,
    plain_name,
)

#: Extensions of images, in order of preference.
IMAGE_EXTENSIONS = (
    "jpg;jpeg;png;webp;jfif;gif;bmp;tif;tiff;avif;heic;heif;jp2;j2k;ppm;pgm;pbm;pnm;ico;img"
)

#: Extensions that webdataset decodes to text and to integers (autodecode.py, 1.0.2).
TEXTS = frozenset({"txt", "text", "transcript", "json", "jsn", "caption"})
INTEGERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})

#: Most bytes of one value of an Arrow binary column.
LARGEST_VALUE = 2**31 - 1

#: Default limit for members that are read into a column: a small tar may claim huge ones, by holes
#: or by compression.
MAX_MEMBER_BYTES = 256 << 20

#: Bytes of a member that are read when it is opened: most image headers fit.
HEAD = 4096

#: Fields of every member.
SPAN_FIELDS = {"offset": pa.int64(), "size": pa.int64()}

#: Fields that an index may have of members. A null ``needs_pillow`` means that the image's header
#: was not read.
FIELDS = {
    **SPAN_FIELDS,
    "format": pa.string(),
    "height": pa.int64(),
    "width": pa.int64(),
    "channels": pa.int32(),
    "orientation": pa.int8(),
    "needs_pillow": pa.bool_(),
    "error": pa.string(),
    "content": pa.large_binary(),
}

# Offset and size of a member's bytes in the (decompressed) shard.
Span = tuple[int, int]


class Places(NamedTuple):
    """The members of one extension: rows of their samples (ascending), offsets and sizes; int64."""

    rows: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray


_NO_PLACES = Places(*(np.empty(0, np.int64) for _ in Places._fields))


#: Codes of `ShardIndex.skipped` for links that are not followed.
LINKS = ("symbolic-link", "hard-link")


@dataclass(slots=True)
class Sample:
    """The members of a shard that share a key.

    Attributes
    ----------
    key
        Path without extension.
    members
        Extension (lower case, without leading dot) → offset and size; in the order of the shard.
    duplicates
        Extensions that occurred more than once in consecutive members of this key; ``members`` has
        the first occurrence.
    """

    key: str
    members: dict[str, Span]
    duplicates: tuple[str, ...] = ()


class ShardIndex:
    """The samples of a shard, one row each, and the shard's anomalies.

    Parameters
    ----------
    keys
        The key of each sample, in order of their first members.
    places
        Extension → members.
    duplicates
        Row → extensions that the sample has more than once.
    sparse
        Offset → sparse member.
    damage
        None for a complete shard; samples include every whole member before the damage.
    interleaved
        Keys that reappear after another key; their members are joined to the earlier ones.
    repeated
        Keys that reappear with an extension they had before, and so begin a new sample.
    members
        Number of regular files and hard links to them, including those that belong to no sample.
    pax
        Number of members with a PAX header.
    skipped
        Code → members that are not read: ``symbolic-link``, ``hard-link`` (to no earlier file),
        ``macos`` (``._x``, ``.DS_Store``), ``meta`` (``__x__``) or ``no-extension``.
    """

    def __init__(
        self,
        keys: Sequence[str] = (),
        places: Mapping[str, Places] | None = None,
        *,
        duplicates: Mapping[int, tuple[str, ...]] | None = None,
        sparse: Mapping[int, SparseMember] | None = None,
        damage: Damage | None = None,
        interleaved: tuple[str, ...] = (),
        repeated: tuple[str, ...] = (),
        members: int = 0,
        pax: int = 0,
        skipped: Mapping[str, Skipped] | None = None,
    ) -> None:
        self.duplicates = duplicates or {}
        self.sparse = sparse or {}
        self.damage = damage
        self.interleaved = interleaved
        self.repeated = repeated
        self.members = members
        self.pax = pax
        self.skipped = skipped or {}
        self._keys = keys
        self._places = places or {}
        self._columns: dict[tuple[str, str], pa.Array] = {}

    def __len__(self) -> int:
        return len(self._keys)

    @cached_property
    def keys(self) -> pa.Array:
        """The key of each sample."""
        return pa.array(self._keys, pa.string())

    @cached_property
    def extensions(self) -> list[str]:
        """The extensions of members, in order of first occurrence."""
        firsts = {
            name: (places.rows[0], places.offsets[0]) for name, places in self._places.items()
        }
        return sorted(firsts, key=firsts.__getitem__)

    def places(self, extension: str) -> Places:
        """Rows, offsets and sizes of the members of an extension."""
        return self._places.get(extension, _NO_PLACES)

    def all_places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Row, position in `extensions`, offset and size of all members, sorted; int64 arrays."""
        all_places = [self.places(extension) for extension in self.extensions] or [_NO_PLACES]
        rows, offsets, sizes = map(np.concatenate, zip(*all_places, strict=True))
        kinds = np.repeat(np.arange(len(all_places)), [len(places.rows) for places in all_places])
        order = np.lexsort((offsets, rows))
        return rows[order], kinds[order], offsets[order], sizes[order]

    def column(self, extension: str, name: str) -> pa.Array:
        """A field of an extension's members: one value per sample, null if unknown."""
        if name not in SPAN_FIELDS:
            return pa.nulls(len(self), FIELDS[name])
        if (extension, name) not in self._columns:
            rows, offsets, sizes = self.places(extension)
            values, nulls = np.zeros(len(self), np.int64), np.ones(len(self), bool)
            values[rows] = offsets if name == "offset" else sizes
            nulls[rows] = False
            self._columns[extension, name] = pa.array(values, mask=nulls)
        return self._columns[extension, name]

    def has(self, *extensions: str) -> pa.Array:
        """Mask of the samples that have a member of one of these extensions."""
        masks = [pc.is_valid(self.column(name, "offset")) for name in self._present(extensions)]
        return reduce(pc.or_, masks) if masks else pa.repeat(pa.scalar(False), len(self))

    def preferred(self, extensions: Sequence[str], name: str) -> pa.Array:
        """A field of each sample's preferred member; ``extensions`` in order of preference."""
        present = self._present(extensions)
        if not present:
            return pa.nulls(len(self), FIELDS[name])
        *preferred, last = present
        column = self.column(last, name)
        for extension in reversed(preferred):
            column = pc.if_else(self.has(extension), self.column(extension, name), column)
        return column

    def not_preferred(self, *choices: Sequence[str]) -> list[str]:
        """Extensions with a member that is the `preferred` one of none of these choices."""
        others = []
        for extension in self.extensions:
            containing = [choice for choice in choices if extension in choice]
            # A member is not preferred if the sample has one of an earlier extension.
            better = [self.has(*choice[: choice.index(extension)]) for choice in containing]
            if not containing or pc.any(reduce(pc.and_, better, self.has(extension))).as_py():
                others.append(extension)
        return others

    def first_spans(self, extension: str, count: int) -> list[Span]:
        """Offset and size of the first members of an extension."""
        _, offsets, sizes = self.places(extension)
        return [*zip(offsets[:count].tolist(), sizes[:count].tolist(), strict=True)]

    def spans(self, offsets: pa.Array, sizes: pa.Array) -> list[Span | None]:
        """Columns of offsets and sizes as spans."""
        pairs = zip(offsets.to_pylist(), sizes.to_pylist(), strict=True)
        return [None if pair[0] is None else pair for pair in pairs]

    @cached_property
    def samples(self) -> list[Sample]:
        """The samples as objects, for callers that need all members of each."""
        samples = [Sample(key, {}) for key in self.keys.to_pylist()]
        kinds = self.extensions
        members = (values.tolist() for values in self.all_places())
        for row, kind, offset, size in zip(*members, strict=True):
            samples[row].members[kinds[kind]] = offset, size
        for row, extensions in self.duplicates.items():
            samples[row].duplicates = extensions
        return samples

    def first(self, count: int) -> ShardIndex:
        """The index of the first ``count`` samples; the shard's own facts stay."""
        all_places = {extension: self.places(extension) for extension in self.extensions}
        return ShardIndex(
            self.keys.slice(0, count).to_pylist(),
            {
                extension: Places(*(values[places.rows < count] for values in places))
                for extension, places in all_places.items()
                if (places.rows < count).any()
            },
            duplicates={row: twice for row, twice in self.duplicates.items() if row < count},
            sparse=self.sparse,
            damage=self.damage,
            interleaved=self.interleaved,
            repeated=self.repeated,
            members=self.members,
            pax=self.pax,
            skipped=self.skipped,
        )

    def _present(self, extensions: Sequence[str]) -> list[str]:
        return [extension for extension in extensions if extension in self.extensions]


def read_member(content: LazyBytes, index: ShardIndex, span: Span) -> Any:
    """Read one member: a slice of ``content``, or new bytes if it is sparse.

    Raises
    ------
    ShardError
        If the content ends too early, or a sparse member claims to be larger than 2 GiB.
    """
    offset, size = span
    sparse = index.sparse.get(offset)
    if sparse is None:
        return _read(content, offset, size)
    if size > LARGEST_VALUE:
        raise ShardError(
            f"the sparse member at byte {offset} claims to expand to {size} bytes, more than 2 GiB"
        )
    expanded = bytearray(size)
    for start, length in sparse.pieces:
        expanded[start : start + length] = _read(content, offset, length)
        offset += length
    return memoryview(expanded).toreadonly()


def _read(content: LazyBytes, offset: int, size: int) -> bytes | bytearray | memoryview:
    data = content[offset : offset + size]
    if len(data) != size:
        raise ShardError(
            f"a member of {size} bytes was found at byte {offset}, and only {len(data)} bytes "
            "are there now: did the shard change while it was read?"
        )
    return data


def open_member(content: LazyBytes, index: ShardIndex, span: Span) -> Any:
    """One member, sliced like ``bytes``; only its head is read now, the rest on slicing.

    Raises
    ------
    ShardError
        As `read_member`, now or when it is sliced.
    """
    if isinstance(content, (bytes, memoryview, MemoryReader)) or span[0] in index.sparse:
        return read_member(content, index, span)
    return _OpenMember(content, span)


class _OpenMember:
    """A member whose first `HEAD` bytes are in memory."""

    def __init__(self, content: LazyBytes, span: Span) -> None:
        self._content = content
        self._offset, self._size = span
        self._head = content[self._offset : self._offset + min(self._size, HEAD)]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> Any:
        start, stop, _ = part.indices(self._size)
        if stop <= len(self._head):
            return self._head[start:stop]
        return self._content[self._offset + start : self._offset + stop]


def too_large_error(index: ShardIndex, span: Span) -> str | None:
    """Error of a sparse image that expands to more than `MAX_MEMBER_BYTES`; None for others."""
    if span[0] not in index.sparse or span[1] <= MAX_MEMBER_BYTES:
        return None
    return f"too-large: the sparse member claims to expand to {span[1]:,} bytes, more than 256 MiB"


def duplicate_error(extensions: Iterable[str]) -> str:
    """Error of a sample that has several members of these extensions."""
    what = ", ".join(sorted(extensions))
    return f"duplicate-member: the sample has more than one {what}; which is meant?"


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
