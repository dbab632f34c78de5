"""Index file format: parquet with a row per sample, and facts about the shards in the footer.

Columns are ``__key__``, and for each kind of member ``<extension>/offset`` and
``<extension>/size``; for images also what their headers say (before orientation), for texts and
labels their ``content``. Damage is detected by checksums of the pages and a digest of the footer.

Columns of a stored index are read on first use.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, KeysView, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from dask_image_ingest.storage import ByteReader, LazyBytes, Shard
from dask_image_ingest.tar import (
    BLOCK,
    SPAN_FIELDS,
    Damage,
    Places,
    ShardIndex,
    Skipped,
    Span,
    SparseMember,
)

KEY = "__key__"

# Key of the facts in the metadata of the parquet file.
_METADATA = b"image-ingest.index"

# Version of the format.
_FORMAT = 6

_DIGEST_BYTES = 16

# Bytes of each part of a shard by which an index knows it: a header, and what follows it.
_CHECKED = 4 << 10

# Content checks that were passed: a shard, its `Shard.ctime`, and the parts. Cleared when full.
_passed: set[tuple[Shard, int, tuple[tuple[int, str], ...]]] = set()
_MOST_PASSED = 100_000


# Small shards share a row group of at most so many rows, and bytes in memory.
_GROUP_ROWS, _GROUP_BYTES = 10_000, 16 << 20


class UnusableIndexError(Exception):
    """Error of an index that can't be used, with the reason."""


@dataclass
class ShardFacts:
    """Facts about a shard, and rare ones about its samples; JSON in the footer of an index.

    Attributes
    ----------
    size, version, ctime
        Of the shard when it was indexed.
    file_id
        As `ByteReader.file_id`.
    checked
        Start and digest of each part by which it is known; see `checked_parts`.
    samples
        Number of samples.
    members, pax, damage, interleaved, repeated
        As in `ShardIndex`.
    extensions
        Extension → fields that are stored as columns.
    duplicates
        Row and extensions of each sample that has members twice.
    sparse
        Offset, expanded size and pieces of each sparse member.
    skipped
        As in `ShardIndex`: code → number, and name of the first.
    group, row
        Where the shard's rows begin in the file: the row group, and the row within it.
    """

    size: int
    version: str
    ctime: int = 0
    file_id: str = ""
    checked: list[tuple[int, str]] = field(default_factory=list)
    samples: int = 0
    members: int = 0
    pax: int = 0
    damage: dict[str, Any] | None = None
    interleaved: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    extensions: dict[str, list[str]] = field(default_factory=dict)
    duplicates: list[list[Any]] = field(default_factory=list)
    sparse: list[list[Any]] = field(default_factory=list)
    skipped: dict[str, tuple[int, str]] = field(default_factory=dict)
    group: int = 0
    row: int = 0


