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
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from dask_image_ingest.storage import ByteReader, LazyBytes, Shard
from dask_image_ingest.tar import SPAN_FIELDS, Damage, Places, ShardIndex, Skipped, SparseMember

KEY = "__key__"

# Key of the facts in the metadata of the parquet file.
_METADATA = b"image-ingest.index"

# Version of the format; an index of another version is not used.
_FORMAT = 4

_DIGEST_BYTES = 16

# First bytes of a shard by which an index knows it: the header of its first member, and more.
_HEAD = 4 << 10

# Small shards share a row group of at most so many rows, and bytes in memory.
_GROUP_ROWS, _GROUP_BYTES = 10_000, 16 << 20


class UnusableIndexError(Exception):
    """Error of an index that can't be used, with the reason."""


@dataclass
class ShardFacts:
    """Facts about a shard, and rare ones about its samples; JSON in the footer of an index.

    Attributes
    ----------
    size, version
        Of the shard when it was indexed.
    head
        Digest of its first bytes, decompressed.
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
    head: str = ""
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
        """True if it has the listed version of a shard."""
        facts = self._shards.get(name)
        indexed = facts and (facts["size"], facts["version"])
        return indexed == (shard.size, shard.version)

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
    raise UnusableIndexError(
        "it is damaged, or another release of this package has written it. write_index() rewrites "
        "it"
    )


def _digest(footer: bytes) -> bytes:
    return hashlib.blake2b(footer, digest_size=_DIGEST_BYTES).digest()


def digest_of_head(content: LazyBytes) -> str:
    """Digest of the first bytes of a shard, which every reader of it fetches anyway."""
    return _digest(bytes(content[:_HEAD])).hex()


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
    """Index of a shard in an index file of ``nbytes``; ``read`` reads a column by its name."""

    def __init__(self, facts: ShardFacts, nbytes: int, read: Callable[[str], pa.Array]) -> None:
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
        self._read = read
        self._loaded: dict[str, pa.Array] = {}

    def __len__(self) -> int:
        return self.facts.samples

    def refuse_other(self, content: LazyBytes) -> None:
        """Refuse a shard with other first bytes, though its size and version are those indexed.

        Raises
        ------
        UnusableIndexError
        """
        if self.facts.head and digest_of_head(content) != self.facts.head:
            raise UnusableIndexError(
                "it is stale: it was written of a shard with another first member, and the same "
                "size and version. write_index(overwrite=True) rewrites it"
            )

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