class IndexWriter:
    """Writer of an index file of one or many shards."""

    def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
        self._file = file
        self._writer = parquet.ParquetWriter(
            file, schema, compression="zstd", write_page_checksum=True
        )
        self._facts: dict[str, ShardFacts] = {}
        #: Row groups that were written.
        self._groups = 0
        #: The next row group, with its rows and bytes.
        self._pending: list[pa.Table] = []
        self._rows = self._nbytes = 0

    def add(self, name: str, rows: pa.Table, facts: ShardFacts) -> None:
        """Add a shard by its name, which is empty in an index of one shard."""
        nbytes = rows.nbytes
        if self._rows + len(rows) > _GROUP_ROWS or self._nbytes + nbytes > _GROUP_BYTES:
            self._write_group()
        self._facts[name] = replace(facts, group=self._groups, row=self._rows)
        self._pending.append(rows)
        self._rows, self._nbytes = self._rows + len(rows), self._nbytes + nbytes

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Complete the file, unless there was an error."""
        if kind is not None:
            with suppress(Exception):  # the disk may still be full
                self._writer.close()
            return
        self._write_group()
        self._writer.add_key_value_metadata({_METADATA: _as_json(self._facts)})
        self._writer.close()
        _sign(self._file)

    def _write_group(self) -> None:
        if self._rows:
            self._writer.write_table(pa.concat_tables(self._pending), row_group_size=self._rows)
            self._groups += 1
        self._pending, self._rows, self._nbytes = [], 0, 0


def _as_json(shards: Mapping[str, ShardFacts]) -> bytes:
    """Facts as compact JSON: without empty ones, and with each set of extensions stored once."""
    kinds: dict[str, int] = {}
    entries = {}
    for name, facts in shards.items():
        number = kinds.setdefault(json.dumps(facts.extensions), len(kinds))
        nonempty = {key: value for key, value in asdict(facts).items() if value}
        required = {"size": facts.size, "version": facts.version, "extensions": number}
        entries[name] = nonempty | required
    whole = {"format": _FORMAT, "kinds": [json.loads(kind) for kind in kinds], "shards": entries}
    return json.dumps(whole, separators=(",", ":")).encode()


class IndexTable:
    """The parsed footer of an index file.

    Attributes
    ----------
    file
        The file as a listing would show it; None if it has no version.
    nbytes
        Size of the file.
    metadata
        Parquet's metadata of row groups and columns.

    Raises
    ------
    UnusableIndexError
        If it is damaged, or another release of this package has written it.
    """

    def __init__(self, content: LazyBytes, file: Shard | None = None) -> None:
        self.file = file
        self.nbytes = len(content)
        self.metadata = parquet.read_metadata(pa.BufferReader(_signed_footer(content)))
        facts = json.loads(self.metadata.metadata[_METADATA])
        if facts["format"] != _FORMAT:
            raise UnusableIndexError("another release of this package has written it")
        self._kinds = facts["kinds"]
        self._shards = facts["shards"]

    @property
    def names(self) -> KeysView[str]:
        """The names of its shards; a single empty one in an index of one shard."""
        return self._shards.keys()

    def holds(self, name: str, shard: Shard) -> bool:
        """True if it has the listed version of a shard, and of a local one the same file."""
        facts = self._shards.get(name)
        indexed = facts and (facts["size"], facts["version"], facts.get("ctime", 0))
        return bool(shard.version) and indexed == (shard.size, shard.version, shard.ctime)

    def may_hold(self, name: str, shard: Shard) -> bool:
        """True if it has the shard, perhaps of another version, if the content is the same."""
        return name in self._shards and shard.size in (self._shards[name]["size"], -1)

    def samples(self, name: str) -> int | None:
        """Number of samples of a shard; None for a damaged one, which must be read for a warning.

        An undamaged shard without the entry has none: empty facts are not stored.
        """
        facts = self._shards[name]
        return None if "damage" in facts else facts.get("samples", 0)

    def facts(self, name: str) -> ShardFacts:
        """The facts about a shard."""
        facts = self._shards[name]
        return ShardFacts(**facts | {"extensions": self._kinds[facts["extensions"]]})


def _sign(file: BinaryIO) -> None:
    """Insert the digest of the footer before it, in a place that parquet readers skip."""
    size = file.seek(0, os.SEEK_END)
    file.seek(size - 8)
    start = size - 8 - int.from_bytes(file.read(4), "little")
    file.seek(start)
    footer = file.read()
    file.seek(start)
    file.write(_digest(footer) + footer)


def _signed_footer(content: LazyBytes) -> bytes:
    """The footer of an index file; raises if its digest is wrong or missing."""
    size = len(content)
    start = size - 8 - int.from_bytes(content[max(0, size - 8) : size][:4], "little")
    if start >= _DIGEST_BYTES:
        footer = bytes(content[start:size])
        if content[start - _DIGEST_BYTES : start] == _digest(footer):
            return footer
    raise UnusableIndexError("it is damaged, or another release of this package has written it")


def _digest(footer: bytes) -> bytes:
    return hashlib.blake2b(footer, digest_size=_DIGEST_BYTES).digest()


def checked_parts(stored: LazyBytes, index: ShardIndex | None) -> list[tuple[int, str]]:
    """The parts of a shard by which its index knows it, with their digests.

    The first bytes, which every reader fetches anyway; what follows the largest member of the
    sample in the middle, which is labels and texts where images have some; and the small members of
    the last sample. If a member before has another size, another header is there. Of a compressed
    shard, whose ``index`` is None, the first and the last bytes: these depend on all before them.
    """
    size = len(stored)
    starts = {0}
    if index is None:
        starts.add(max(0, size - _CHECKED))
    elif len(index):
        at, largest = max(_members(index, len(index) // 2), key=itemgetter(1))
        last = _members(index, len(index) - 1)
        small = [span for span in last if span[1] <= _CHECKED]
        starts |= {at + largest + -largest % BLOCK, min(small or last)[0] - BLOCK}
    return [(at, _digest_at(stored, at)) for at in sorted(starts) if 0 <= at < size]


def _members(index: ShardIndex, row: int) -> list[Span]:
    """Offset and size of each member of a sample."""
    members = []
    for places in map(index.places, index.extensions):
        at = np.searchsorted(places.rows, row)
        if at < len(places.rows) and places.rows[at] == row:
            members.append((int(places.offsets[at]), int(places.sizes[at])))
    return members


def _digest_at(stored: LazyBytes, start: int) -> str:
    part = bytes(stored[start : start + _CHECKED])
    return hashlib.blake2b(part, digest_size=8).hexdigest()


class ContentCheck:
    """Check that a shard has the content that its index was written of.

    Attributes
    ----------
    is_due
        Whether the index can't be trusted before: the shard has another version or ctime than the
        indexed one, as after a copy or an upload, or none.
    """

    def __init__(self, facts: ShardFacts, shard: Shard) -> None:
        self._facts = facts
        self._parts = tuple((at, digest) for at, digest in facts.checked)
        self._key = (shard, shard.ctime, self._parts)
        self._is_version = bool(shard.version) and facts.version == shard.version
        is_same = self._is_version and facts.ctime == shard.ctime
        self.is_due = not is_same and self._key not in _passed

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The bytes to compare beyond the first ones, if it is due."""
        return [(at, at + _CHECKED) for at, _ in self._parts if at] if self.is_due else []

    def __call__(self, stored: ByteReader) -> None:
        """Compare; of a remote shard of the indexed version only the first bytes.

        Raises
        ------
        UnusableIndexError
        """
        if len(stored) != self._facts.size:
            raise stale(f"has {len(stored):,} bytes, and had {self._facts.size:,}")
        if not self._is_version and stored.file_id and stored.file_id == self._facts.file_id:
            # No copy: the file itself has another time, and may differ anywhere.
            raise stale("has another modification time than it had")
        parts = self._parts if self.is_due or not stored.is_remote else self._parts[:1]
        for start, digest in parts:
            if _digest_at(stored, start) != digest:
                raise stale(f"has other bytes from {start:,} on than it had")
        if self.is_due and self._key[0].version:
            if len(_passed) >= _MOST_PASSED:
                _passed.clear()
            _passed.add(self._key)
        self.is_due = False


def stale(change: str) -> UnusableIndexError:
    """Error of an index that was written of another content of a shard."""
    return UnusableIndexError(f"it is stale: the shard {change} when the index was written")


class IndexedReader(ByteReader):
    """Reader that takes small members from the index, and all other bytes from the shard."""

    def __init__(self, index: StoredIndex, content: ByteReader) -> None:
        self._index = index
        self._content = content

    def __len__(self) -> int:
        return len(self._content)

    def __getitem__(self, part: slice, /) -> bytes | bytearray | memoryview:
        stored = self._stored.get(part.start)
        if stored is not None and len(stored) == part.stop - part.start:
            return stored
        return self._content[part]

    @cached_property
    def _stored(self) -> dict[int, bytes]:
        """Offset → member; none from a damaged index: the shard has the bytes, too."""
        stored: dict[int, bytes] = {}
        with suppress(UnusableIndexError):
            for extension, fields in self._index.facts.extensions.items():
                if "content" in fields:
                    offsets, contents = (
                        self._index.column(extension, name).to_pylist()
                        for name in ("offset", "content")
                    )
                    stored |= zip(offsets, contents, strict=True)
        sparse = self._index.sparse
        return {at: content for at, content in stored.items() if content and at not in sparse}


class StoredIndex(ShardIndex):
    """Index of a shard in an index file of ``nbytes``; ``read`` reads a column by its name.

    ``check`` compares the content of the shard.
    """

    def __init__(
        self, facts: ShardFacts, shard: Shard, nbytes: int, read: Callable[[str], pa.Array]
    ) -> None:
        super().__init__(
            duplicates={row: tuple(extensions) for row, extensions in facts.duplicates},
            sparse={
                offset: SparseMember(size, tuple((start, length) for start, length in pieces))
                for offset, size, pieces in facts.sparse
            },
            damage=None if facts.damage is None else Damage(**facts.damage),
            interleaved=tuple(facts.interleaved),
            repeated=tuple(facts.repeated),
            members=facts.members,
            pax=facts.pax,
            skipped={code: Skipped(*members) for code, members in facts.skipped.items()},
        )
        self.nbytes = nbytes
        self.facts = facts
        self.check = ContentCheck(facts, shard)
        self._read = read
        self._loaded: dict[str, pa.Array] = {}

    def __len__(self) -> int:
        return self.facts.samples

    @cached_property
    def keys(self) -> pa.Array:
        """The key of each sample."""
        return self._read(KEY)

    @cached_property
    def extensions(self) -> list[str]:
        """The extensions of members, in order of first occurrence."""
        return [*self.facts.extensions]

    def places(self, extension: str) -> Places:
        """Rows, offsets and sizes of the members of an extension."""
        if extension not in self.facts.extensions:
            return super().places(extension)
        offsets, sizes = (self.column(extension, name) for name in SPAN_FIELDS)
        rows = np.flatnonzero(offsets.is_valid().to_numpy(zero_copy_only=False))
        return Places(rows, offsets.drop_null().to_numpy(), sizes.drop_null().to_numpy())

    def column(self, extension: str, name: str) -> pa.Array:
        """A field of an extension's members: one value per sample, null if unknown."""
        if name not in self.facts.extensions.get(extension, ()):
            return super().column(extension, name)
        name = f"{extension}/{name}"
        if name not in self._loaded:
            self._loaded[name] = self._read(name)
        return self._loaded[name]
